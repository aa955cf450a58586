"""Messages of the scheduler's core: the state that it resumes from, inputs besides workers' events, and commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hypha_ray.telemetry.round_records import total_tokens
from hypha_ray.types import (
    Damaged,
    Delta,
    Event,
    Layout,
    Merged,
    ModelWorkersRevived,
    Plan,
    RolloutReport,
    RoundEvent,
    RoundProgress,
    Saved,
    Source,
    Span,
    Verdict,
    WeightsVersion,
    WorkerWarned,
)
from hypha_ray.types.data import record
from hypha_ray.types.rounds import RoundOutcome

WorkerSpans: TypeAlias = tuple[int, tuple[Span, ...]]
"""A worker's number, and spans of its samples."""
Used: TypeAlias = tuple[WorkerSpans, ...]
"""Spans that each worker's accepted deltas were trained on."""
MAX_LISTED_SAMPLES = 8
"""Most damaged samples of a batch that are listed in events.jsonl."""


@record(frozen=True, slots=True)
class Feed:
    """Send a slice's bytes to a worker."""

    worker: int
    slice: int


@record(frozen=True, slots=True)
class Assign:
    """Give a worker its plan, or a corrected version of it."""

    worker: int
    plan: Plan


@record(frozen=True, slots=True)
class Merge:
    """Send a worker newer global weights."""

    worker: int
    version: WeightsVersion
    whole: bool = True
    """Whether all fragments are sent, in place of its own; otherwise those that changed since the version before."""


@dataclass(frozen=True, slots=True)
class RestoreInnerState:
    """Send a worker the inner state with which its predecessor ended the last committed round."""

    worker: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Order to the server: one outer step of these workers' deltas, with these weights in the mean."""

    round: int
    sources: tuple[Source, ...]
    weights: tuple[int, ...]
    rounds: tuple[int, ...] = ()
    """Rounds of the deltas; empty if all are of this round."""
    oldest_round: int | None = None
    """Oldest round of which deltas may still be used; None if no other delta up to this round may be used."""
    phase: RoundProgress | None = None
    """Progress of the round, if a round has several steps; otherwise None."""


@dataclass(frozen=True, slots=True)
class Persist(RoundOutcome):
    """Write snapshot and commit record of a round, in the background."""


@dataclass(frozen=True, slots=True)
class Hire:
    """Lease a machine and start a worker there, under this number and incarnation."""

    source: Source


@dataclass(frozen=True, slots=True)
class LimitLeases:
    """Limits of new leases, by the run's goal."""

    max_price: float
    """Highest price per hour; infinite: any."""
    firm_only: bool
    """Whether only machines on demand are leased, and no spot machines."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask a worker to deliver what it has done and to leave, because its machine goes away."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """End a worker and its lease."""

    worker: int
    reason: str


@record(frozen=True, slots=True)
class LogMetric:
    """A line for metrics.jsonl, the console and the other sinks."""

    fields: Mapping[str, Any]


@record(frozen=True, slots=True)
class LogEvent:
    """A line for events.jsonl."""

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over: done, or ended by an error."""

    error: Exception | None = None


Order: TypeAlias = Feed | Assign | Merge | RestoreInnerState | Drain
"""Command that a worker carries out."""

Command: TypeAlias = Order | Reduce | Persist | Hire | LimitLeases | Dismiss | LogMetric | LogEvent | Finish


@dataclass(frozen=True, slots=True)
class Leased:
    """There is a machine for a worker to be hired."""

    source: Source


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker's stream broke: its process or node is gone."""

    source: Source
    reason: str
    exception: str | None = None
    """Type and text of the exception that ended its inner loop; None without one."""


@dataclass(frozen=True, slots=True)
class PlacementFailed:
    """No machine was found for a worker to be hired."""

    source: Source
    reason: str


@dataclass(frozen=True, slots=True)
class Draining:
    """The machines of these workers are about to go away."""

    workers: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Quote:
    """Price and kind of a machine."""

    price: float
    """Price per hour."""
    is_firm: bool
    """Whether it is on demand and no spot machine."""


@dataclass(frozen=True, slots=True)
class Quotes:
    """Quotes of the workers' machines and of free ones, for a run with a goal."""

    workers: Mapping[int, Quote]
    offers: Sequence[Quote]
    """One for each lease that is to be had now."""
    spent: float
    """Cost of the run up to now."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The store's answer to a `Persist`."""

    saved: Saved


@dataclass(frozen=True, slots=True)
class Initialised:
    """The run's first weights are there; with hashes of them and of the model's layout."""

    theta_bytes: int
    theta_sha256: str
    layout_sha256: str
    part_bytes: tuple[int, ...] = ()
    """Bytes of each fragment; empty if there is one."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """The server's answer to a `Reduce`."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class SchedulerFailed:
    """A task of the scheduler itself failed: the run can't go on."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened until the core's deadline."""


Answer: TypeAlias = Initialised | Reduced | Committed
"""Answer of the servers or of the store to a command."""
Input: TypeAlias = Event | Leased | Lost | PlacementFailed | Draining | Quotes | Answer | SchedulerFailed | Tick


class Outbox:
    """Collects commands, among them events and the end of the run."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self.over = False
        self.ended_well = False
        """Whether the run is over, and no error has ended it."""

    def take(self) -> list[Command]:
        """Return and remove all commands."""
        commands = self._commands
        self._commands = []
        return commands

    def put(self, *commands: Command) -> None:
        """Add commands."""
        self._commands += commands

    def event(self, kind: str, now: float, **fields: Any) -> None:
        """Add a line for events.jsonl."""
        self.put(LogEvent({"kind": kind, "monotonic_s": now, **fields}))

    def problem(self, text: str, now: float) -> None:
        """Add a problem for the user that doesn't end the run."""
        self.event("problem", now, text=text)

    def stale(self, event: Event, now: float) -> None:
        """Log an event that was ignored."""
        fields = {"worker": event.source.worker, "incarnation": event.source.incarnation}
        if isinstance(event, RoundEvent | Merged):
            fields["round"] = event.round
        self.event("stale", now, **fields)

    def logged(self, event: Damaged | RolloutReport | ModelWorkersRevived | WorkerWarned, now: float) -> None:
        """Add lines to events.jsonl, or for responses to rollouts.jsonl."""
        worker = event.source.worker
        match event:
            case Damaged():
                self._log_damaged(event, now)
            case ModelWorkersRevived(model_workers=numbers):
                for model_worker in numbers:
                    self.event("revive", now, role=f"model worker {model_worker} of worker {worker}", reason="it died")
            case WorkerWarned(lines=lines, disabled=disabled):
                for line in lines:
                    self.problem(f"worker {worker}: {line}", now)
                if disabled:
                    incarnation = event.source.incarnation
                    self.event("disable", now, worker=worker, incarnation=incarnation, settings=list(disabled))
            case RolloutReport(responses=responses):
                source = {"worker": worker, "incarnation": event.source.incarnation}
                for response in responses:
                    self.event("rollout", now, round=event.round, **source, **response)

    def _log_damaged(self, event: Damaged, now: float) -> None:
        """Log samples that can't be trained on."""
        worker = {"worker": event.source.worker, "incarnation": event.source.incarnation}
        for index, sample in event.samples[:MAX_LISTED_SAMPLES]:
            self.event("damaged", now, **worker, round=event.round, slice=index, sample=sample, whole_batch=event.whole)
        index, sample = event.samples[0]
        further_samples = len(event.samples) - 1
        more_text = f" and {further_samples} more" if further_samples else ""
        left_out = "the batch is skipped" if event.whole else "left out"
        self.problem(f"slice {index}, sample {sample}{more_text}: no finite loss and gradient, {left_out}", now)

    def finish(self, error: Exception | None) -> None:
        """End the run, once."""
        if not self.over:
            self.over = True
            self.ended_well = error is None
            self.put(Finish(error))


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """State of a run at its last commit; by default, of a new run."""

    attempt: int = 1
    """Number of this scheduler in the run, from 1."""
    next_round: int = 0
    used: Mapping[str, Any] = field(default_factory=lambda: {"epoch": 0, "used": []})
    """Used samples, see `Ledger.restore`."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """`Persist.state` of the last round; empty before the first."""
    inner: frozenset[int] = frozenset()
    """Workers whose inner state was saved."""
    layout: Layout | None = None
    """Layout of the model; None if the snapshot lacks it."""
    evaluations: tuple[Mapping[str, Any], ...] = ()
    """Recorded evaluations, in the order of their rounds."""
    skipped: tuple[str, ...] = ()
    """Parts of the log that couldn't be used, with reasons."""
    lost_s: float = 0.0
    """Seconds that the earlier attempt has trained after its last commit."""

    since_start_s: float = 0.0
    """Seconds from the run's first start to this attempt's; 0 in a run without a deadline."""

    @property
    def evaluated(self) -> bool:
        """Whether the evaluation that `next_round` would begin with is recorded."""
        last_round = self.next_round - 1
        return any(record["round"] == last_round for record in self.evaluations)


class RunTotals:
    """Samples, tokens and training time of a run, earlier attempts included. Times are monotonic seconds, passed in."""

    def __init__(self, before: Mapping[str, Any]) -> None:
        self._counts: dict[str, Any] = {"samples_total": 0, "tokens_total": 0, **before}
        self._before_s = float(before.get("elapsed_s", 0.0))
        self._began_at: float | None = None

    def begin(self, now: float) -> None:
        """Start the clock, unless it runs."""
        if self._began_at is None:
            self._began_at = now

    def count(self, delta: Delta) -> None:
        """Add the samples and tokens of an accepted delta."""
        self._counts["samples_total"] += delta.samples
        self._counts["tokens_total"] = total_tokens((self._counts["tokens_total"], delta.tokens))

    @property
    def samples(self) -> int:
        """Samples of all accepted deltas."""
        return int(self._counts["samples_total"])

    def elapsed_s(self, now: float) -> float:
        """Time that the run has trained."""
        if self._began_at is None:
            return self._before_s
        return self._before_s + now - self._began_at

    def totals(self, now: float) -> dict[str, Any]:
        """All totals, for records and for a later attempt."""
        return {**self._counts, "elapsed_s": self.elapsed_s(now)}
