"""Simulated runs under random faults, each from a seed: all invariants at every step, and an end once faults stop.

python -m pytest tests/unit/scheduler/test_simulation.py                            # as many as CI has time for
python -m pytest tests/unit/scheduler/test_simulation.py --walks 100000 --seed 5000  # more, and others
python -m pytest tests/unit/scheduler/test_simulation.py --seed 4711                # this one again
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import pytest

from hypha_ray.types import Source
from tests.support.walk import Walk
from tests.support.weather import FAULTS

WALKS = 2000
"""Simulated runs in CI."""
BLOCK = 100
"""Runs in one test."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        first, walks = metafunc.config.getoption("seed", None), metafunc.config.getoption("walks", None)
        walks = walks or (WALKS if first is None else 1)
        seeds = range(first or 0, (first or 0) + walks)
        blocks = [seeds[at : at + BLOCK] for at in range(0, walks, BLOCK)]
        metafunc.parametrize("seeds", blocks, ids=[f"{block[0]}-{block[-1]}" for block in blocks])


class Outcome(NamedTuple):
    """Findings of a walk that has ended well."""

    struck: frozenset[str]
    """Faults that have struck."""
    noted: frozenset[str]
    """Kinds of `NOTES` among its events."""
    least_s: float
    """Least time of any kind in the account of the whole run."""
    is_whole: bool
    """Whether all rounds are committed."""


@cache
def outcome_of(seed: int) -> Outcome:
    """Walk; raises an error with the last steps if an invariant is broken, or if the run doesn't end."""
    world = Walk(seed)
    try:
        world.run()
    except Exception as error:
        recent = "\n".join(line[:300] for line in world.trace[-40:])
        again = f"python -m pytest tests/unit/scheduler/test_simulation.py --seed {seed}"
        pytest.fail(f"{recent}\n\n{error!r}\nin step {world.steps}; again: {again}")
    text = "\n".join(world.trace)
    struck = frozenset(re.findall("~~~ (.+)", text))
    noted = frozenset(kind for kind in NOTES if f"'kind': '{kind}'" in text)
    time = world.core.closing_time
    least_s = 0.0 if time is None else min(time.seconds.values(), default=0.0)
    return Outcome(struck, noted, least_s, len(world.books.log) == world.job.rounds.update_rounds)


@pytest.mark.slow
@pytest.mark.long(keep=5)
def test_simulated_runs_keep_every_invariant_and_end(seeds: range) -> None:
    for seed in seeds:
        outcome_of(seed)


class Unequal(Walk):
    """A walk in which each worker's lease limits its batches: the fifth of each five has all that the job allows."""

    def batch_size(self, source: Source) -> int | None:
        tried = self.job.run.mode == "elastic" and not self.job.rounds.warmup_rounds
        return 1 + source.worker % 5 if tried else None


@pytest.mark.slow
def test_simulated_runs_with_unequal_batches_keep_every_invariant_and_use_them() -> None:
    sizes = set[frozenset[int]]()
    for seed in range(300):
        world = Unequal(seed)
        world.run()
        plans = {slot.member.plan for slot in world.core.view().roster.slots.values() if slot.member is not None}
        sizes.add(frozenset(plan.batch_size for plan in plans if plan is not None))
    assert max(map(len, sizes)) >= 3


def test_same_seed_gives_the_same_run() -> None:
    first, second = Walk(7).run(), Walk(7).run()
    assert first.trace == second.trace and first.steps > 100


@pytest.mark.slow
def test_weather_of_many_walks_has_every_fault_no_negative_time_and_ends_in_whole_runs() -> None:
    outcomes = [outcome_of(seed) for seed in range(150)]
    struck = frozenset().union(*(outcome.struck for outcome in outcomes))
    noted = frozenset().union(*(outcome.noted for outcome in outcomes))
    assert min(outcome.least_s for outcome in outcomes) >= 0
    assert struck == set(FAULTS)
    assert noted == set(NOTES)
    assert sum(outcome.is_whole for outcome in outcomes) > 90


NOTES = ("loss", "leave", "leaving", "reject", "exclude", "stale", "waiting", "correction", "problem", "join")
"""What is to be seen in the events of a hundred walks."""
