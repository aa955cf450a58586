"""Account of each worker number's time, from its first machine to the end of the attempt.

    hired ──weights merged──► trains ──delta──► waits ──weights merged──► trains …
      ▲                          │
      └──── machine down ◄───────┘

Time is accounted for at each of these events, so that no second is counted twice and none is left out. What a delta
took is undecided until the delta is in a commit: then its training was useful; otherwise it is a loss.

Times are the scheduler's monotonic clock, in seconds. Durations that a worker has measured itself are cut to fit
between two events.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from statistics import median

from hypha_ray.fleet_time import FleetTime
from hypha_ray.types import Delta, WeightsVersion

KNOWN_VERSIONS = 64
"""Number of newest versions of the weights whose exchanges' beginnings are kept."""


@dataclass(frozen=True, slots=True)
class _Merge:
    """Merge of new weights while the next round's training had begun already."""

    at: float
    version: WeightsVersion
    waited_s: float | None
    """Seconds that the worker waited for the weights; None if it hasn't measured them."""


@dataclass(frozen=True, slots=True)
class _Cycle:
    """Time from a worker's previous delta to this one, undecided until this one is accepted or rejected."""

    round: int
    spent: FleetTime


@dataclass(slots=True)
class _SlotTime:
    """Time of a worker number."""

    number: int
    since: float
    """Time up to which all is accounted for."""
    hired: bool = False
    """Whether there is a worker, or a search for one."""
    has_machine: bool = False
    """Whether there is a machine at present."""
    counted: bool = False
    """Whether there has been a machine, from which on all time counts."""
    started: bool = False
    """Whether the present worker has merged its first weights."""
    waits: bool = False
    """Whether the last event was the worker's delta, or the end of a round without it."""
    next_version: WeightsVersion | None = None
    """Version that the last delta's round leads to; None before the worker's first delta."""
    evaluated_s: float = 0.0
    """Seconds of evaluations since `since`."""
    merges: list[_Merge] = field(default_factory=list)
    """Merges since `since`, if the worker may train on before it merges."""
    samples_per_s: float | None = None
    """Speed of the last delta; None before the first."""
    unrated_s: float = 0.0
    """Seconds with a machine whose speed wasn't known yet."""
    cycles: list[_Cycle] = field(default_factory=list)
    """Undecided deltas' times, oldest first."""

    @property
    def use_without_work(self) -> str:
        """Use of the time before a worker has started: its machine's start, or the loss of one."""
        return "start" if self.has_machine else "loss"


class TimeBook:
    """Account of the fleet's time.

    Args:
        overlaps: whether workers may train on before they merge a round's result.
        next_round: first round of this attempt.

    """

    def __init__(self, overlaps: bool, next_round: int) -> None:
        self._overlaps = overlaps
        self._next_record = next_round
        """Round whose record is to be written next."""
        self._slots: dict[int, _SlotTime] = {}
        self._not_started: set[int] = set()
        """Numbers without a worker that has merged weights."""
        self._closed_at: dict[WeightsVersion, float] = {}
        """Times at which exchanges began, by the version of the weights that they lead to."""
        self._rounds: dict[int, FleetTime] = {}
        """Times by the rounds in whose records they belong."""
        self._worker_rounds: dict[int, list[tuple[int, FleetTime]]] = {}
        """The same times with their worker numbers, not yet added up."""
        self._recorded: dict[int, FleetTime] = {}
        """Times of the records among the core's last commands."""
        self._worker_recorded: dict[int, list[tuple[int, FleetTime]]] = {}
        """The same times with their worker numbers, not yet added up."""
        self.closing: FleetTime | None = None
        """Time after the last record; None until the run has ended well."""

    # ── machines come and go ──────────────────────────────────────────────────────────────────────────────────────

    def recall_loss(self, workers: Iterable[int], seconds: float) -> None:
        """Count what an earlier attempt did after its last commit as lost, for each of these worker numbers."""
        for worker in workers:
            slot = self._slots[worker] = _SlotTime(worker, since=0.0)
            slot.unrated_s += seconds
            lost_time = FleetTime()
            lost_time.seconds["loss"] = seconds
            self._add(slot, self._next_record, lost_time)

    def hire(self, worker: int, now: float) -> None:
        """Begin to look for a machine."""
        slot = self._slots.setdefault(worker, _SlotTime(worker, since=now))
        if slot.counted:
            self._spend(slot, now, "loss")
        slot.since = now
        slot.hired = True
        self._not_started.add(worker)

    def lease(self, worker: int, now: float) -> None:
        """Record that there is a machine; time before the first one doesn't count."""
        slot = self._slots[worker]
        if slot.has_machine:
            return
        if slot.counted:
            self._spend(slot, now, "loss")
        slot.since = now
        slot.counted = slot.has_machine = True

    def ready(self, worker: int) -> None:
        """Record that a worker is ready: if its lease is unknown, its machine was there since the hire."""
        slot = self._slots[worker]
        slot.counted = slot.has_machine = True

    def speed(self, worker: int) -> float | None:
        """Samples per second of the number's last delta; None before the first."""
        slot = self._slots.get(worker)
        return None if slot is None else slot.samples_per_s

    def lose(self, worker: int, now: float) -> None:
        """Record that a worker is gone: what it had begun is lost, and its machine is down."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        if slot.counted:
            self._spend(slot, now, "barrier" if slot.waits else "loss")
        slot.hired = slot.has_machine = slot.started = slot.waits = False
        slot.next_version = None
        self._not_started.add(worker)

    # ── a worker's cycle ──────────────────────────────────────────────────────────────────────────────────────────

    def merge(self, worker: int, version: WeightsVersion, waited_s: float | None, now: float) -> None:
        """Record that a worker has merged weights."""
        slot = self._slots[worker]
        if not slot.started:
            self._spend(slot, now, "start")
            slot.started = True
            self._not_started.discard(worker)
        elif self._overlaps:
            slot.merges.append(_Merge(now, version, waited_s))
            return
        else:
            waiting_since = slot.since + slot.evaluated_s
            closed_at = self._closed_at.get(version, waiting_since)
            barrier_s = min(max(0.0, closed_at - waiting_since), now - waiting_since)
            self._spend(slot, now, "exchange", {"barrier": barrier_s})
        slot.waits = False

    def evaluate(self, worker: int, seconds: float) -> None:
        """Record an evaluation of a worker."""
        self._slots[worker].evaluated_s += seconds

    def deliver(self, worker: int, delta: Delta, now: float) -> None:
        """Record a delta, and account for the time since the worker's previous event."""
        slot = self._slots[worker]
        if any(
            cycle.round == delta.round for cycle in slot.cycles
        ):  # The worker's first delta of the round was discarded.
            self.discard(worker, delta.round)
        data_s = min(delta.data_wait_s, delta.train_s)
        training_s = delta.train_s - data_s
        if training_s > 0 and delta.samples:
            slot.samples_per_s = delta.samples / training_s
        rest_s = max(0.0, now - slot.since - delta.train_s - slot.evaluated_s)
        waits_s = {"barrier": self._barrier_s(slot, rest_s)}
        spent = self._split(slot, now, "exchange", {"training": training_s, "data": data_s, **waits_s})
        slot.cycles.append(_Cycle(delta.round, spent))
        slot.next_version = WeightsVersion(delta.round + 1)
        slot.waits = True

    def close(self, version: WeightsVersion, late_workers: Collection[int], now: float) -> None:
        """Record that the exchange begins which leads to a version, without the deltas of `late_workers`."""
        self._closed_at[version] = now
        if len(self._closed_at) > KNOWN_VERSIONS:
            del self._closed_at[next(iter(self._closed_at))]
        for worker in late_workers:
            slot = self._slots[worker]
            if slot.started:
                self._spend(slot, now, "loss", {"barrier": self._barrier_s(slot, 0.0)})
                slot.waits = True

    def decide(self, worker: int, round: int, record_round: int, is_accepted: bool) -> None:
        """Decide a worker's delta of a round, and discard older ones.

        The time belongs in the record of round `record_round`.
        """
        slot = self._slots[worker]
        undecided: list[_Cycle] = []
        for cycle in slot.cycles:
            if cycle.round > round:
                undecided.append(cycle)
                continue
            if cycle.round < round or not is_accepted:
                cycle.spent.lose_training()
            self._add(slot, record_round, cycle.spent)
        slot.cycles = undecided

    def discard(self, worker: int, record_round: int) -> None:
        """Discard a worker's undecided delta, if it has one; the time belongs in the record of round `record_round`."""
        slot = self._slots[worker]
        if slot.cycles:
            self.decide(worker, slot.cycles[-1].round, record_round, is_accepted=False)

    def decide_all(self, round: int, accepted_workers: Collection[int]) -> None:
        """Decide all deltas of a round, by the workers whose deltas are accepted."""
        for worker, slot in self._slots.items():
            if slot.cycles:
                self.decide(worker, round, round, worker in accepted_workers)

    # ── records ───────────────────────────────────────────────────────────────────────────────────────────────────

    def forget_recorded(self) -> None:
        """Forget times of records that are written."""
        if self._recorded:
            self._recorded.clear()
            self._worker_recorded.clear()

    def record(self, record_round: int, now: float) -> None:
        """Keep the time that belongs in a round's record, which is being written; `recorded` returns it."""
        for worker in self._not_started:
            slot = self._slots[worker]
            if slot.counted and (slot.has_machine or not slot.hired):  # Otherwise a machine is being looked for.
                self._spend(slot, now, slot.use_without_work)
        time = FleetTime()
        worker_times: list[tuple[int, FleetTime]] = []
        for round in sorted(self._rounds):
            if round <= record_round:
                time.add(self._rounds.pop(round))
                worker_times += self._worker_rounds.pop(round, [])
        self._recorded[record_round] = time
        self._worker_recorded[record_round] = worker_times
        self._next_record = max(self._next_record, record_round + 1)

    def recorded(self, record_round: int) -> FleetTime:
        """Return the time of a round's record, until it is forgotten."""
        return self._recorded[record_round]

    def recorded_by_worker(self, record_round: int) -> dict[int, FleetTime]:
        """Return the time of a round's record by worker number, until it is forgotten."""
        times_by_worker: dict[int, FleetTime] = {}
        for worker, spent in self._worker_recorded[record_round]:
            times_by_worker.setdefault(worker, FleetTime()).add(spent)
        return times_by_worker

    def end(self, training: Collection[int], now: float) -> None:
        """Account for the rest of a run that has ended well; deltas of `training` workers are in no commit."""
        rates = [slot.samples_per_s for slot in self._slots.values() if slot.samples_per_s is not None]
        typical_rate = median(rates) if rates else None
        time = self._round(self._next_record)
        for worker, slot in self._slots.items():
            if slot.started:
                self._spend_end(slot, now, worker in training and not slot.waits)
            elif slot.counted:
                self._spend(slot, now, slot.use_without_work)
            for cycle in slot.cycles:
                cycle.spent.lose_training()
                time.add(cycle.spent)
            slot.cycles = []
            if typical_rate is not None:
                time.possible_samples += slot.unrated_s * typical_rate
                slot.unrated_s = 0.0
        closing_time = FleetTime()
        for unrecorded in self._rounds.values():
            closing_time.add(unrecorded)
        self._rounds = {}
        self._worker_rounds = {}
        self.closing = closing_time

    def _spend_end(self, slot: _SlotTime, now: float, trains: bool) -> None:
        """Account for a worker's time up to the end of the run."""
        if trains:
            self._spend(slot, now, "loss")
            return
        if slot.merges:
            merged_at = slot.merges[-1].at
            evaluated_s = slot.evaluated_s
            slot.evaluated_s = 0.0
            self._spend(slot, merged_at, "exchange", {"barrier": self._barrier_s(slot, merged_at - slot.since)})
            slot.evaluated_s = evaluated_s
        self._spend(slot, now, "barrier")

    # ── accounts ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _round(self, record_round: int) -> FleetTime:
        """Time that belongs in the record of a round, or in the next one if that is written."""
        record_round = max(record_round, self._next_record)
        if record_round not in self._rounds:
            self._rounds[record_round] = FleetTime()
        return self._rounds[record_round]

    def _add(self, slot: _SlotTime, record_round: int, spent: FleetTime) -> None:
        """Add a worker's time to that of a round's record, or of the next one if that is written."""
        record_round = max(record_round, self._next_record)
        self._round(record_round).add(spent)
        worker_times = self._worker_rounds.setdefault(record_round, [])
        worker_times.append((slot.number, spent))

    def _barrier_s(self, slot: _SlotTime, rest_s: float) -> float:
        """Seconds that a worker which trains on has waited for deltas of others: for new weights, or for its next plan.

        Args:
            slot: account of the worker.
            rest_s: seconds in which it neither trained nor evaluated; taken as its last wait if that wasn't measured.

        """
        planned_at = -math.inf
        if slot.next_version is not None:
            planned_at = self._closed_at.get(slot.next_version, planned_at)
        if not slot.merges:
            return min(max(0.0, planned_at - slot.since), rest_s)
        barrier_s = 0.0
        for merge in slot.merges:
            waited_s = merge.waited_s
            if waited_s is None:
                waited_s = rest_s if merge is slot.merges[-1] else 0.0
            began_at = max(slot.since, merge.at - waited_s)
            closed_at = max(planned_at, self._closed_at.get(merge.version, began_at))
            barrier_s += max(0.0, min(closed_at, merge.at) - began_at)
        return barrier_s

    def _spend(self, slot: _SlotTime, now: float, use: str, known_s: dict[str, float] | None = None) -> None:
        """Account for a slot's time since the last event in the next record, as `_split` does."""
        spent = self._split(slot, now, use, known_s or {})
        self._add(slot, self._next_record, spent)

    def _split(self, slot: _SlotTime, now: float, use: str, known_s: dict[str, float]) -> FleetTime:
        """Split a slot's time since the last event: known seconds by kind, and the rest of a kind."""
        interval_s = max(0.0, now - slot.since)
        parts_s = sum(known_s.values(), slot.evaluated_s)
        spent = FleetTime()
        if parts_s > 0:
            scale = min(1.0, interval_s / parts_s)
            spent.seconds["evaluation"] = slot.evaluated_s * scale
            for known_use, seconds in known_s.items():
                spent.seconds[known_use] += seconds * scale
        if interval_s > parts_s:
            spent.seconds[use] += interval_s - parts_s
        if slot.has_machine:
            slot.unrated_s += max(interval_s, parts_s)
        if slot.samples_per_s is not None:
            spent.possible_samples = slot.unrated_s * slot.samples_per_s
            slot.unrated_s = 0.0
        slot.since = max(now, slot.since)
        slot.evaluated_s = 0.0
        if slot.merges:
            slot.merges = []
        return spent
