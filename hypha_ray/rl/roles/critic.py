"""Role of the model that values the states before tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hypha_ray.config import Job
from hypha_ray.model.critic import Critic
from hypha_ray.optim.joint import critic_settings
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.rl.algorithms.aggregation import by_token
from hypha_ray.rl.algorithms.values import clipped_value_loss
from hypha_ray.rl.dataflow.sample import Sample
from hypha_ray.rl.engines.native import Responses, accepted, positions
from hypha_ray.rl.packing import packed_tokens, responses_of, tokens_of
from hypha_ray.rl.policy import mixed_precision
from hypha_ray.rl.roles.role import Outcome, TrainedRole, facts_of
from hypha_ray.rl.roles.updates import train
from hypha_ray.rl.rollout import Valued
from hypha_ray.types import Sums


class Values(TrainedRole):
    """Critic in training.

    Args:
        job: the job file.
        critic: the model, in evaluation mode.
        autocast: dtype of mixed precision; None: full precision.

    """

    def __init__(self, job: Job, critic: Critic, autocast: torch.dtype | None) -> None:
        self._job = job
        self._critic = critic
        self._autocast = autocast
        self._device = critic.head.weight.device

    def initialize(self, steps: int) -> None:
        """Build the optimizer."""
        self.optimizer = build_optimizer(self._critic, critic_settings(self._job), steps, self._job.num_workers)

    @torch.no_grad()
    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> Outcome:
        """Compute the values before all tokens of responses."""
        values = self._values(responses_of(sample, self._device))
        return Outcome(packed_tokens(sample, {"values": values}))

    def train_step(self, sample: Sample, arguments: Mapping[str, Any]) -> Outcome:
        """Train on a batch, as `train`; the loss is a mean over tokens."""
        responses = responses_of(sample, self._device)
        kept = torch.from_numpy(sample.data["kept"]).to(self._device)
        columns = [tokens_of(sample, key, self._device) for key in ("values", "returns")]
        rows = Valued(responses, responses.mask * kept[:, None], *columns)
        return train(self._job, rows, self.optimizer, lambda mask: by_token(mask, 0), self._loss, arguments)

    def config(self) -> Mapping[str, Any]:
        """Return facts of the model."""
        return facts_of(self._critic)

    def _loss(self, part: Valued, weights: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        new = self._values(part.responses)
        loss, taken = clipped_value_loss(new, part.old, part.returns, self._job.rl.critic.value_clip)
        tokens = float(part.mask.sum())
        figures = {"value_loss": loss, "value_clip_share": taken}
        sums = {name: (float((figure.detach() * part.mask).sum()), tokens) for name, figure in figures.items()}
        return (loss * weights).sum(), sums

    def _values(self, responses: Responses) -> torch.Tensor:
        length = responses.mask.shape[1]
        with mixed_precision(self._device, self._autocast):
            values: torch.Tensor = self._critic(
                input_ids=responses.ids,
                attention_mask=responses.attention_mask,
                use_cache=False,
                **accepted(self._critic.base_model, positions(responses.attention_mask), length + 1),
            )
        return values[:, -length - 1 : -1].float()
