"""What goes wrong in a simulated run, and when: a walk picks kinds of faults, how often they come, and a job."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.types import SliceInfo, Source

if TYPE_CHECKING:
    from tests.support.walk import Walk

CONDITIONS = ("repeat", "reorder", "drop", "zombie", "problem")
"""What happens to messages and ends all the time, if a walk has it."""


class Weather:
    """The job, the machines and the faults of one walk.

    Args:
        rng: gives all of it.
        storm: whether anything goes wrong at all.

    """

    def __init__(self, rng: random.Random, storm: bool) -> None:
        self._random = rng
        self.job, self.slices = _job(rng), _slices(rng)
        self.held = rng.choice([6, 40])
        self.storm_s, self.gap_s = rng.uniform(10.0, 50.0), rng.choice([1.0, 3.0, 8.0])
        kinds = [*FAULTS, *CONDITIONS]
        self.longest_reduce_s = 1.0 if self.job.sync.in_flight == 1 else 15.0
        self._kinds = set(rng.sample(kinds, rng.randint(0, len(kinds)))) if storm else set[str]()
        if {"reorder", "drop"} <= self._kinds:  # Only of words in their order the last ones can be lost.
            self._kinds.remove(rng.choice(["reorder", "drop"]))
        self._speeds = [rng.uniform(0.3, 2.0) for _ in range(self.job.num_workers)]
        self._slow: set[int] = set()
        self._late_until: dict[int, float] = {}
        self.full_until: dict[int, float] = {}
        self._poisoned: set[int] = set()
        self._liars: set[int] = set()
        self._misbuilt: set[int] = set()
        self._flapping: dict[int, int] = {}
        self._over = not storm

    def happens(self, kind: str, rng: random.Random, probability: float) -> bool:
        return not self._over and kind in self._kinds and rng.random() < probability

    def strike(self, world: Walk) -> None:
        """Let one thing go wrong, if it can at all."""
        kinds = [kind for kind in FAULTS if kind in self._kinds]
        if kinds:
            kind = self._random.choice(kinds)
            world.trace.append(f"{world.now:8.3f} ~~~ {kind}")
            FAULTS[kind](self, world, self._random.randrange(self.job.num_workers))

    def clear_up(self, world: Walk) -> None:
        """From now on nothing goes wrong any more; what hangs stays so."""
        self._over = True
        for kept in (self._slow, self._late_until, self.full_until, self._poisoned, self._liars, self._misbuilt):
            kept.clear()
        self._flapping.clear()

    # ── what the weather does to everything ───────────────────────────────────────────────────────────────────────

    def batch_s(self, number: int, now: float) -> float:
        return self._speeds[number] * (6.0 if number in self._slow else 1.0)

    def delay_s(self, rng: random.Random, number: int, now: float) -> float:
        return rng.uniform(0.001, 3.5 if now < self._late_until.get(number, 0.0) else 0.1)

    def poisoned(self, sources: Iterable[Source]) -> set[int]:
        found = {source.worker for source in sources} & self._poisoned
        self._poisoned -= found
        return found

    def lies(self, source: Source) -> bool:
        lies = source.worker in self._liars
        self._liars.discard(source.worker)
        return lies

    def layout(self, source: Source) -> str:
        wrong = source.worker in self._misbuilt
        self._misbuilt.discard(source.worker)
        return "another layout" if wrong else "layout"

    def arrived(self, world: Walk, number: int) -> None:
        """A worker has come; in bad weather it goes at once."""
        if self._flapping.get(number, 0) > 0:
            self._flapping[number] -= 1
            world.later(self._random.uniform(0.0, 1.0), lambda: self._lose(world, number))

    # ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _lose(self, world: Walk, number: int) -> None:
        if number in world.workers:
            world.lose(number)

    def _lose_all(self, world: Walk, number: int) -> None:
        for one in list(world.workers):
            world.lose(one)

    def _hang(self, world: Walk, number: int) -> None:
        if number in world.workers:
            worker = world.workers[number]
            worker.freeze()
            if self._random.random() < 0.6:
                world.later(self._random.uniform(0.5, 12.0), worker.thaw)

    def _stick(self, world: Walk, number: int) -> None:
        if number in world.workers:
            world.workers[number].stuck = True

    def _slow_down(self, world: Walk, number: int) -> None:
        self._slow ^= {number}

    def _preempt(self, world: Walk, number: int) -> None:
        if number in world.workers:
            world.workers[number].leave("SIGTERM")

    def _drain(self, world: Walk, number: int) -> None:
        world.tell(c.Draining(tuple(sorted(world.workers))[: self._random.randint(1, 2)], "maintenance"))

    def _fill(self, world: Walk, number: int) -> None:
        self.full_until[number] = world.now + self._random.uniform(1.0, 40.0)

    def _flap(self, world: Walk, number: int) -> None:
        self._flapping[number] = self._random.randint(1, 6)
        self._lose(world, number)

    def _crash(self, world: Walk, number: int) -> None:
        world.crash()

    def _pause(self, world: Walk, number: int) -> None:
        world.pause(self._random.uniform(3.0, 70.0))

    def _poison(self, world: Walk, number: int) -> None:
        self._poisoned.add(number)

    def _lie(self, world: Walk, number: int) -> None:
        self._liars.add(number)
        self._lose(world, number)

    def _misbuild(self, world: Walk, number: int) -> None:
        if self._random.random() < 0.4:
            self._misbuilt.add(number)

    def _echo(self, world: Walk, number: int) -> None:
        if world.said:
            world.tell(self._random.choice(world.said))

    def _delay(self, world: Walk, number: int) -> None:
        self._late_until[number] = world.now + self._random.uniform(1.0, 10.0)


FAULTS: dict[str, Callable[[Weather, Walk, int], None]] = {
    "lose": Weather._lose,
    "lose all": Weather._lose_all,
    "hang": Weather._hang,
    "stick": Weather._stick,
    "slow down": Weather._slow_down,
    "preempt": Weather._preempt,
    "drain": Weather._drain,
    "no room": Weather._fill,
    "flap": Weather._flap,
    "crash": Weather._crash,
    "pause": Weather._pause,
    "poison": Weather._poison,
    "lie": Weather._lie,
    "misbuild": Weather._misbuild,
    "echo": Weather._echo,
    "delay": Weather._delay,
}
"""Kinds of faults, each of which strikes a worker number or all."""


def _job(rng: random.Random) -> Job:
    workers, replay = rng.randint(1, 4), rng.random() < 0.2
    quorum, seed = rng.choice([None, None, rng.randint(1, workers)]), rng.randrange(100)
    strategy = "diloco" if replay else ("sync", "async", "diloco", "diloco")[seed % 4]
    tables: dict[str, Any] = {
        "run": {"name": "run", "mode": "replay" if replay else "elastic", "seed": seed},
        "rounds": {
            "update_rounds": rng.randint(1, 5),
            "samples_between_updates": rng.randint(2, 24),
            "max_batch_size": rng.randint(1, 4),
            "evaluate_every": rng.randint(0, 2),
            "warmup_rounds": seed % 3 if strategy == "diloco" else 0,
        },
        "sync": {
            "quorum": quorum,
            "grace_s": rng.choice([0.0, 2.0, 6.0]),
            "strikes": rng.randint(1, 4),
            "weighting": rng.choice(["samples", "samples", "uniform"]),
            "strategy": strategy,
            "dynamic_local_steps": seed % 7 > 1,
            "period": rng.choice([None, None, 1, 3, 6]),
            "arrival_grace_s": rng.choice([None, 0.0, 0.5, 3.0]),
            "max_staleness": rng.choice([None, None, 0, 2]),
            **(_overlap(rng, seed) if strategy == "diloco" and not replay else {}),
        },
        "resources": {
            "num_workers": workers,
            "min_workers": rng.randint(1, workers),
            "start_deadline_s": rng.choice([15.0, 60.0]),
            "max_idle_s": rng.choice([20.0, 100.0]),
        },
        "worker": {"stall_s": 30.0, "report_every_s": rng.choice([0.5, 2.0])},
    }
    return Job.model_validate(tables)


def _overlap(rng: random.Random, seed: int) -> dict[str, Any]:
    sync = {"fragments": rng.randint(1, 3), "delay_steps": rng.choice([0, 0, 1, 3]), "stagger": rng.random() < 0.8}
    return {**sync, "in_flight": min(sync["fragments"], 1 + seed % 4) if sync["stagger"] else 1}


def _slices(rng: random.Random) -> list[SliceInfo]:
    splits = ["train"] * rng.randint(1, 4) + ["validation"] * rng.randint(0, 2)
    return [SliceInfo(i, f"slice-{i}", "0" * 64, rng.randint(1, 12), split) for i, split in enumerate(splits)]
