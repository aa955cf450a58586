"""Roster of the fleet: numbered slots, each with one worker at a time.

    empty ──hire──► starting ──ready──► at work ──leaving──► empty
      ▲                │                   │
      └──── lost: again at once, then after 1, 2, 4 … 60 s ────┘           rejected too often: excluded for good

Besides its machine's lease, a worker at work holds one of the scheduler's trust: every event renews it, silence ends
it. Times are the scheduler's monotonic clock, in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container
from dataclasses import dataclass, field

from hypha_ray.config import Job
from hypha_ray.market.leases import Lease, LeaseBook
from hypha_ray.scheduler.failures import MAX_CRASHES, LossBook
from hypha_ray.scheduler.worker_state import Decayed, WorkerState, batch_size
from hypha_ray.telemetry.time_book import TimeBook
from hypha_ray.types import Source
from hypha_ray.types.rounds import STARTS_PER_ATTEMPT

FIRST_WAIT_S = 1.0
"""Seconds before a slot's next start after a second worker in a row that contributed nothing; then doubled."""
LONGEST_WAIT_S = 60.0
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(slots=True)
class Slot:
    """A worker's number, its present worker, and its history."""

    number: int
    source: Source | None = None
    """Source of the worker that is starting or at work."""
    member: WorkerState | None = None
    """State of the present or the last worker, whose batch times its successor inherits; None before the first."""
    lease: Lease | None = None
    leaving: bool = False
    starts: int = 0
    failures: int = 0
    """Workers in a row that ended without a contribution."""
    breakdowns: int = 0
    """Number of these that crashed, fell silent or made no progress."""
    causes: set[str | None] = field(default_factory=set)
    """Causes that ended them; None stands for a crash without an exception."""
    work: str = ""
    """Work that the worker reported last; empty if none."""
    machine: str = ""
    """Machine that the worker reported last; empty if none."""
    strikes: int = 0
    """Number of deltas rejected for their content, less those accepted since."""
    excluded: bool = False
    done: bool = False
    """Whether the worker has done its final plan."""
    progress_at: float = 0.0
    """Time at which the worker was hired, became ready, or last made progress."""
    retry_at: float | None = None
    hired_at: float = 0.0
    """Time at which the worker was hired."""

    @property
    def working(self) -> bool:
        """Whether the worker is at work and not leaving."""
        return self.lease is not None and not self.leaving

    def due(self, now: float) -> bool:
        """Whether a worker is to be hired."""
        is_vacant = self.source is None and not self.excluded and not self.done
        return is_vacant and self.retry_at is not None and now >= self.retry_at


@dataclass(frozen=True, slots=True)
class LostWorker:
    """Worker that is given up, and the reason."""

    source: Source
    reason: str
    cause: str | None = None
    """The reason without its work; None if it was never ready."""
    is_silent: bool = False


class Roster:
    """The slots of a run.

    Args:
        job: the job file.
        run: name of the run.
        attempt: number of the scheduler that keeps this roster, over the whole run.
        next_round: first round of this attempt.

    """

    def __init__(self, job: Job, run: str, attempt: int, next_round: int = 0) -> None:
        self._job = job
        self._run = run
        self._attempt = attempt
        self.most_strikes = job.sync.strikes
        self._lease_s = job.lease_s
        self.book = LeaseBook()
        self.times = TimeBook(job.sync.delay_steps > 0 or job.sync.in_flight > 1, next_round)
        self.slots = {number: Slot(number) for number in range(job.num_workers)}
        self._vacant: set[int] = set()
        """Numbers of slots to be filled."""
        self._excluded: set[int] = set()
        self._losses = LossBook()
        self._crashed: set[int] = set()
        """Numbers whose workers broke down since the last contribution of any worker."""
        self.assignable_count = 0
        self.wanted = len(self.slots)
        """Largest number of workers, without those that are leaving."""
        self.start_time = Decayed()
        """Time from a worker's hiring until it is ready."""
        self._members: list[WorkerState] | None = None
        """Workers as `members` lists them; None if the list is out of date."""
        self._assignable: list[WorkerState] | None = None

    @property
    def members(self) -> list[WorkerState]:
        """Workers at work by number, including those that are leaving. Read only."""
        if self._members is None:
            self._members = []
            for slot in self.slots.values():
                if slot.lease is not None and slot.member is not None:
                    self._members.append(slot.member)
        return self._members

    @property
    def assignable(self) -> list[WorkerState]:
        """Workers that may be given work: at work and not leaving. Read only."""
        if self._assignable is None:
            self._assignable = []
            for slot in self.slots.values():
                if slot.working and slot.member is not None:
                    self._assignable.append(slot.member)
        return self._assignable

    def assignable_and(self, member: WorkerState) -> list[WorkerState]:
        """Workers that may be given work, and this one, which may be leaving."""
        if self.slots[member.source.worker].working:
            return self.assignable
        return sorted([*self.assignable, member], key=lambda worker: worker.source.worker)

    @property
    def eligible(self) -> int:
        """Numbers that aren't excluded."""
        return len(self.slots) - len(self._excluded)

    @property
    def staying(self) -> int:
        """Number of workers that are starting or at work, and not leaving."""
        return sum(slot.source is not None and not slot.leaving for slot in self.slots.values())

    @property
    def layouts(self) -> set[str]:
        """Layout of the model built last in each slot; empty for a slot without any."""
        layouts: set[str] = set()
        for slot in self.slots.values():
            layouts.add("" if slot.member is None else slot.member.layout)
        return layouts

    @property
    def starting(self) -> list[Source]:
        """Workers that are hired and not yet ready."""
        return [slot.source for slot in self.slots.values() if slot.source is not None and slot.lease is None]

    def member(self, source: Source) -> WorkerState | None:
        """State of an event's sender; None if it isn't its slot's present worker, or isn't at work."""
        slot = self._slot(source)
        return None if slot is None or slot.lease is None else slot.member

    def open(self, numbers: Container[int], now: float) -> None:
        """Let these slots be filled at once, and the others later."""
        for slot in self.slots.values():
            slot.retry_at = now if slot.number in numbers else now + FIRST_WAIT_S
        self._vacant = set(self.slots)

    def hire(self, now: float) -> list[Source]:
        """Hire workers for all slots that are due."""
        hired: list[Source] = []
        vacancies = len(self._vacant)
        if self.wanted < len(self.slots):
            vacancies = self.wanted - self.staying
        for worker in sorted(self._vacant):
            slot = self.slots[worker]
            if len(hired) >= vacancies:
                break
            if not slot.due(now):
                continue
            self._vacant.discard(worker)
            slot.starts += 1
            incarnation = self._attempt * STARTS_PER_ATTEMPT + slot.starts
            slot.source = Source(self._run, worker, incarnation)
            slot.hired_at = now
            slot.progress_at = now
            slot.retry_at = None
            slot.work = ""
            self.times.hire(worker, now)
            hired.append(slot.source)
        return hired

    def ready(self, source: Source, now: float, most_samples: int | None = None) -> WorkerState | None:
        """Take a starting worker into the fleet; None if it isn't awaited.

        Its batches have `most_samples` samples at most, if that is known.
        """
        slot = self._slot(source)
        if slot is None or slot.lease is not None:
            return None
        predecessor = slot.member
        batch_samples = batch_size(self._job)
        slot.member = WorkerState(source, batch_samples if most_samples is None else min(batch_samples, most_samples))
        if predecessor is not None:  # Probably the same machine.
            slot.member.batch_time = predecessor.batch_time
            slot.member.overhead = predecessor.overhead
        slot.lease = self.book.grant(f"worker-{slot.number}", {}, now, self._job.lease_s)
        slot.progress_at = now
        self.start_time.observe(now - slot.hired_at)
        self.times.ready(slot.number)
        self._count_assignable(joins=True)
        return slot.member

    def _count_assignable(self, joins: bool) -> None:
        """Count a worker that joins or leaves the assignable ones, and invalidate the lists."""
        self._members = self._assignable = None
        self.assignable_count += 1 if joins else -1

    def renew_lease(self, source: Source, now: float, progress: bool) -> bool:
        """Renew a worker's lease at its event; False if it has lost the lease, so that the event doesn't count."""
        slot = self._slot(source)
        if slot is None:
            return False
        if slot.lease is None:
            return True
        lease = self.book.renew(slot.lease.id, slot.lease.holder, slot.lease.fence, now, self._lease_s)
        if progress:
            slot.progress_at = now
        return lease is not None

    def works_on(self, source: Source, work: str, limited: bool, machine: str, now: float) -> None:
        """Record the work that a worker reports. A change of work is progress, and so is work that has a limit."""
        slot = self._slot(source)
        if slot is None:
            return
        if limited or (work and work != slot.work):
            slot.progress_at = now
        slot.work = work
        slot.machine = machine

    def leased(self, source: Source, now: float) -> None:
        """Record that there is a machine for a worker."""
        if self._slot(source) is not None:
            self.times.lease(source.worker, now)

    def lost_at(self, source: Source) -> tuple[str, int]:
        """Record that a worker was lost at its work; return the work, and the number of workers lost at it."""
        slot = self._slot(source)
        if slot is None:
            return "", 0
        self._losses.add(slot.work, slot.number, slot.machine)
        return slot.work, self._losses.count(slot.work)

    def is_fatal(self, work: str) -> bool:
        """Whether work ends every worker, on other machines too."""
        return self._losses.is_fatal(work, self.slots.keys() - self._excluded)

    def silent(self, now: float, busy: Container[int]) -> list[LostWorker]:
        """Workers to give up: silence, no progress of a `busy` worker, or a start that takes too long.

        An idle worker isn't expected to make progress: it may wait for any time.
        """
        expired_leases = self.book.expired(now)
        start_limit_s = 2 * self._job.resources.start_deadline_s
        stall_s = self._job.worker.stall_s
        given_up: list[LostWorker] = []
        for slot in self.slots.values():
            if slot.source is None or slot.done:
                continue
            if slot.lease is None:
                if now - slot.progress_at > start_limit_s:
                    given_up.append(LostWorker(slot.source, "not ready in time"))
            elif expired_leases and slot.lease.id in expired_leases:
                silence = f"silent for {self._job.lease_s:g} s"
                given_up.append(LostWorker(slot.source, silence, silence, is_silent=True))
            elif slot.number not in busy:
                slot.progress_at = now
            elif now - slot.progress_at > stall_s:
                at_work = f", at {slot.work}" if slot.work else ""
                stall = f"no progress for {stall_s:g} s"
                given_up.append(LostWorker(slot.source, f"{stall}{at_work}", stall))
        return given_up

    def defer(self, seconds: float) -> None:
        """Extend all leases by a pause of the scheduler's own process."""
        self.book.defer(seconds)
        for slot in self.slots.values():
            slot.progress_at += seconds

    def leave(self, source: Source) -> bool:
        """Mark a worker as leaving; False if it was, or isn't at work."""
        slot = self._slot(source)
        if slot is None or slot.leaving:
            return False
        if slot.working:
            self._count_assignable(joins=False)
        slot.leaving = True
        return True

    def release(self, source: Source, now: float, blame: bool = True) -> bool:
        """Empty a worker's slot so that it is filled again; False if the worker wasn't in it."""
        slot = self._slot(source)
        if slot is None:
            return False
        if slot.working:
            self._count_assignable(joins=False)
        if slot.lease is not None:
            self.book.release(slot.lease)
        self.times.lose(slot.number, now)
        wait_s = _wait_s(slot.failures) if blame else 0.0
        slot.source = None
        slot.lease = None
        slot.leaving = False
        self._members = None
        slot.failures += blame
        slot.retry_at = now + wait_s
        if not slot.done and not slot.excluded:
            self._vacant.add(slot.number)
        return True

    def contributed(self, worker: int) -> None:
        """Record an accepted delta: it resets the counts of failures and crashes, and takes back a strike."""
        slot = self.slots[worker]
        slot.failures = 0
        slot.strikes = max(0, slot.strikes - 1)
        self._losses.contributed(worker)
        for crashed in self._crashed:
            self.slots[crashed].breakdowns = 0
            self.slots[crashed].causes.clear()
        self._crashed.clear()

    def broke_down(self, worker: int, cause: str | None = None) -> bool:
        """Count a worker that crashed or was given up; True if every slot has reached `MAX_CRASHES`."""
        self._crashed.add(worker)
        slot = self.slots[worker]
        slot.breakdowns += 1
        slot.causes.add(cause and _NUMBER.sub("0", cause))
        return all(slot.excluded or slot.breakdowns >= MAX_CRASHES for slot in self.slots.values())

    def refused(self, sources: Collection[Source]) -> set[int]:
        """Have workers with rejected deltas reset their inner state; return their numbers."""
        for source in sources:
            member = self.member(source)
            if member is not None:
                member.rejections += 1
        return {source.worker for source in sources}

    @property
    def breaks_alike(self) -> bool:
        """Whether all these workers ended by the same cause; numbers in its text don't count."""
        causes = set[str | None]()
        for slot in self.slots.values():
            causes |= slot.causes
        return len(causes) == 1 and None not in causes

    def strike(self, worker: int) -> bool:
        """Count a rejected delta; True if it was the last allowed one, so that the slot is excluded."""
        slot = self.slots[worker]
        slot.strikes += 1
        if slot.strikes >= self.most_strikes:
            self.exclude(worker)
        return slot.excluded

    def exclude(self, worker: int) -> None:
        """Exclude a slot for good."""
        self.slots[worker].excluded = True
        self._excluded.add(worker)

    def done(self, worker: int) -> None:
        """Mark a worker as done: its silence is fine, and it needs no successor."""
        self.slots[worker].done = True

    def end(self, now: float) -> None:
        """Account for the fleet's time up to the end of a run."""
        training = {member.source.worker for member in self.members if not member.idle}
        self.times.end(training, now)

    def rest_idle(self) -> None:
        """Let batch times fade of workers without a batch in the round."""
        for member in self.members:
            member.rest_if_idle()

    def state(self) -> dict[str, dict[str, float]]:
        """State of each slot for a later scheduler, as plain JSON."""
        state: dict[str, dict[str, float]] = {}
        for slot in self.slots.values():
            fields = state.setdefault(str(slot.number), {})
            if slot.strikes:
                fields["strikes"] = float(slot.strikes)
            if slot.member is not None and slot.member.batch_time.mean is not None:
                fields["batch_s"] = float(slot.member.batch_time.mean)
            if slot.excluded:
                fields["excluded"] = 1.0
        return state

    def restore(self, state: dict[str, dict[str, float]]) -> None:
        """Restore the result of `state`; slots that the job no longer has are ignored."""
        for worker, fields in state.items():
            slot = self.slots.get(int(worker))
            if slot is None:
                continue
            slot.strikes = int(fields.get("strikes", 0))
            if fields.get("excluded"):
                self.exclude(slot.number)
            if "batch_s" in fields:
                slot.member = WorkerState(Source(self._run, slot.number, 0), batch_size(self._job))
                slot.member.batch_time.observe(fields["batch_s"])

    def recall_loss(self, seconds: float) -> None:
        """Count what the workers of an earlier attempt did after its last commit as lost."""
        trained_workers = [slot.number for slot in self.slots.values() if slot.member is not None]
        self.times.recall_loss(trained_workers, seconds)

    def _slot(self, source: Source) -> Slot | None:
        """Slot of a worker; None if another worker is in it."""
        slot = self.slots.get(source.worker)
        return slot if slot is not None and (slot.source is source or slot.source == source) else None


def _wait_s(failures: int) -> float:
    """Seconds before the next start after so many failures in a row: 0, 1, 2, 4 … 60."""
    if not failures:
        return 0.0
    doublings = min(failures - 1, 60)
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**doublings)
