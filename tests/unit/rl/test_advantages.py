"""Advantages of groups in which rewards are equal, absent, or large beside their differences."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from hypha_ray.config.tables.rl import RL
from hypha_ray.rl.dataflow.sample import Meta, Sample
from hypha_ray.rl.roles.advantage import Advantage
from hypha_ray.rl.roles.role import Outcome

NAN = math.nan


def advantages(algorithm: str, *groups: list[float]) -> Outcome:
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
    def found(rewards: list[float], values: list[float]) -> Outcome:
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
