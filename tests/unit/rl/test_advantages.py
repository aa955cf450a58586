"""Advantages of groups in which rewards are equal, absent, or large beside their differences."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from hypha_ray.config.rl import RL
from hypha_ray.rl.dataflow.model_worker import RoleOutcome
from hypha_ray.rl.dataflow.requests import Meta, Sample
from hypha_ray.rl.reward_role import Advantage

NAN = math.nan


def advantages(algorithm: str, *groups: list[float]) -> RoleOutcome:
    """Give responses of one token each these rewards, and compute their advantages."""
    ids, ones = tuple(map(str, range(len(groups)))), tuple((1,) * len(group) for group in groups)
    rewards = np.array(groups).ravel()
    columns = {"responses": np.ones(rewards.size, np.int64), "rewards": rewards, "ended": rewards > 0}
    sample = Sample(Meta(ids, dict.fromkeys(columns, ones)), columns)
    return Advantage(RL.model_validate({"algorithm": algorithm})).inference(sample, {})


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "reinforce++", "dapo", "gspo"])
@pytest.mark.parametrize("absent", [0, 1, 3])
def test_groups_of_equal_rewards_teach_nothing_whatever_the_reward_is(algorithm: str, absent: int) -> None:
    groups = [[reward] * (8 - absent) + [NAN] * absent for reward in (0.1, 0.3, 0.7, 1.1, 10.1, -100.3, 1e4 / 3)]
    found = advantages(algorithm, *groups)

    assert found.sample is not None
    assert not found.sample.data["advantages"].any()
    assert found.sums["equal_groups"] == (7, 7)
    assert found.sample.data["kept"].any() == (algorithm != "dapo")


def test_small_differences_of_large_rewards_are_kept() -> None:
    group = [1e6 + step / 64 for step in (0, 1, 2, 5)]
    exact = [Fraction(one) for one in group]
    mean = sum(exact) / 4
    std = math.sqrt(sum((one - mean) ** 2 for one in exact) / 3)
    found = advantages("grpo", group)

    assert found.sample is not None and found.sample.data["advantages"].dtype == np.float32
    expected = [float(one - mean) / (std + 1e-6) for one in exact]
    assert found.sample.data["advantages"].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_response_without_a_reward_is_as_if_it_were_not_there_with_a_critic() -> None:
    def found(rewards: list[float], values: list[float]) -> RoleOutcome:
        ids, two, one = tuple(map(str, range(len(rewards)))), ((2,),) * len(rewards), ((1,),) * len(rewards)
        columns = {"responses": np.ones(2 * len(rewards), np.int64), "values": np.array(values, np.float32)}
        data = {**columns, "rewards": np.array(rewards, float), "ended": np.ones(len(rewards), bool)}
        lengths = {name: two if name in columns else one for name in data}
        rl = RL.model_validate({"algorithm": "ppo", "group_size": 1})
        return Advantage(rl).inference(Sample(Meta(ids, lengths), data), {})

    some, all_ = found([1, -1], [0.2, 0.4, -0.3, 0.1]).sample, found([1, NAN, -1], [0.2, 0.4, 9, 9, -0.3, 0.1]).sample
    assert some is not None and all_ is not None
    assert all_.data["kept"].tolist() == [True, False, True]
    assert all_.data["advantages"].tolist() == pytest.approx(np.insert(some.data["advantages"], 2, [0, 0]).tolist())
    assert np.delete(all_.data["returns"], [2, 3]).tolist() == some.data["returns"].tolist()


ABSENT = [[1.0, 0.0, NAN, NAN], [NAN, 0.5, 2.0, 0.5], [NAN, 0.3, NAN, NAN], [NAN, NAN, NAN, NAN]]
"""Rewards of four groups: two, three, one and none are there."""
TOKENS = [[1, 3, 5, 5], [5, 2, 1, 4], [5, 6, 5, 5], [2, 2, 2, 2]]
EXPECTED = {
    "group_std": [
        [math.sqrt(0.5), -math.sqrt(0.5), 0, 0],
        [0, -0.5 / math.sqrt(0.75), 1 / math.sqrt(0.75), -0.5 / math.sqrt(0.75)],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ],
    "group_mean": [[0.5, -0.5, 0, 0], [0, -0.5, 1, -0.5], [0, 0, 0, 0], [0, 0, 0, 0]],
    "leave_one_out": [[1, -1, 0, 0], [0, -0.75, 1.5, -0.75], [0, 0, 0, 0], [0, 0, 0, 0]],
}
"""Advantages by hand: group means are 1/2 and 1; deviations, of n - 1, are the roots of 1/2 and 3/4."""


def by_batch() -> list[list[float]]:
    """Distances to the group's mean, normalised over the tokens of responses whose rewards are there."""
    there = ~np.isnan(np.array(ABSENT))
    centered = np.array(EXPECTED["group_mean"])
    tokens = np.repeat(centered[there], np.array(TOKENS)[there])
    return np.where(there, (centered - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8), 0).tolist()


def with_gap(gap: float) -> Sample:
    """Responses of `TOKENS` tokens, each of them `gap` from the reference, with the rewards of `ABSENT`."""
    lengths, ids = tuple(map(tuple, TOKENS)), tuple(map(str, range(len(ABSENT))))
    ones = tuple((1,) * len(group) for group in ABSENT)
    total = int(np.sum(TOKENS))
    zeros, reference = np.zeros(total, np.float32), np.full(total, -gap, np.float32)
    by_token = {"responses": np.ones(total, np.int64), "logprobs": zeros}
    by_token |= {"proximal_logprobs": zeros, "reference_logprobs": reference}
    flat = np.array(ABSENT).ravel()
    data = {**by_token, "rewards": flat, "ended": np.ones(len(flat), bool)}
    return Sample(Meta(ids, {name: lengths if name in by_token else ones for name in data}), data)


def rewarded(settings: dict[str, object], gap: float = 0.0) -> RoleOutcome:
    """Compute the advantages of `with_gap`."""
    return Advantage(RL.model_validate({"group_size": 4, **settings})).inference(with_gap(gap), {})


def of_responses(found: RoleOutcome) -> list[list[float]]:
    """The advantage of each response, which is that of each of its tokens."""
    assert found.sample is not None
    parts = np.split(found.sample.data["advantages"], np.cumsum(np.array(TOKENS).ravel())[:-1])
    assert all(len(set(part.tolist())) == 1 for part in parts)
    return np.array([part[0] for part in parts]).reshape(4, 4).tolist()


@pytest.mark.parametrize(
    ("algorithm", "advantage"),
    [
        ("grpo", "group_std"),
        ("dapo", "group_std"),
        ("gspo", "group_std"),
        ("dr_grpo", "group_mean"),
        ("rloo", "leave_one_out"),
        ("reinforce++", "batch_std"),
    ],
)
def test_absent_rewards_have_no_part_in_sizes_means_and_deviations(algorithm: str, advantage: str) -> None:
    found = rewarded({"algorithm": algorithm})

    expected = by_batch() if advantage == "batch_std" else EXPECTED[advantage]
    np.testing.assert_allclose(of_responses(found), expected, atol=1e-5)
    assert found.sums["equal_groups"] == (0, 2)


def test_divergence_taken_off_the_reward_gives_an_absent_one_no_advantage() -> None:
    """A token costs 0.1 x 0.5; a response of more tokens has more taken off."""
    settings: dict[str, object] = {"algorithm": "dr_grpo", "kl": 0.1, "kl_place": "reward", "kl_estimator": "k1"}
    found = rewarded({**settings, "reference": "initial"}, gap=0.5)

    net = np.array(ABSENT) - 0.05 * np.array(TOKENS)
    expected = [group - np.nanmean(group) for group in net[:3]]
    np.testing.assert_allclose(of_responses(found)[:3], np.nan_to_num(expected), atol=1e-6)
    assert of_responses(found)[3] == [0, 0, 0, 0]


def test_a_repeated_request_of_a_step_adapts_the_coefficient_once() -> None:
    """The divergence of 0.5 is far above its target: an error of a fifth, times 16 responses over the horizon."""
    settings = {"kl": 0.1, "kl_place": "reward", "kl_estimator": "k1", "kl_target": 0.01, "kl_horizon": 32}
    rl = RL.model_validate({"algorithm": "grpo", "reference": "initial", **settings})
    sample, role = with_gap(0.5), Advantage(rl)
    first, again = (role.inference(sample, {"step": 0}) for _ in range(2))
    later = role.inference(sample, {"step": 1})

    assert first.sums == again.sums
    assert first.sample is not None and again.sample is not None
    np.testing.assert_array_equal(first.sample.data["advantages"], again.sample.data["advantages"])
    assert later.sums["kl_coefficient"][0] == pytest.approx(0.1 * (1 + 0.2 * 16 / 32))
    assert role.kl == pytest.approx(0.1 * (1 + 0.2 * 16 / 32) ** 2)
