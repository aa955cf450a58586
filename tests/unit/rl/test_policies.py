"""Engines whose log-probabilities aren't those of the policy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import pytest
import torch

from hypha_ray.errors import ConfigError
from hypha_ray.rl.engines.native import Responses, Sampling, draw
from hypha_ray.rl.policy import Policy, sample_of
from hypha_ray.rl.policy_roles import Generator
from tests.support.rl import BATCH, END, job, policy_model


class Off:
    """Engine that adds something to the policy's own log-probabilities."""

    name, remedy = "an engine", "mend it"

    def __init__(self, policy: Policy, added: float) -> None:
        self._policy, self._added = policy, added

    def generate(
        self,
        model: Any,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
        keys: npt.NDArray[Any],
        sampling: Sampling,
        ends: Collection[int],
    ) -> Responses:
        """Respond with the policy's own responses."""
        own = self._policy.sample(ids, attention_mask, draw(0, keys, sampling), sampling, ends)
        return replace(own, logprobs=own.logprobs + self._added)

    def close(self) -> None:
        """Do nothing."""


def generator(added: float) -> Generator:
    policy = Policy(policy_model(), 1.0, None)
    return Generator(job().rl, 0, policy, {END}, Off(policy, added))


def test_engine_with_log_probabilities_that_are_no_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"RL021.*an engine.*log-probability nan.*mend it"):
        generator(torch.nan).generate(sample_of(BATCH), {})


@pytest.mark.parametrize(("added", "fits"), [(-0.09, True), (-0.11, False)])
def test_engine_is_refused_by_the_mean_distance_of_its_log_probabilities(added: float, fits: bool) -> None:
    if fits:
        generator(added).generate(sample_of(BATCH), {})
        return
    with pytest.raises(ConfigError, match="RL024"):
        generator(added).generate(sample_of(BATCH), {})
