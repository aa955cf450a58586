"""Plans of a round: batches by the planner, samples by the ledger, slices sent to the workers that need them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import version_due
from hypha_ray.scheduler.fleet.worker_state import (
    ExpectedProgress,
    WorkerState,
    batch_seconds,
    batch_size,
    paces_at_start,
    standings,
)
from hypha_ray.scheduler.ledger.epoch import samples_of
from hypha_ray.scheduler.ledger.ledger import Ledger
from hypha_ray.scheduler.messages import Assign, Command, Feed, Merge, RestoreInnerState
from hypha_ray.scheduler.planning.planner import plan as plan_batches
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.scheduler.rounds.round import Round
from hypha_ray.types import Plan, SliceInfo, Span, window

CORRECTION_GAIN = 0.02
"""A plan is corrected when that shortens the round by this part of its length."""

LEAD_S = 0.3
"""A worker that ends its plan sooner than this may hand over before a longer plan arrives: then none is changed."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Figures of the data that decisions need: samples that a worker may hold."""

    held_samples: int


class RoundPlanner:
    """Makes and corrects the plans of a round, and keeps the ledger."""

    def __init__(self, job: Job, slices: Sequence[SliceInfo], sizes: Sizes, past: ResumePoint) -> None:
        self._job, self._sizes = job, sizes
        self._fixed = job.run.mode == "replay"
        """Plans stay as they are."""
        self._equal = self._fixed or job.sync.traits.sends_gradients or not job.sync.dynamic_local_steps
        """All workers get the same."""
        self._samples = {info.index: info.samples for info in slices}
        self._validation = tuple(Span(0, s.index, 0, s.samples) for s in slices if s.split == "validation")
        self._assigned: set[int] = set()
        """Workers that were given samples since the last commit."""
        train = [info for info in slices if info.split == "train"]
        self.ledger = Ledger.restore(train, job.run.seed, past.used, self._most())
        self._first = past.next_round
        """Number of the weights that the run goes on with."""
        self._evaluated = past.next_round if past.evaluated else None
        """Number of weights whose evaluation is there already."""
        self._behind = job.sync.in_flight - 1

    def _most(self) -> int:
        """Samples that a worker may be given at once: those of a whole round, and what is left of a batch."""
        rounds = 0, self._job.rounds.warmup_rounds
        return max(self._job.samples(number) for number in rounds) + batch_size(self._job)

    def due(self, number: int) -> int:
        """Number of the weights that workers must have in a round; its own, unless several exchanges are under way."""
        return max(self._first, version_due(self._job, number))

    def plan_round(
        self, number: int, members: Sequence[WorkerState], newest: int, now: float
    ) -> tuple[Round, list[Command]]:
        """Plan a round, with weights up to a number there; the one after the last only evaluates.

        What is evaluated are the weights that are due in it, also on behalf of those that no round has waited for.
        """
        final, weights = number == self._job.rounds.update_rounds, self.due(number)
        since = self.due(number - 1) + 1 if number > self._first else weights
        evaluated = any(map(self._evaluates, range(since, weights + 1)))
        # A worker that has been sent newer ones as a whole may take those.
        shares = (
            self._evaluation_shares([one for one in members if (one.full_version or 0) <= weights]) if evaluated else {}
        )
        equal = self._equal_in(number)
        paces = paces_at_start(members, bool(shares), equal)
        allocation = plan_batches(paces, 0 if final else self._job.samples(number))
        known = number > 0 and not final and not equal
        opened = Round(number, now, allocation.finish_s if known else None, final, shares, weights)
        commands: list[Command] = []
        for member in members:
            worker = member.source.worker
            ahead = samples_of(member.overlap_spans)
            samples = max(allocation.batches[worker] * member.batch_size, ahead + member.batch_size if ahead else 0)
            member.prestarted_batches = -(-ahead // member.batch_size)
            spans = member.overlap_spans + self._assign(member, samples - ahead)
            share = shares.get(worker, ())
            member.overlap_spans = self._overlap_spans(member, number, samples_of(spans))
            commands += self._feed(member, [span.slice for span in (*share, *spans, *member.overlap_spans)])
            plan = Plan(number, 0, spans, member.batch_size, share, final=final, ahead=member.overlap_spans)
            commands += self._start(member, plan, newest)
            if spans:
                opened.awaiting.add(worker)
        return opened, commands

    def plan_joiner(self, current: Round, member: WorkerState, share: tuple[Span, ...], newest: int) -> list[Command]:
        """Let a worker into a round that goes on; to train on it gets what `correct` finds for it.

        In replay mode it takes its predecessor's place.
        """
        worker = member.source.worker
        orphan = current.replay_plans.pop(worker, None)
        blank = Plan(current.number, 0, (), member.batch_size, final=current.final)
        plan = replace(blank if orphan is None else orphan, version=0, evaluate=share)
        feeds = self._feed(member, [span.slice for span in (*share, *plan.spans)])
        return [*feeds, *self._start(member, plan, newest)]

    def send_weights(self, member: WorkerState, newest: int) -> list[Command]:
        """Send a worker the newest weights, if that isn't done.

        All of them go to a worker that has no others, isn't to keep its own, or has slept longer than exchanges take.
        """
        if member.sent_version == newest:
            return []
        merged = member.merged_version
        whole = member.sent_version != newest - 1 or merged is None or merged < newest - 1 - self._behind
        member.sent_version, member.full_version = newest, newest if whole else member.full_version
        return [Merge(member.source.worker, newest, whole)]

    def _start(self, member: WorkerState, plan: Plan, newest: int) -> list[Command]:
        """Tell a worker what it does in a round, and send what it needs for that."""
        worker, restores = member.source.worker, member.needs_inner_state and bool(plan.spans)
        member.start(
            replace(plan, keep=frozenset(member.cached_slices), restores=restores, rejections=member.rejections)
        )
        assert member.plan is not None
        restore: list[Command] = [RestoreInnerState(worker)] if restores else []
        member.untrained = member.untrained and not plan.spans
        return [Assign(worker, member.plan), *restore, *self.send_weights(member, newest)]

    def replan(self, current: Round, members: Sequence[WorkerState], now: float) -> tuple[float, list[Command]]:
        """Plan the rest of the round anew, for workers that haven't handed over: (seconds saved, new plans).

        Nothing is done unless the plans that are out miss the target, or new ones would end the round notably earlier.
        """
        members = [member for member in members if member.source.worker not in current.deltas]
        if self._fixed or not members or current.final:
            return 0.0, []
        every_s = self._job.report_interval_s
        origin, fleet = standings(members, current.started_at, current.evaluating, every_s, now)
        finishes = [_planned_finish(m, standing) for m, standing in zip(members, fleet, strict=True) if not m.idle]
        target = self._job.samples(current.number)
        left = target - current.samples - sum(one.done * one.pace.batch_size for one in fleet)
        allocation = plan_batches([standing.pace for standing in fleet], max(0, left))
        saved_s = max(finishes, default=0.0) - max(allocation.finish_s, now - origin)
        planned = current.samples + sum(member.planned_samples for member in members)
        too_late = min(finishes, default=0.0) < now - origin + LEAD_S
        little = saved_s <= CORRECTION_GAIN * (origin + max(finishes, default=0.0) - current.started_at)
        if planned >= target and (self._equal_in(current.number) or little or too_late):
            return 0.0, []
        commands: list[Command] = []
        for member, standing in zip(members, fleet, strict=True):
            batches = standing.done + allocation.batches[member.source.worker]
            # A worker with work is at its first batch after the merge at least, and hands that over.
            commands += self._replan(member, max(batches, 0 if member.idle else member.prestarted_batches + 1), now)
            if not member.idle:
                current.awaiting.add(member.source.worker)
        return saved_s, commands

    def feed_ahead(self, number: int, members: Sequence[WorkerState]) -> list[Command]:
        """Send what the round of that number will probably need, while the server works."""
        upcoming = deque(self.ledger.upcoming(self._job.samples(number)))
        commands: list[Command] = []
        for member in members:
            need = member.planned_samples
            while need > 0 and upcoming:
                index = upcoming.popleft()
                need -= self._samples[index]
                commands += self._feed(member, [index])
        return commands

    def commit(self, spans: Mapping[int, Sequence[Span]], ahead: Mapping[int, Sequence[Span]]) -> None:
        """Mark samples as used, and take all others back, but for what workers have of later rounds."""
        self.ledger.commit(spans)
        for worker in self._assigned:
            self.ledger.release(worker, ahead.get(worker, ()))
        self._assigned = set(ahead)

    def _overlap_spans(self, member: WorkerState, number: int, samples: int) -> tuple[Span, ...]:
        """Samples for the steps that a worker makes after a round of so many before it has the round's result.

        They are fewer than the next round has: what comes after the merge is what its delta is made of.
        """
        if not self._job.rounds.warmup_rounds <= number + 1 < self._job.rounds.update_rounds:
            return ()
        batches = min(self._job.sync.delay_steps, max(0, samples - 1) // member.batch_size)
        return self._assign(member, batches * member.batch_size)

    def _equal_in(self, number: int) -> bool:
        """Do all workers get equally much in a round?"""
        return self._equal or number < self._job.rounds.warmup_rounds

    def _assign(self, member: WorkerState, samples: int) -> tuple[Span, ...]:
        """Give samples to a worker; in replay mode whatever it holds, so that a repeated run gives the same."""
        self._assigned.add(member.source.worker)
        return self.ledger.assign(member.source.worker, samples, () if self._fixed else member.cached_slices)

    def _evaluates(self, number: int) -> bool:
        """Are the weights that round `number` starts from to be evaluated?"""
        every, last = self._job.rounds.evaluate_every, number == self._job.rounds.update_rounds
        due = number > 0 and (last or (every > 0 and number % every == 0))
        return bool(self._validation) and due and number != self._evaluated

    def _evaluation_shares(self, members: Sequence[WorkerState]) -> dict[int, tuple[Span, ...]]:
        """Validation samples for each worker, in proportion to its speed."""
        seconds = batch_seconds(members, self._equal)
        speeds = {member.source.worker: member.batch_size / seconds[member.source.worker] for member in members}
        samples = sum(span.samples for span in self._validation)
        shares: dict[int, tuple[Span, ...]] = {}
        start, before, total = 0, 0.0, sum(speeds.values())
        for worker, speed in speeds.items():
            before += speed
            stop = round(samples * before / total)
            if stop > start:
                shares[worker] = window(self._validation, start, stop)
            start = stop
        return shares

    def _replan(self, member: WorkerState, batches: int, now: float) -> list[Command]:
        """A new version of a worker's plan. What is cut off stays assigned: the worker may already be past it."""
        assert member.plan is not None
        if batches == member.planned:
            return []
        if member.idle:
            member.progress.heard_at = now  # It was silent because it had nothing to do.
        worker, samples = member.source.worker, batches * member.batch_size
        missing = samples - sum(span.samples for span in member.assigned)
        if missing > 0:
            member.assigned += self._assign(member, missing)
        spans = window(member.assigned, 0, samples)
        feeds = self._feed(member, [span.slice for span in (*member.plan.evaluate, *spans, *member.overlap_spans)])
        plan = replace(member.plan, version=member.plan.version + 1, spans=spans, keep=frozenset(member.cached_slices))
        member.follow(plan)
        return [*feeds, Assign(worker, plan)]

    def _feed(self, member: WorkerState, slices: Sequence[int]) -> list[Command]:
        """Send the slices that the worker lacks; it never has to forget one that is needed now for another."""
        needed = dict.fromkeys(slices)
        limit = max(self._sizes.held_samples, sum(self._samples[index] for index in needed))
        worker = member.source.worker
        return [Feed(worker, index) for index in needed if member.cache_slice(index, self._samples[index], limit)]


def _planned_finish(member: WorkerState, standing: ExpectedProgress) -> float:
    """Time at which the worker's present plan will be done, after the standings' origin."""
    return standing.pace.offset_s + max(0, member.planned - standing.done) * standing.pace.batch_s
