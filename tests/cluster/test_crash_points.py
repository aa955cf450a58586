"""Processes killed at every named point of a round: in replay mode nobody can tell from the result."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.failpoints import hits
from tests.support.jobs import Outcome, job_of, run_job

pytestmark = pytest.mark.usefixtures("local_ray")

ROUNDS = 3
AGAIN, ONCE = "1,3,5", "1,2,3"
"""Hits that kill in every round. A round, or a call, that is done again after a kill comes to its point again; one that
is safe by then isn't, and does not.
"""
POINTS = {
    "worker.step:1": "3,12,21",
    "worker.before_delta:1": AGAIN,
    "worker.mid_delta:0": AGAIN,
    "server.before_reduce": AGAIN,
    "server.after_reduce": AGAIN,
    "scheduler.before_reduce": AGAIN,
    "scheduler.after_reduce": AGAIN,
    "scheduler.before_persist": AGAIN,
    "scheduler.mid_broadcast": "1,4,8",
    "scheduler.after_commit": ONCE,
    "store.before_snapshot": AGAIN,
    "store.after_weights": AGAIN,
    "store.before_publish": AGAIN,
    "store.before_record": AGAIN,
    "store.before_link": AGAIN,
    "store.after_record": ONCE,
    "resume.before_read": AGAIN,
    "resume.after_read": AGAIN,
    "resume.before_begin": ONCE,
}
TOGETHER = (
    {"worker.step:1": "3", "worker.before_delta:1": "2", "worker.mid_delta:0": "3"},
    {"server.before_reduce": "1", "server.after_reduce": "2", "scheduler.mid_broadcast": "5"},
    {"scheduler.before_reduce": "1", "scheduler.after_reduce": "2", "scheduler.before_persist": "3"},
    {"store.before_snapshot": "1", "store.after_weights": "2", "store.before_publish": "3"},
    {"store.before_record": "1", "store.before_link": "2", "store.after_record": "3"},
    {"scheduler.after_commit": "1", "resume.before_read": "1"},
    {"resume.after_read": "1", "resume.before_begin": "1"},
)
"""Each point once: several in one run, one a round."""
BEGINS_WITH = "scheduler.after_commit=kill@1"
"""What there must be first for the points of a resumption to be come to."""


def replay_of(name: str, seed: int, corpus: Path, **testing: Any) -> Any:
    return job_of(
        name,
        corpus,
        run={"name": name, "mode": "replay", "seed": seed},
        rounds={"update_rounds": ROUNDS, "samples_between_updates": 48, "max_batch_size": 4, "evaluate_every": 0},
        resources={"num_workers": 2, "min_workers": 2},
        worker={"lease_s": 3.0},
        testing=testing,
    )


def traces(run: Outcome) -> list[tuple[Any, ...]]:
    """What must be the same in every run: weights, momentum, samples, and what went into each round."""
    return [
        (one["round"], one["parent_sha256"], one["theta_sha256"], one["outer_sha256"], one["spans"], one["cursors"])
        for one in run.commits()
    ]


@pytest.fixture(scope="module")
def calm(local_ray: None, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run(seed: int) -> list[tuple[Any, ...]]:
        return traces(run_job(replay_of(f"calm-{seed}", seed, corpus), tmp_path_factory.mktemp("calm"), corpus))

    return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A kill at each point in one of the rounds; or at each point in all of them, with three seeds."""
    if "kills" in metafunc.fixturenames:
        some = [(kills, at % 3) for at, kills in enumerate(TOGETHER)]
        every = [({point: at}, seed) for point, at in POINTS.items() for seed in range(3)]
        cases = every if metafunc.config.getoption("--all-seeds") else some
        metafunc.parametrize(("kills", "seed"), cases, ids=["+".join(kills) + f"-{seed}" for kills, seed in cases])


def test_crash_at_a_point_of_a_round_changes_no_bit(
    kills: dict[str, str], seed: int, calm: Any, corpus: Path, tmp_path: Path
) -> None:
    log = str(tmp_path / "hits.jsonl")
    specs = [f"{point}=kill@{at}" for point, at in kills.items()]
    if any(point.startswith("resume.") for point in kills) and "scheduler.after_commit" not in kills:
        specs.append(BEGINS_WITH)
    name = f"{next(iter(kills)).replace('.', '-').replace(':', '-')}-{seed}"
    run = run_job(replay_of(name, seed, corpus, failpoints=specs, failpoint_log=log), tmp_path, corpus)
    for point, at in kills.items():
        assert hits(log, point.partition(":")[0]) == len(at.split(","))
    assert traces(run) == calm(seed)
    used = run.used()
    assert set(used.values()) == {1}


def test_every_point_is_killed_at_in_some_run() -> None:
    assert sorted(point for kills in TOGETHER for point in kills) == sorted(POINTS)
