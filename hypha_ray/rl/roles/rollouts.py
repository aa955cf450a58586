"""Role of a rollout worker: generation and reward in one call, so that what comes of it is ready to be trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hypha_ray.rl.dataflow.sample import Sample
from hypha_ray.rl.roles.policies import Generator
from hypha_ray.rl.roles.reward import Reward
from hypha_ray.rl.roles.role import Outcome, Role


class Rollouts(Role):
    """Responses with rewards; a reply tells the version of the weights that they were sampled with.

    Args:
        generator: policy that responds.
        reward: functions that reward the responses.

    """

    def __init__(self, generator: Generator, reward: Reward) -> None:
        self._generator = generator
        self._reward = reward

    def generate(self, sample: Sample, arguments: Mapping[str, Any]) -> Outcome:
        """Respond to prompts and reward the responses; `version` is that of the weights."""
        generated = self._generator.generate(sample, arguments)
        made = generated.sample
        assert made is not None
        rewarded = self._reward.inference(sample.update(made), arguments)
        assert rewarded.sample is not None
        facts = {**rewarded.facts, "version": arguments["version"]}
        return Outcome(made.update(rewarded.sample), rewarded.sums, facts, generated.problems + rewarded.problems)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the generator's weights."""
        return self._generator.weights()

    def take_weights(self, weights: Mapping[str, torch.Tensor], eta: float) -> None:
        """Move the generator's weights."""
        self._generator.take_weights(weights, eta)
