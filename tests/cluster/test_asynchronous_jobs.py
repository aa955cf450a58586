"""Asynchronous jobs on a local Ray cluster: whoever dies, every sample is in one commit, and the others go on."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import events, survive
from tests.support.jobs import Outcome

pytestmark = pytest.mark.usefixtures("local_ray")

ROOT = Path(__file__).parents[2]
UNEQUAL: dict[str, Any] = {
    "sync": {"strategy": "async"},
    "rounds": {"update_rounds": 10, "samples_between_updates": 96, "max_batch_size": 4, "evaluate_every": 4},
    "testing": {"batch_times_s": [0.1, 0.3]},
}


def learned(run: Outcome) -> None:
    """So few rounds with so much momentum overshoot: θ is better than a guess, and what is trained from it falls."""
    first, *_, last = (record["loss"] for record in run.of_kind("round"))
    assert last < first - 1
    assert all(record["val_loss"] < math.log(256) - 1 for record in run.of_kind("eval"))


def test_killed_worker_comes_back_and_every_sample_is_in_one_commit(corpus: Path, tmp_path: Path) -> None:
    tables = {**UNEQUAL, "sync": {"strategy": "async", "arrival_grace_s": 0.0}}  # So the second delta of two is stale.
    run = survive("async-kill", corpus, tmp_path, ["worker.step:1=kill@16"], 1, **tables)
    assert [event["worker"] for event in events(run, "loss")] == [1]
    arrivals, records = events(run, "arrival"), run.of_kind("round")
    sizes = Counter(arrival["round"] for arrival in arrivals)  # Deltas that come together are in one round.
    assert sorted(sizes) == list(range(10)) and set(sizes.values()) <= {2, 3}
    assert len({one["incarnation"] for one in arrivals if one["worker"] == 1}) == 2, "it isn't back"
    found = [max(one["staleness"] for one in arrivals if one["round"] == number) for number in range(10)]
    assert [record["staleness_max"] for record in records] == found and max(found) > 0
    evaluations = run.of_kind("eval")
    assert [record["round"] for record in evaluations] == [3, 7, 9]
    learned(run)


@pytest.mark.long
def test_external_trainer_and_codec_with_feedback_take_part(corpus: Path, tmp_path: Path) -> None:
    trainer = f"{sys.executable} {ROOT / 'examples' / 'torch_trainer.py'}"
    tables = {**UNEQUAL, "sync": {"strategy": "async", "codec": "int4", "fragments": 2}, "testing": {"batch_s": 0.1}}
    tables |= {"bridge": {"commands": [trainer]}, "worker": {"lease_s": 20.0}}
    run = survive("async-outside", corpus, tmp_path, [], 0, **tables)
    assert {arrival["worker"] for arrival in events(run, "arrival")} == {0, 1}
    assert not events(run, "reject") and not events(run, "loss")
    learned(run)


@pytest.mark.long
def test_scheduler_that_dies_costs_what_came_since_the_last_commit(corpus: Path, tmp_path: Path) -> None:
    tables = {**UNEQUAL, "rounds": {**UNEQUAL["rounds"], "update_rounds": 6, "samples_between_updates": 48}}
    hits = {"before_reduce": 4, "after_reduce": 7, "after_commit": 4}
    specs = [f"scheduler.{point}=kill@{hit}" for point, hit in hits.items()]
    run = survive("async-scheduler", corpus, tmp_path, specs, 3, **tables)
    resumed_at = [event["next_round"] for event in events(run, "attempt")]
    assert len(resumed_at) == 4 and resumed_at == sorted(resumed_at) and resumed_at[1] > 0 and resumed_at[-1] < 6
    assert {len(commit["deltas"]) for commit in run.commits()} <= {2, 3}
