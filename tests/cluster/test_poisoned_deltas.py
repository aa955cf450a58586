"""Deltas that must not go in: each is rejected, and the round is to the bit what it is without that delta."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from faults import events, survive

from jobs import Outcome

POISONS = ("nan", "inf", "huge", "shape", "dtype", "names")
HARMLESS = ("repeat", "stale")


@pytest.fixture(scope="module")
def run_with(local_ray: None, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """A replayable run of three workers in which worker 1's second payload is damaged, or none is."""

    @cache
    def run(poison: str) -> Outcome:
        tables: dict[str, dict[str, Any]] = {
            "run": {"name": f"poison-{poison}", "mode": "replay"},
            "rounds": {"update_rounds": 3, "samples_between_updates": 48, "evaluate_every": 0},
            "resources": {"num_workers": 3, "min_workers": 3},
        }
        specs = [f"worker.payload:1={poison}@2"]
        folder = tmp_path_factory.mktemp(poison)
        return survive(f"poison-{poison}", corpus, folder, specs, 1, **tables)

    return run


@pytest.mark.parametrize("poison", POISONS)
def test_poisoned_delta_is_rejected_and_the_round_is_as_without_it(
    poison: str, run_with: Callable[[str], Outcome]
) -> None:
    run, other = run_with(poison), run_with("nan" if poison != "nan" else "inf")
    second = run.commits()[1]
    assert [one["worker"] for one in second["rejected"]] == [1]
    assert [one["worker"] for one in second["deltas"]] == [0, 2]
    assert [event["worker"] for event in events(run, "reject")] == [1]
    assert second["theta_sha256"] == other.commits()[1]["theta_sha256"]
    assert [one["worker"] for one in run.commits()[2]["deltas"]] == [0, 1, 2]


@pytest.mark.parametrize("message", HARMLESS)
def test_repeated_and_late_deltas_change_nothing(message: str, run_with: Callable[[str], Outcome]) -> None:
    run, other = run_with(message), run_with("repeat" if message != "repeat" else "stale")
    assert events(run, "stale")
    assert [one["theta_sha256"] for one in run.commits()] == [one["theta_sha256"] for one in other.commits()]
    assert all([delta["worker"] for delta in commit["deltas"]] == [0, 1, 2] for commit in run.commits())
    assert run.commits()[1]["theta_sha256"] != run_with("nan").commits()[1]["theta_sha256"]
