"""The trained policy as a role: it generates, scores its own tokens again, and is trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.failpoints import failpoint
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.rl.dataflow.sample import Sample
from hypha_ray.rl.engines.completions import Engine
from hypha_ray.rl.objective import logprob_gap
from hypha_ray.rl.packing import packed_tokens, responses_of
from hypha_ray.rl.policy import Policy
from hypha_ray.rl.roles.learner import Learner, step_on_parts
from hypha_ray.rl.roles.policies import Generator
from hypha_ray.rl.roles.role import Outcome, TrainedRole, facts_of
from hypha_ray.rl.roles.updates import train


class Actor(Generator, TrainedRole):
    """Policy in training.

    Args:
        job: the job file.
        policy: the policy.
        ends: ids of tokens that end a response.
        write: function that writes the trained weights to a folder.
        engine: engine that generates; None: the policy does itself.

    """

    def __init__(
        self,
        job: Job,
        policy: Policy,
        ends: Collection[int],
        write: Callable[[Path], None],
        engine: Engine | None = None,
    ) -> None:
        super().__init__(job.rl, job.run.seed, policy, ends, engine)
        self._job = job
        self._write = write
        self.learner = Learner(job, policy)

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
        """Compute the trainer's own log-probabilities; a figure says how far those of generation were off."""
        responses = responses_of(sample, self.device)
        own = self.policy.logprobs(responses)
        return Outcome(packed_tokens(sample, {"proximal_logprobs": own}), logprob_gap(own, responses))

    def train_step(self, sample: Sample, arguments: Mapping[str, Any]) -> Outcome:
        """Train on a batch, as `train`; or on gradients that others have computed."""
        learner = self.learner
        if "gradients" in sample.data:
            outcome = step_on_parts(sample, self.policy.model, self.optimizer, arguments.get("gradient"))
        else:
            rollout = learner.rollout(sample)
            outcome = train(self._job, rollout, self.optimizer, learner.weights_of, learner.loss, arguments)
        failpoint("rl.train")
        return outcome
