"""The planner: how good its plans are, and how long it takes."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.scheduling.planner_rivals import ROWS as RIVAL_ROWS
from benchmarks.scheduling.planner_rivals import planner_rivals
from hypha_ray.scheduler.planner import Pace, plan

ROWS = ("planner", *RIVAL_ROWS)


def planner() -> dict[str, dict[str, Any]]:
    """Finish of a plan, and times of rounds, as ratios to the best."""
    return {"planner": _exactness(), **planner_rivals()}


def _exactness() -> dict[str, Any]:
    """Finish of the plan ÷ the best finish of all ways to share the batches, the worst of 1 000 random small fleets."""
    dice = random.Random(0)
    worst = 0.0
    for _ in range(1000):
        fleet = _fleet(dice, dice.randint(1, 4))
        target = dice.randint(1, 12) * min(pace.batch_size for pace in fleet)
        worst = max(worst, plan(fleet, target).finish_s / _best(fleet, target))
    return {"value": worst, "target": "= 1.000", "fleets": 1000, "workers": "1-4", "seed": 0}


def plan_time() -> dict[str, dict[str, Any]]:
    """Milliseconds for one plan of a large mixed fleet."""
    dice = random.Random(1)
    rows = {}
    for workers, target, limit in ((64, 20_000, "< 1"), (10_000, 3_000_000, "< 50")):
        fleet = _fleet(dice, workers)
        value = _milliseconds(lambda fleet=fleet, target=target: plan(fleet, target))  # type: ignore[misc]
        rows[f"plan_{workers}_ms"] = {"value": value, "target": limit, "unit": "ms", "samples": target, "runs": 20}
    return rows


def _fleet(dice: random.Random, workers: int) -> list[Pace]:
    return [
        Pace(
            worker=worker,
            batch_s=dice.uniform(0.05, 5.0),
            batch_size=dice.choice([1, 2, 4, 8, 16]),
            offset_s=dice.choice([0.0, dice.uniform(0.0, 2.0)]),
        )
        for worker in range(workers)
    ]


def _best(fleet: list[Pace], target: int) -> float:
    """The earliest finish over every combination of batch counts that reaches the target."""
    most = [-(-target // pace.batch_size) for pace in fleet]
    finishes = (
        max(pace.offset_s + n * pace.batch_s for pace, n in zip(fleet, counts, strict=True) if n)
        for counts in itertools.product(*(range(limit + 1) for limit in most))
        if sum(n * pace.batch_size for pace, n in zip(fleet, counts, strict=True)) >= target
    )
    return min(finishes)


def _milliseconds(work: Callable[[], object], runs: int = 20) -> float:
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times) * 1e3
