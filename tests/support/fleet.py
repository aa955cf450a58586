"""Scenarios of the scheduler's core: a fleet with given speeds and faults, and a record of everything it commanded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.barrier.round import LOST
from hypha_ray.scheduler.core import SchedulerCore
from hypha_ray.scheduler.messages import ResumePoint
from hypha_ray.scheduler.worker_plans import Sizes
from hypha_ray.simulation.world import World
from hypha_ray.types import Contribution, Delta, Evaluated, Rejection, SliceInfo, Source, Verdict
from tests.support.simulation_books import samples_in


def job_of(**tables: dict[str, Any]) -> Job:
    return Job.model_validate({"run": {"name": "virtual"}, **tables})


def slices_of(train: int = 20, samples: int = 64, validation: int = 2) -> list[SliceInfo]:
    splits = ["train"] * train + ["validation"] * validation
    return [SliceInfo(i, f"slice-{i}", "0" * 64, samples, split) for i, split in enumerate(splits)]


@dataclass
class Faults:
    """What goes wrong beside what a test does itself."""

    room: Callable[[Source], bool] = lambda source: True
    """Can this worker be placed?"""
    start_s: float = 0.1
    evaluate_s: float = 0.0
    val_loss: Callable[[int], float] = lambda round: 2.0
    """Loss of the weights with which a round begins."""
    proof: Callable[[Source, str], str] = lambda source, right: right
    """What a worker says is the hash of the weights that it begins with."""
    layout: Callable[[Source], str] = lambda source: "layout"
    reject: Callable[[Delta], str | None] = lambda delta: None
    norm: Callable[[Delta], float] = lambda delta: 1.0
    commit_s: Callable[[int], float] = lambda round: 0.5
    """How long the store takes over a round, once it is done with those before it."""


FIRST_ONLY = Faults(room=lambda source: source.incarnation == 10_001)
"""No lost worker can be replaced."""


class Fleet(World):
    """Runs a job to its end; `records`, `notes` and `persisted` tell what happened."""

    def __init__(
        self,
        job: Job,
        speeds: list[float | Callable[[float], float]],
        slices: list[SliceInfo],
        faults: Faults | None = None,
        past: ResumePoint | None = None,
    ) -> None:
        tables = job.model_dump(exclude_unset=True)
        tables["resources"] = {"num_workers": len(speeds), **tables.get("resources", {})}
        super().__init__(Job.model_validate(tables))
        self.faults, self._past = faults or Faults(), past or ResumePoint()
        self._speeds = [s if callable(s) else lambda _, s=s: s for s in speeds]
        self.core = SchedulerCore(self.job, "virtual", slices, Sizes(10_000), self._past)
        self.watchers: list[Callable[[c.Command], None]] = []
        """Called after each command."""
        self.commands: list[tuple[float, c.Command]] = []
        self.records: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []
        self.persisted: list[c.Persist] = []
        self.reduces: list[c.Reduce] = []
        self.commits: list[tuple[float, int]] = []
        """When the store answered, and for which round."""
        self.finished: c.Finish | None = None
        self.deltas: dict[Source, Delta] = {}
        """Newest delta of each worker."""
        self._fed: dict[int, set[int]] = {}

    def run(self, limit: int = 200_000) -> Self:
        parts = (1000 // self.job.sync.fragments,) * self.job.sync.fragments
        weights = c.Initialised(1000, f"theta-{self._past.next_round - 1}", "layout", parts)
        self.begin(self.core, self._past, weights, 0.05, len(self._speeds))
        for _ in range(limit):
            if self.over:
                return self
            self.step()
        raise AssertionError("the run doesn't end")

    # ── what a test does ──────────────────────────────────────────────────────────────────────────────────────────

    def kill(self, worker: int) -> None:
        self.workers[worker].alive = False
        self.tell(c.Lost(self.workers[worker].source, "killed"))

    def hang(self, worker: int) -> None:
        """Let a worker fall silent without anybody being told."""
        self.workers[worker].alive = False

    def preempt(self, worker: int) -> None:
        """Let a worker end its batch, hand over what it has, and leave."""
        self.workers[worker].leave("preempted")

    def stop(self, seconds: float) -> None:
        """Stop the scheduler's own process for a while; what is said meanwhile is read after that."""
        self.clock.now += seconds

    def on(self, kind: type, action: Any, after_s: float = 0.01, when: Any = lambda command: True) -> None:
        """Do something once, shortly after the first command of a kind."""
        waiting = [action]

        def watch(command: c.Command) -> None:
            if waiting and isinstance(command, kind) and when(command):
                self.later(after_s, waiting.pop())

        self.watchers.append(watch)

    # ── what happened ─────────────────────────────────────────────────────────────────────────────────────────────

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def commanded(self, kind: type[c.Command]) -> list[tuple[float, Any]]:
        """Commands of a kind, with their times."""
        return [(at, command) for at, command in self.commands if isinstance(command, kind)]

    def noted(self, kind: str) -> list[dict[str, Any]]:
        return [note for note in self.notes if note["kind"] == kind]

    @property
    def error(self) -> Any:
        """What the run ended by; None: it ended well."""
        assert self.finished is not None
        return self.finished.error

    # ── the world ─────────────────────────────────────────────────────────────────────────────────────────────────

    def take_in(self, event: c.Input) -> list[c.Command]:
        if isinstance(event, Evaluated):
            (_, samples), loss = event.sums["val_loss"], self.faults.val_loss(event.round)
            event = replace(event, sums={"val_loss": (loss * samples, samples)})
        if isinstance(event, Delta):
            self.deltas[event.source] = event
        if isinstance(event, c.Committed):
            self.commits.append((self.now, event.saved.commit.round))
        return super().take_in(event)

    def obey(self, command: c.Command) -> None:
        self.commands.append((self.now, command))
        match command:
            case c.Reduce():
                self.reduces.append(command)
            case c.Persist():
                self.persisted.append(command)
            case c.LogMetric(fields=fields):
                self.records.append({**fields, **self._time_fields(fields)})
            case c.LogEvent(fields=fields):
                self.notes.append(dict(fields))
            case c.Finish():
                self.finished = command
        super().obey(command)
        for watch in self.watchers:
            watch(command)

    def _time_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Use of the fleet's time, which the scheduler's actor adds to a round's record."""
        if fields["kind"] != "round":
            return {}
        return self.core.time_fields(fields["round"], fields["samples"])

    def send(self, command: c.Order) -> None:
        """Send an order; a plan only of slices that were sent before, and kept."""
        match command:
            case c.Feed(worker=worker, slice=index):
                self._fed[worker].add(index)
            case c.Assign(worker=worker, plan=plan):
                self._fed[worker] &= plan.keep
                assert {span.slice for span in (*plan.spans, *plan.evaluate)} <= self._fed[worker], "a slice isn't sent"
        super().send(command)

    def verdict(self, command: c.Reduce) -> Verdict:
        accepted, rejected = [], []
        for source, samples in zip(command.sources, command.weights, strict=True):
            delta = self.deltas[source]
            if reason := self.faults.reject(delta):
                rejected.append(Rejection(source.worker, reason, blamed=reason != LOST))
            else:
                accepted.append(Contribution(source.worker, source.incarnation, samples, self.faults.norm(delta)))
        return Verdict(command.round, tuple(accepted), tuple(rejected), 0.5)

    def place(self, source: Source) -> None:
        self._fed[source.worker] = set()
        super().place(source)

    def batch_s(self, source: Source) -> float:
        return self._speeds[source.worker](self.now)

    def has_room(self, source: Source) -> bool:
        return self.faults.room(source)

    def start_s(self, source: Source) -> float:
        return self.faults.start_s

    def evaluate_s(self, source: Source) -> float:
        return self.faults.evaluate_s

    def commit_s(self, round: int) -> float:
        return self.faults.commit_s(round)

    def layout(self, source: Source) -> str:
        return self.faults.layout(source)

    def theta_sha256(self, source: Source, version: int) -> str:
        return self.faults.proof(source, super().theta_sha256(source, version))


def past_of(persisted: list[c.Persist], attempt: int = 2, evaluations: tuple[dict[str, Any], ...] = ()) -> ResumePoint:
    """What a scheduler goes on from when the log has these rounds."""
    newest = persisted[-1]
    spans = sorted(span for persist in persisted for _, spans in persist.spans for span in spans)
    used = [[one.epoch, one.slice, one.start, one.stop] for one in spans if one.epoch >= newest.epoch]
    inner = frozenset(worker for persist in persisted for worker, _ in persist.spans)
    before = {"epoch": newest.epoch, "used": used}
    return ResumePoint(attempt, newest.round + 1, before, newest.state, inner, evaluations=evaluations)


# ── scenarios ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def rounds(update_rounds: int = 3, samples: int = 400, batch: int = 4, **more: int) -> dict[str, int]:
    return {"update_rounds": update_rounds, "samples_between_updates": samples, "max_batch_size": batch, **more}


def fleet_of(
    *speeds: float | Callable[[float], float],
    faults: Faults | None = None,
    past: ResumePoint | None = None,
    slices: list[SliceInfo] | None = None,
    update_rounds: int = 3,
    samples: int = 400,
    **tables: Any,
) -> Fleet:
    job = job_of(**tables | {"rounds": rounds(update_rounds, samples) | tables.get("rounds", {})})
    return Fleet(job, list(speeds), slices or slices_of(), faults, past)


def used(fleet: Fleet) -> Counter[tuple[int, int, int]]:
    """How often each (epoch, slice, sample) is in a commit."""
    return Counter(sample for persist in fleet.persisted for _, spans in persist.spans for sample in samples_in(spans))


def done(fleet: Fleet) -> Fleet:
    """Run it; it must end well, with every sample used once at most."""
    fleet.run()
    assert fleet.error is None
    assert set(used(fleet).values()) == {1}
    return fleet


def fleet_records() -> list[dict[str, Any]]:
    """All records of metrics of a small run of two workers, one of which is half as fast."""
    return fleet_of(0.1, 0.2, update_rounds=4, samples=240).run().records
