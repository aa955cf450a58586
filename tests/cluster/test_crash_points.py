"""Processes killed at every named point of a round: in replay mode nobody can tell from the result."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.failpoints import hits
from jobs import Outcome, job_of, run_job

pytestmark = pytest.mark.usefixtures("local_ray")

ROUNDS = 3
REPEATED = "1,3,5"
"""Hits that kill once in each round where the round, or the call, is done again after a kill."""
PASSED = "1,2,3"
"""The same where it isn't, because all is safe by then."""
POINTS = {
    "worker.step:1": "3,12,21",
    "worker.before_delta:1": REPEATED,
    "worker.mid_delta:0": REPEATED,
    "server.before_reduce": REPEATED,
    "server.after_reduce": REPEATED,
    "scheduler.before_reduce": REPEATED,
    "scheduler.after_reduce": REPEATED,
    "scheduler.before_persist": REPEATED,
    "scheduler.mid_broadcast": "1,4,8",
    "scheduler.after_commit": PASSED,
    "store.before_snapshot": REPEATED,
    "store.after_weights": REPEATED,
    "store.before_publish": REPEATED,
    "store.before_record": REPEATED,
    "store.before_link": REPEATED,
    "store.after_record": PASSED,
    "resume.before_read": REPEATED,
    "resume.after_read": REPEATED,
    "resume.before_begin": PASSED,
}
BEGINS_WITH = {name: ["scheduler.after_commit=kill@1"] for name in POINTS if name.startswith("resume.")}
"""What there must be first for these points to be come to."""


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
    """Each point with one of three seeds, or with all of them."""
    if "point" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-seeds")
        metafunc.parametrize(
            ("point", "seed"), [(p, s) for i, p in enumerate(POINTS) for s in range(3) if every or s == i % 3]
        )


def test_crash_at_a_point_of_every_round_changes_no_bit(
    point: str, seed: int, calm: Any, corpus: Path, tmp_path: Path
) -> None:
    log = str(tmp_path / "hits.jsonl")
    specs = [f"{point}=kill@{POINTS[point]}", *BEGINS_WITH.get(point, [])]
    name = f"{point.replace('.', '-').replace(':', '-')}-{seed}"
    run = run_job(replay_of(name, seed, corpus, failpoints=specs, failpoint_log=log), tmp_path, corpus)
    assert hits(log, point.partition(":")[0]) == 3
    assert traces(run) == calm(seed)
    used = run.used()
    assert set(used.values()) == {1}
