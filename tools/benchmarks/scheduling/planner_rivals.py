"""Time of rounds of the real scheduler beside simpler rules, as ratios to a clairvoyant that knows every future batch.

Each rule starts each round from the same state of the same machines. Workers' speeds are spread 1 to 10.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from statistics import mean
from typing import Any, TypeAlias

from benchmarks.scheduling.unsteady_fleet import MESSAGE_S, Conditions, Machine, UnsteadyFleet
from hypha_ray.scheduler.planner import Pace, plan

SEEDS = 200
"""Fleets of a row."""
ROUNDS = 4
"""Rounds of a fleet, of which the first two are left out: there batch times are unknown or hardly known."""
LEARNING_ROUNDS = 2

CONDITIONS = {
    "exact": Conditions(),
    "noise": Conditions(noise=0.1),
    "drift": Conditions(noise=0.3, drift=0.2),
    "stragglers": Conditions(noise=0.3, drift=0.2, stragglers=0.05),
}
TARGETS = {"exact": 1.002, "noise": 1.02, "drift": 1.05, "stragglers": 1.06}
"""Greatest mean ratio with 20 batches a worker and round."""
SHAPES = ((8, 20), (32, 20), (8, 5), (32, 5))
"""Numbers of workers, and batches of an average worker in a round."""
ROWS = tuple(f"planner_{workers}x{batches}_{name}" for workers, batches in SHAPES for name in CONDITIONS)

REFERENCE_CAP_S = 10.0
REFERENCE_STEPS = 3
GUIDE_CAP_S = 300.0

Rule: TypeAlias = Callable[["Start"], float]
"""Returns the time that a rule's round takes."""


@dataclass(frozen=True, slots=True)
class Start:
    """State in which a round begins."""

    machines: Sequence[Machine]
    at: float
    """Time of the first batches."""
    done: tuple[int, ...]
    """Number of batches that each machine has done before."""
    target: int
    """Batches of the round."""


def planner_rivals(seeds: int = SEEDS, rows: Sequence[str] = ROWS) -> dict[str, dict[str, Any]]:
    """Mean ratios of the scheduler's rounds and of its rivals' to the clairvoyant's, for each kind of fleet."""
    measured: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        for workers, batches in SHAPES:
            for name, conditions in CONDITIONS.items():
                row = f"planner_{workers}x{batches}_{name}"
                if row not in rows:
                    continue
                trials = [(workers, batches, conditions, seed) for seed in range(seeds)]
                ratios: list[dict[str, float]] = []
                for trial in processes.map(_trial, *zip(*trials, strict=True), chunksize=5):
                    ratios += trial
                target = f"<= {TARGETS[name]}" if batches == 20 else ""
                measured[row] = _row(ratios, target) | {"fleets": seeds}
    return measured


def _row(ratios: Sequence[dict[str, float]], target: str) -> dict[str, Any]:
    ours = sorted(ratio["ours"] for ratio in ratios)
    row: dict[str, Any] = {"value": round(mean(ours), 4), "target": target}
    row["p95"] = round(ours[int(0.95 * len(ours))], 3)
    for rule in RULES:
        row[rule] = round(mean(ratio[rule] for ratio in ratios), 3)
    return row | {"rounds": len(ratios)}


def _trial(workers: int, batches: int, conditions: Conditions, seed: int) -> list[dict[str, float]]:
    """Ratios to the clairvoyant's time, by rule, for each round of a fleet that is counted."""
    machines = [Machine(seed, number, conditions) for number in range(workers)]
    fleet = UnsteadyFleet(machines, batches, ROUNDS).run()
    rules = {name: rule() for name, rule in RULES.items()}
    ratios: list[dict[str, float]] = []
    for timing in fleet.finished_rounds:
        start = Start(machines, timing.began_at + MESSAGE_S, timing.done, workers * batches)
        best_s = clairvoyant(start)
        ratio = {"ours": (timing.ended_at - timing.began_at) / best_s}
        for name, rule in rules.items():
            ratio[name] = rule(start) / best_s
        ratios.append(ratio)
    return ratios[LEARNING_ROUNDS:]


def clairvoyant(start: Start) -> float:
    """Least time in which the batches can be done, since all are taken in the order of their ends."""
    ends: list[tuple[float, int, int]] = []
    for number, machine in enumerate(start.machines):
        first = start.done[number]
        ends.append((start.at + machine.seconds(first, start.at), number, first))
    heapq.heapify(ends)
    for _ in range(start.target - 1):
        end, number, batch = ends[0]
        following_s = start.machines[number].seconds(batch + 1, end)
        heapq.heapreplace(ends, (end + following_s, number, batch + 1))
    return ends[0][0] - start.at + 2 * MESSAGE_S


class FixedSteps:
    """The same number of batches for all."""

    def __call__(self, start: Start) -> float:
        """Time of the slowest worker."""
        steps = -(-start.target // len(start.machines))
        longest_s = 0.0
        for number, machine in enumerate(start.machines):
            at = start.at
            for batch in range(steps):
                at += machine.seconds(start.done[number] + batch, at)
            longest_s = max(longest_s, at - start.at)
        return (longest_s + 2 * MESSAGE_S) * start.target / (steps * len(start.machines))


@dataclass(slots=True)
class _Worker:
    """A worker as a projecting scheduler knows it, in the present round."""

    batches: int = 0
    """Batches that it has done."""
    reported_at: float = 0.0
    """Time of its last report, since the round's start."""
    remaining: int | None = None
    """Batches after which it is to deliver; None before it is told."""


@dataclass(slots=True)
class Projection:
    """Each worker is told, at its own report, how many batches remain according to a projection with mean batch times.

    Args:
        cap_s: time since the round's start beyond which the rule looks no further.
        steps: number of batches of one worker beyond which it looks no further; None: no limit.

    The rule misses the target or exceeds it, so its time is taken per sample.

    """

    cap_s: float = GUIDE_CAP_S
    steps: int | None = None
    _observed: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Number of batches of each worker, and their mean seconds, since the run's start."""

    def __call__(self, start: Start) -> float:
        """Time from the round's start to the last delivery, times the target by the batches done."""
        fleet = [_Worker() for _ in start.machines]
        ends: list[tuple[float, int]] = []
        for number, machine in enumerate(start.machines):
            heapq.heappush(ends, (machine.seconds(start.done[number], start.at), number))
        remaining = start.target
        last_s = 0.0
        while ends:
            now, number = heapq.heappop(ends)
            remaining = max(0, remaining - 1)
            worker = fleet[number]
            self._observe(number, now - worker.reported_at)
            worker.reported_at = now
            worker.batches += 1
            if worker.remaining is None:
                worker.remaining = self._remaining(fleet, number, remaining)
            else:
                worker.remaining -= 1
            if worker.remaining is not None and worker.remaining <= 0:
                last_s = now
                continue
            seconds = start.machines[number].seconds(start.done[number] + worker.batches, start.at + now)
            heapq.heappush(ends, (now + seconds, number))
        return (last_s + 2 * MESSAGE_S) * start.target / sum(worker.batches for worker in fleet)

    def _observe(self, number: int, seconds: float) -> None:
        count, mean_s = self._observed.get(number, (0, 0.0))
        self._observed[number] = (count + 1, mean_s + (seconds - mean_s) / (count + 1))

    def _remaining(self, fleet: Sequence[_Worker], number: int, remaining: int) -> int | None:
        """Batches that remain for a worker; None if the rule doesn't look so far."""
        if self.steps is not None and remaining >= self.steps * len(fleet):
            return None
        paces: list[Pace] = []
        for other, (_, mean_s) in self._observed.items():
            paces.append(Pace(other, mean_s, 1, fleet[other].reported_at))
        allocation = plan(paces, remaining)
        if allocation.finish_s >= self.cap_s:
            return None
        if self.steps is not None and max(allocation.batches.values()) >= self.steps:
            return None
        return allocation.batches[number]


class ReferenceProjection(Projection):
    """The projection of the reference system, which looks ahead by 10 s of the round and 3 batches at most."""

    def __init__(self) -> None:
        super().__init__(REFERENCE_CAP_S, REFERENCE_STEPS)


RULES: dict[str, Callable[[], Rule]] = {"fixed": FixedSteps, "guide": Projection, "reference": ReferenceProjection}
