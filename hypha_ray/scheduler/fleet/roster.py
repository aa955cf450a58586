"""Roster of the fleet: numbered slots, and in each one worker after the other.

    empty ──hire──► starting ──ready──► at work ──leaving──► empty
      ▲                │                   │
      └──── lost: again at once, then after 1, 2, 4 … 60 s ────┘           rejected too often: excluded for good

A worker that is at work holds a lease of the job's trust, not only of a machine: every word renews it, and silence ends
it. Times are the scheduler's monotonic clock, in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container

from hypha_ray.config import Job
from hypha_ray.market.leases import LeaseBook
from hypha_ray.scheduler.fleet.slot import Slot
from hypha_ray.scheduler.fleet.worker_state import WorkerState, batch_size
from hypha_ray.types import Source

FIRST_WAIT_S = 1.0
"""Wait before a slot's second attempt in a row that came to nothing; doubled for each further one."""
LONGEST_WAIT_S = 60.0
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
MAX_CRASHES = 5
"""Workers of every slot in a row that may break down before the first contribution."""
STARTS_PER_ATTEMPT = 10_000
"""Incarnations grow with the attempt first, so that a later scheduler's are greater."""


class Roster:
    """The slots of a run.

    Args:
        job: the job file.
        run: name of the run.
        attempt: number of the scheduler that keeps this roster, over the whole run.

    """

    def __init__(self, job: Job, run: str, attempt: int) -> None:
        self._job, self._run, self._attempt = job, run, attempt
        self.most_strikes = job.sync.strikes
        self.book = LeaseBook()
        self.slots = {number: Slot(number) for number in range(job.num_workers)}
        self._vacant: set[int] = set()
        """Numbers of slots that are to be filled."""
        self._excluded: set[int] = set()
        self._crashed: set[int] = set()
        """Numbers whose workers broke down since a worker has contributed."""
        self.assignable_count = 0
        self._members: list[WorkerState] | None = None
        """Workers as `members` lists them; None: to be listed anew."""
        self._assignable: list[WorkerState] | None = None

    @property
    def members(self) -> list[WorkerState]:
        """All that are at work, in the order of their numbers; those that are leaving too. Not to be changed."""
        if self._members is None:
            at_work = (slot.member for slot in self.slots.values() if slot.lease is not None)
            self._members = [member for member in at_work if member is not None]
        return self._members

    @property
    def assignable(self) -> list[WorkerState]:
        """Those that may be given work: at work and not leaving. Not to be changed."""
        if self._assignable is None:
            wanted = (slot.member for slot in self.slots.values() if slot.working)
            self._assignable = [member for member in wanted if member is not None]
        return self._assignable

    def assignable_and(self, member: WorkerState) -> list[WorkerState]:
        """Workers that may be given work, and this one, which may be leaving."""
        if self.slots[member.source.worker].working:
            return self.assignable
        return sorted([*self.assignable, member], key=lambda one: one.source.worker)

    @property
    def eligible(self) -> int:
        """Numbers that aren't excluded."""
        return len(self.slots) - len(self._excluded)

    @property
    def layouts(self) -> set[str]:
        """Layouts of the models that were built last in each slot; empty under one that hasn't built any."""
        return {"" if slot.member is None else slot.member.layout for slot in self.slots.values()}

    @property
    def starting(self) -> list[Source]:
        """Workers that are hired and not ready yet."""
        return [slot.source for slot in self.slots.values() if slot.source is not None and slot.lease is None]

    def member(self, source: Source) -> WorkerState | None:
        """The worker that speaks, if it is the slot's present one and at work."""
        slot = self._slot(source)
        return None if slot is None or slot.lease is None else slot.member

    def open(self, numbers: Container[int], now: float) -> None:
        """Let these slots be filled at once, and all others as soon as there is room for them."""
        for slot in self.slots.values():
            slot.retry_at = now if slot.number in numbers else now + FIRST_WAIT_S
        self._vacant = set(self.slots)

    def hire(self, now: float) -> list[Source]:
        """Fill the slots whose time has come."""
        due = [slot for number in sorted(self._vacant) if (slot := self.slots[number]).due(now)]
        for slot in due:
            self._vacant.discard(slot.number)
            slot.starts += 1
            slot.source = Source(self._run, slot.number, self._attempt * STARTS_PER_ATTEMPT + slot.starts)
            slot.progress_at, slot.retry_at = now, None
        return [slot.source for slot in due if slot.source is not None]

    def ready(self, source: Source, now: float) -> WorkerState | None:
        """A worker that was starting is at work; None if it is not awaited."""
        slot = self._slot(source)
        if slot is None or slot.lease is not None:
            return None
        before = slot.member
        slot.member = WorkerState(source, batch_size(self._job))
        if before is not None:  # Probably the same machine.
            slot.member.batch_time, slot.member.overhead = before.batch_time, before.overhead
        slot.lease = self.book.grant(f"worker-{slot.number}", {}, now, self._job.lease_s)
        slot.progress_at = now
        self._count(joins=True)
        return slot.member

    def _count(self, joins: bool) -> None:
        """Count a worker that may be given work from now on, or no longer, and have the lists made anew."""
        self._members = self._assignable = None
        self.assignable_count += 1 if joins else -1

    def heard(self, source: Source, now: float, progress: bool) -> bool:
        """Renew the lease of a worker that speaks; False if it has none: it is fenced off."""
        slot = self._slot(source)
        if slot is None:
            return False
        if slot.lease is None:
            return True
        lease = self.book.renew(slot.lease.id, slot.lease.holder, slot.lease.fence, now, self._job.lease_s)
        slot.lease = lease or slot.lease
        if progress:
            slot.progress_at = now
        return lease is not None

    def silent(self, now: float, busy: Container[int]) -> list[tuple[Source, str]]:
        """Workers to give up, and why: no word for too long, no progress of a `busy` one, or not ready.

        An idle worker makes no progress, and is not to blame: what it waits for may take any time.
        """
        over = {lease.id for lease in self.book.leases if lease.expired(now)}
        found: list[tuple[Source, str]] = []
        for slot in self.slots.values():
            if slot.source is None or slot.done:
                continue
            if slot.lease is None:
                if now - slot.progress_at > 2 * self._job.resources.start_deadline_s:
                    found.append((slot.source, "not ready in time"))
            elif slot.lease.id in over:
                found.append((slot.source, f"silent for {self._job.lease_s:g} s"))
            elif slot.number not in busy:
                slot.progress_at = now
            elif now - slot.progress_at > self._job.worker.stall_s:
                found.append((slot.source, f"no progress for {self._job.worker.stall_s:g} s"))
        return found

    def defer(self, seconds: float) -> None:
        """The scheduler itself was stopped for a while: silence in that time does not count."""
        self.book.defer(seconds)
        for slot in self.slots.values():
            slot.progress_at += seconds

    def leave(self, source: Source) -> bool:
        """Note that a worker is leaving; False if that was known, or there is no such worker."""
        slot = self._slot(source)
        if slot is None or slot.leaving:
            return False
        if slot.working:
            self._count(joins=False)
        slot.leaving = True
        return True

    def release(self, source: Source, now: float, blame: bool = True) -> bool:
        """Empty a worker's slot, to be filled again; False if that worker isn't there any more."""
        slot = self._slot(source)
        if slot is None:
            return False
        if slot.working:
            self._count(joins=False)
        if slot.lease is not None:
            self.book.release(slot.lease)
        wait_s = _wait_s(slot.failures) if blame else 0.0
        slot.source, slot.lease, slot.leaving, self._members = None, None, False, None
        slot.failures += blame
        slot.retry_at = now + wait_s
        if not slot.done and not slot.excluded:
            self._vacant.add(slot.number)
        return True

    def contributed(self, number: int) -> None:
        """A worker's delta is in a round: whatever went wrong before is over, for all; and a strike is taken back."""
        self.slots[number].failures = 0
        self.slots[number].strikes = max(0, self.slots[number].strikes - 1)
        for slot in (self.slots[broken] for broken in self._crashed):
            slot.breakdowns = 0
            slot.exceptions.clear()
        self._crashed.clear()

    def broke_down(self, number: int, exception: str | None = None) -> bool:
        """Count a worker whose process ended by itself; True: it happens everywhere, again and again, and only that."""
        self._crashed.add(number)
        self.slots[number].breakdowns += 1
        self.slots[number].exceptions.add(exception and _NUMBER.sub("0", exception))
        return all(slot.excluded or slot.breakdowns >= MAX_CRASHES for slot in self.slots.values())

    def refused(self, sources: Collection[Source]) -> set[int]:
        """Have workers whose deltas were rejected begin with a new inner state; returns their numbers."""
        for member in filter(None, map(self.member, sources)):
            member.rejections += 1
        return {source.worker for source in sources}

    @property
    def breaks_alike(self) -> bool:
        """Whether one exception ended all workers that broke down, whatever the numbers in its text."""
        found = set().union(*(slot.exceptions for slot in self.slots.values()))
        return len(found) == 1 and None not in found

    def strike(self, number: int) -> bool:
        """Count a rejected delta; True: it was the last one allowed, and the slot is closed."""
        slot = self.slots[number]
        slot.strikes += 1
        if slot.strikes >= self.most_strikes:
            self.exclude(number)
        return slot.excluded

    def exclude(self, number: int) -> None:
        """Close a slot for good."""
        self.slots[number].excluded = True
        self._excluded.add(number)

    def done(self, number: int) -> None:
        """A worker has done its final plan: its silence means nothing, and it needs no successor."""
        self.slots[number].done = True

    def rest_idle(self) -> None:
        """Trust the batch times of workers without a batch in the round less."""
        for member in self.members:
            member.rest_if_idle()

    def state(self) -> dict[str, dict[str, float]]:
        """State of each slot for a later scheduler, as plain JSON."""
        found = {}
        for slot in self.slots.values():
            batch_s = None if slot.member is None else slot.member.batch_time.mean
            known = {"strikes": slot.strikes or None, "batch_s": batch_s, "excluded": slot.excluded or None}
            found[str(slot.number)] = {name: float(value) for name, value in known.items() if value is not None}
        return found

    def restore(self, state: dict[str, dict[str, float]]) -> None:
        """Take over what `state` gave; slots that the job doesn't have any more are passed over."""
        for number, known in state.items():
            slot = self.slots.get(int(number))
            if slot is None:
                continue
            slot.strikes = int(known.get("strikes", 0))
            if known.get("excluded"):
                self.exclude(slot.number)
            if "batch_s" in known:
                slot.member = WorkerState(Source(self._run, slot.number, 0), batch_size(self._job))
                slot.member.batch_time.observe(known["batch_s"])

    def _slot(self, source: Source) -> Slot | None:
        slot = self.slots.get(source.worker)
        return slot if slot is not None and slot.source == source else None


def _wait_s(failures: int) -> float:
    """Seconds before the next attempt after so many earlier ones that came to nothing: 0, 1, 2, 4 … 60."""
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(failures - 1, 60)) if failures else 0.0
