"""Defects of the scheduler's brain, planted one at a time: simulated runs or scenarios must find each."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from hypha_ray.scheduler.core import SchedulerCore
from tests.support import fleet
from tests.support.mutants_core import MUTANTS, mutant
from tests.support.mutants_found import FOUND_IN
from tests.support.walk import Walk
from tests.unit.scheduler import test_core, test_core_async, test_core_elastic, test_core_resume, test_core_waiting

SOON, LATE = range(60), range(60, 600)
"""Seeds before and after the scenarios are tried."""

SCENARIOS: list[Callable[[], None]] = [
    scenario
    for module in (test_core, test_core_elastic, test_core_waiting, test_core_resume, test_core_async)
    for name, scenario in vars(module).items()
    if name.startswith("test_") and not inspect.signature(scenario).parameters
]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.long(keep=30)
def test_simulation_or_scenario_finds_the_defect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = mutant(name)
    monkeypatch.setattr(fleet, "SchedulerCore", core)
    found = _known(core, FOUND_IN.get(name)) or _walked(core, SOON) or _played(SCENARIOS) or _walked(core, LATE)
    print(f"{name}: {found}")
    assert found is not None, f"nobody noticed: {name}"


def _walked(core: type[SchedulerCore], seeds: range) -> str | None:
    for seed in seeds:
        try:
            Walk(seed, core).run()
        except Exception as failure:
            return f"seed {seed}, {failure!r}"
    return None


def _known(core: type[SchedulerCore], place: int | str | None) -> str | None:
    if isinstance(place, int):
        return _walked(core, range(place, place + 1))
    return _played([scenario for scenario in SCENARIOS if scenario.__name__ == place])


def _played(scenarios: list[Callable[[], None]]) -> str | None:
    for scenario in scenarios:
        try:
            scenario()
        except Exception as failure:
            return f"{scenario.__name__}, {type(failure).__name__}"
    return None


@pytest.mark.slow
def test_brain_without_a_defect_is_not_blamed() -> None:
    assert _walked(SchedulerCore, range(3)) is None and _played(SCENARIOS) is None  # More walks: test_simulation.py.
