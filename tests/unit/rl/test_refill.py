"""Prompts in the place of those whose groups have no signal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config.load import load
from hypha_ray.errors import HyphaError
from hypha_ray.rl.batches import Refill
from hypha_ray.rl.dataflow.requests import Reply
from hypha_ray.rl.island import Island
from hypha_ray.rl.policy import prompt_ids
from hypha_ray.types import Samples, joined
from tests.support.rl import job, prompts, tokenizer


def batches(*sizes: int) -> Iterator[Samples]:
    """Batches of prompts one after the other, each prompt with a place of its own."""
    start = 0
    for size in sizes:
        batch = prompts([f"{number}=" for number in range(size)], ["1"] * size)
        yield Samples(batch.arrays, np.array([[0, 0, start + row] for row in range(size)], np.int64))
        start += size


class Draws:
    """Rollouts, of which some prompts have no signal."""

    def __init__(self, without_signal: set[str]) -> None:
        self._without_signal = without_signal
        self.drawn: list[list[str]] = []

    def __call__(self, samples: Samples) -> Mapping[str, Sequence[Reply]]:
        ids = list(prompt_ids(samples.keys))
        self.drawn.append(ids)
        half = len(ids) // 2
        replies = []
        for part in (ids[:half], ids[half:]):  # Two workers.
            facts = {"without_signal": [name for name in part if name in self._without_signal]}
            replies.append(Reply(worker=0, request=0, facts=facts))
        return {"rew_inf": replies}


def names(*numbers: int) -> list[str]:
    return [f"0-0-{number}" for number in numbers]


def refilled(draws: int, without_signal: set[int], *sizes: int) -> tuple[Any, Draws]:
    upcoming = batches(*sizes)
    batch = next(upcoming)
    refill = Refill(draws)
    refill.announce(upcoming)
    rollouts = Draws(set(names(*without_signal)))
    first = refill.refilled(batch, rollouts)
    again = refill.refilled(batch, Draws(set(names(*without_signal))))
    assert prompt_ids(again.batch.keys) == prompt_ids(first.batch.keys) and again.extra == first.extra
    return first, rollouts


def test_groups_without_signal_are_replaced_by_the_next_prompts_of_the_round() -> None:
    result, rollouts = refilled(2, {1, 2, 5}, 4, 4, 4)

    assert rollouts.drawn == [names(0, 1, 2, 3), names(4, 5), names(6)]
    assert list(prompt_ids(result.batch.keys)) == names(0, 3, 4, 6)
    assert result.extra == 3
    assert sorted(result.left_out) == names(1, 2, 5)


def test_a_batch_with_a_signal_draws_nothing() -> None:
    result, rollouts = refilled(5, {7}, 4, 4)

    assert rollouts.drawn == [names(0, 1, 2, 3)] and result.extra == 0 and result.left_out == ()


def test_the_bound_of_draws_ends_a_refill() -> None:
    result, _ = refilled(1, {1, 4}, 2, 4, 4)
    assert list(prompt_ids(result.batch.keys)) == names(0, 2) and result.extra == 1

    result, rollouts = refilled(1, {0, 1, 2}, 3, 3, 3)
    assert list(prompt_ids(result.batch.keys)) == names(3, 4, 5) and result.extra == 3
    assert len(rollouts.drawn) == 2


def test_a_refill_goes_over_several_batches_and_ends_with_the_prompts() -> None:
    result, rollouts = refilled(9, {0, 1, 2, 3, 4, 5}, 4, 1, 2)

    assert rollouts.drawn == [names(0, 1, 2, 3), names(4, 5, 6)]
    assert list(prompt_ids(result.batch.keys)) == names(6)
    assert result.extra == 3


def test_the_first_batch_stays_if_no_group_has_a_signal() -> None:
    result, _ = refilled(1, set(range(9)), 2, 2)

    assert list(prompt_ids(result.batch.keys)) == names(0, 1)
    assert result.extra == 2 and sorted(result.left_out) == names(2, 3)


def island(**rl: Any) -> Island:
    return Island(job(algorithm="dapo", **rl), tokenizer())


NO_SIGNAL = "x" * 30
"""Answer of which no response has any place right."""


def mixed() -> list[Samples]:
    """A batch of which two prompts have no signal, and the next one."""
    first = prompts(["12=", "345=", "7=", "98="], ["21", NO_SIGNAL, "7", NO_SIGNAL])
    second = prompts(["4=", "61=", "5=", "8="], ["4", "16", "5", "8"])
    return [first, Samples(second.arrays, second.keys + np.array([0, 0, 4]))]


def rows_of(samples: Samples, rows: list[int]) -> Samples:
    return Samples({name: array[rows] for name, array in samples.arrays.items()}, samples.keys[rows])


def test_a_refilled_step_is_the_step_on_the_groups_that_have_a_signal() -> None:
    first, second = mixed()
    ours, plain = island(refill=3), island()
    ours.announce(iter([second]))
    result = ours.step(first)
    left = rows_of(first, [0, 2])
    right = rows_of(second, list(range(result.extra)))
    twin = plain.step(joined([left, right]))

    assert result.extra >= 2
    assert result.scored == twin.scored
    for name, tensor in ours.model.named_parameters():
        torch.testing.assert_close(dict(plain.model.named_parameters())[name], tensor, atol=2e-4, rtol=1e-3)
    assert result.sums["extra_prompts"] == (result.extra, 1)
    shown = [record["advantage"] for record in result.shown]
    assert len(shown) == 4 and sum(shown) == pytest.approx(0, abs=1e-4)
    assert result.sums["equal_groups"][0] >= 2
    assert result.sums["reward"][1] == 4 * (4 + result.extra)


def test_without_more_prompts_the_step_is_that_without_refill() -> None:
    first, _ = mixed()
    ours, plain = island(refill=3), island()
    ours.announce(iter(()))

    result, expected = ours.step(first), plain.step(first)

    assert result.extra == 0 and result.scored == expected.scored
    for name, tensor in ours.model.named_parameters():
        torch.testing.assert_close(dict(plain.model.named_parameters())[name], tensor, atol=2e-4, rtol=1e-3)


def test_nothing_is_kept_of_earlier_steps() -> None:
    ours = island(refill=3)
    for number in range(3):
        first, second = (Samples(batch.arrays, batch.keys + np.array([number, 0, 0])) for batch in mixed())
        ours.announce(iter([second]))
        ours.step(first)

    stored = {name for samples in ours._first._storage._samples.values() for sample in samples for name in sample.ids}
    assert stored and all(name.startswith("2-") for name in stored)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rl.algorithm=grpo"], "rl.drop_equal_groups"),
        (["--rl.algorithm=dapo", "--rl.staleness=1", "--rl.model_workers=2"], "rl.staleness"),
        (["--rl.algorithm=dapo", "--sync.strategy=sync"], "sync"),
        (["--rl.algorithm=ppo", "--rl.drop_equal_groups=true"], "rl.advantage"),
    ],
)
def test_what_excludes_a_refill_is_named(flags: list[str], told: str) -> None:
    with pytest.raises(HyphaError, match=r"rl\.refill") as caught:
        load(["--dataset.path", "unused", "--rl.refill=2", *flags])

    assert told in str(caught.value) and "Fix: " in str(caught.value)
