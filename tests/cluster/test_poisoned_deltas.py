"""Deltas that must not go in: each is rejected, and the round is to the bit what it is without that delta."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import events, survive
from tests.support.jobs import Outcome

POISONS = ("nan", "inf", "huge", "shape", "dtype", "names")
HARMLESS = ("repeat", "stale")


@pytest.fixture(scope="module")
def run_with(local_ray: None, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """A replayable run of three workers in which worker 1's payloads are damaged, one way a round, after the first."""

    @cache
    def run(*ways: str) -> Outcome:
        tables: dict[str, dict[str, Any]] = {
            "run": {"name": f"poison-{ways[0]}", "mode": "replay"},
            "rounds": {"update_rounds": len(ways) + 2, "samples_between_updates": 48, "evaluate_every": 0},
            "resources": {"num_workers": 3, "min_workers": 3},
            "sync": {"strikes": len(ways) + 1},
        }
        specs = [f"worker.payload:1={way}@{hit}" for hit, way in enumerate(ways, 2)]
        folder = tmp_path_factory.mktemp(ways[0])
        return survive(f"poison-{ways[0]}", corpus, folder, specs, len(ways), **tables)

    return run


def hashes(run: Outcome) -> list[str]:
    return [commit["theta_sha256"] for commit in run.commits()]


def test_poisoned_delta_is_rejected_and_the_round_is_as_without_it(run_with: Callable[..., Outcome]) -> None:
    """In every round two ways are compared: as if the delta weren't there, so one is as good as the other."""
    run, other = run_with(*POISONS), run_with(*reversed(POISONS))
    first, *damaged, last = run.commits()
    assert [[one["worker"] for one in commit["rejected"]] for commit in damaged] == [[1]] * len(POISONS)
    assert [[one["worker"] for one in commit["deltas"]] for commit in damaged] == [[0, 2]] * len(POISONS)
    assert [event["worker"] for event in events(run, "reject")] == [1] * len(POISONS)
    assert hashes(run) == hashes(other)
    assert [one["worker"] for one in first["deltas"]] == [one["worker"] for one in last["deltas"]] == [0, 1, 2]


def test_repeated_and_late_deltas_change_nothing(run_with: Callable[..., Outcome]) -> None:
    run, other = run_with(*HARMLESS), run_with(*reversed(HARMLESS))
    assert events(run, "stale") and events(other, "stale")
    assert hashes(run) == hashes(other)
    assert all([delta["worker"] for delta in commit["deltas"]] == [0, 1, 2] for commit in run.commits())
    assert hashes(run)[1] != hashes(run_with(*POISONS))[1]
