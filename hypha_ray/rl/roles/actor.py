"""The trained policy as a role: it generates, scores its own tokens again, and is trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from hypha_ray.config import Job
from hypha_ray.failpoints import failpoint
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.rl.algorithms.losses import decoupled_weight, truncated_weight
from hypha_ray.rl.dataflow.sample import Sample
from hypha_ray.rl.engines.server import ServerEngine
from hypha_ray.rl.objective import Objective
from hypha_ray.rl.packing import packed_tokens, responses_of, tokens_of
from hypha_ray.rl.policy import Policy
from hypha_ray.rl.roles.policies import Generator
from hypha_ray.rl.roles.role import Outcome, TrainedRole, facts_of
from hypha_ray.rl.roles.updates import train
from hypha_ray.rl.rollout import Rollout
from hypha_ray.types import Sums


class Actor(Generator, TrainedRole):
    """Policy in training.

    Args:
        job: the job file.
        policy: the policy.
        ends: ids of tokens that end a response.
        write: function that writes the trained weights to a folder.
        server: server that generates; None: the policy does itself.

    """

    def __init__(
        self,
        job: Job,
        policy: Policy,
        ends: Collection[int],
        write: Callable[[Path], None],
        server: ServerEngine | None = None,
    ) -> None:
        super().__init__(job.rl, job.run.seed, policy, ends, server)
        self._job, self._objective, self._write = job, Objective(job.rl), write

    def save(self, folder: str) -> None:
        """Write the policy for `from_pretrained`."""
        self._write(Path(folder))

    def config(self) -> Mapping[str, Any]:
        """Return facts of the model."""
        return facts_of(self.policy.model)

    def initialize(self, steps: int) -> None:
        """Build the optimizer."""
        job = self._job
        self.optimizer = build_optimizer(self.policy.model, job.inner_optimizer, steps, job.num_workers)

    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> Outcome:
        """Compute the trainer's own log-probabilities; figures say how far generation's and its weights were off."""
        responses = responses_of(sample, self.device)
        own = self.policy.logprobs(responses)
        gap = float(((own - responses.logprobs).abs() * responses.mask).sum())
        made, tokens = packed_tokens(sample, {"proximal_logprobs": own}), float(responses.mask.sum())
        sums = {"logprob_gap": (gap, tokens)}
        if "versions" in sample.data:
            sums["staleness"] = float((arguments["version"] - sample.data["versions"]).sum()), tokens
        return Outcome(made, sums)

    def train_step(self, sample: Sample, arguments: Mapping[str, Any]) -> Outcome:
        """Train on a batch, as `train`."""
        rollout = self._rollout(sample)
        outcome = train(self._job, rollout, self.optimizer, self._objective.weights, self._loss, arguments)
        failpoint("rl.train")
        return outcome

    def _rollout(self, sample: Sample) -> Rollout:
        responses = responses_of(sample, self.device)
        kept = torch.from_numpy(sample.data["kept"]).to(self.device)
        columns = {
            key: tokens_of(sample, key, self.device)
            for key in ("advantages", "reference_logprobs", "proximal_logprobs")
            if key in sample.data
        }
        old = columns.get("proximal_logprobs")
        return Rollout(
            responses,
            responses.mask * kept[:, None],
            columns["advantages"],
            responses.logprobs if old is None else old,
            columns.get("reference_logprobs"),
            None if old is None else self._correction(old, responses.logprobs),
        )

    def _correction(self, proximal: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
        """Return the weight of each token for what lies between its sampling and its training."""
        cap = self._job.rl.behaviour_cap
        if self._job.rl.is_asynchronous or cap is None:
            return decoupled_weight(proximal, behaviour, cap)
        return truncated_weight(proximal, behaviour, cap)

    def _loss(self, part: Rollout, weights: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        scores = self.policy.score(part.responses, entropy_gradient=self._job.rl.entropy > 0)
        return self._objective.loss(part, weights, scores)
