"""Plans of a round with a barrier: batches of all its workers, so that they finish together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import version_due
from hypha_ray.scheduler.fleet.worker_state import (
    ExpectedProgress,
    WorkerState,
    batch_size,
    has_equal_batches,
    paces_at_start,
    standings,
)
from hypha_ray.scheduler.ledger.epoch import samples_of
from hypha_ray.scheduler.messages import Command
from hypha_ray.scheduler.planning.planner import plan as plan_batches
from hypha_ray.scheduler.planning.validation import ValidationSamples
from hypha_ray.scheduler.planning.worker_plans import Sizes, WorkerPlans
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.scheduler.rounds.round import Round
from hypha_ray.types import Plan, SliceInfo, Span, WeightsVersion

CORRECTION_GAIN = 0.02
"""A plan is corrected when that shortens the round by this part of its length."""

LEAD_S = 0.3
"""A worker that ends its plan sooner than this may hand over before a longer plan arrives: then none is changed."""


class RoundPlanner:
    """Makes and corrects the plans of a round with a barrier."""

    def __init__(self, job: Job, slices: Sequence[SliceInfo], sizes: Sizes, past: ResumePoint) -> None:
        self._job, self._equal = job, has_equal_batches(job)
        self._fixed = job.run.mode == "replay"
        """Plans stay as they are."""
        self._first = WeightsVersion(past.next_round)
        """Version of the weights that the run goes on with."""
        longest = max(job.samples(number) for number in (0, job.rounds.warmup_rounds))
        self.plans = WorkerPlans(job, slices, sizes, past, longest + batch_size(job))
        self._validation = ValidationSamples(job, slices, past)

    def due(self, number: int) -> WeightsVersion:
        """Version of the weights that workers must have in a round: its own, or older with several exchanges."""
        return max(self._first, version_due(self._job, number))

    def plan_round(
        self, number: int, members: Sequence[WorkerState], newest: WeightsVersion, started_at: float
    ) -> tuple[Round, list[Command]]:
        """Plan a round, with weights up to a number there; the one after the last only evaluates.

        What is evaluated are the weights that are due in it, also on behalf of those that no round has waited for.
        """
        final, weights = number == self._job.rounds.update_rounds, self.due(number)
        since = self.due(number - 1) + 1 if number > self._first else weights
        evaluated = any(map(self._validation.is_due, range(since, weights + 1)))
        # A worker that has been sent newer ones as a whole may take those.
        able = [one for one in members if (one.full_version or 0) <= weights] if evaluated else []
        shares = self._validation.shares(able)
        equal = self._equal_in(number)
        paces = paces_at_start(members, bool(shares), equal)
        allocation = plan_batches(paces, 0 if final else self._job.samples(number))
        known = number > 0 and not final and not equal
        opened = Round(number, started_at, allocation.finish_s if known else None, weights, shares)
        commands: list[Command] = []
        for member in members:
            worker = member.source.worker
            ahead = samples_of(member.overlap_spans)
            samples = max(allocation.batches[worker] * member.batch_size, ahead + member.batch_size if ahead else 0)
            member.prestarted_batches = -(-ahead // member.batch_size)
            spans = member.overlap_spans + self.plans.assign(member, samples - ahead)
            share = shares.get(worker, ())
            member.overlap_spans = self._overlap_spans(member, number, samples_of(spans))
            commands += self.plans.feed(member, [span.slice for span in (*share, *spans, *member.overlap_spans)])
            plan = Plan(number, 0, spans, member.batch_size, share, final=final, ahead=member.overlap_spans)
            commands += self.plans.start(member, plan, newest)
            if spans:
                opened.awaiting.add(worker)
        opened.overlapped = any(one.overlap_spans for one in members) or self.due(number + 1) <= number
        return opened, commands

    def plan_joiner(
        self, current: Round, member: WorkerState, share: tuple[Span, ...], newest: WeightsVersion
    ) -> list[Command]:
        """Let a worker into a round that goes on; to train on it gets what `correct` finds for it.

        In replay mode it takes its predecessor's place.
        """
        worker = member.source.worker
        orphan = current.replay_plans.pop(worker, None)
        final = current.number == self._job.rounds.update_rounds
        blank = Plan(current.number, 0, (), member.batch_size, final=final)
        plan = replace(blank if orphan is None else orphan, version=0, evaluate=share)
        feeds = self.plans.feed(member, [span.slice for span in (*share, *plan.spans)])
        return [*feeds, *self.plans.start(member, plan, newest)]

    def replan(self, current: Round, members: Sequence[WorkerState], now: float) -> tuple[float, list[Command]]:
        """Plan the rest of the round anew, for workers that haven't handed over: (seconds saved, new plans).

        Nothing is done unless the plans that are out miss the target, or new ones would end the round notably earlier.
        """
        members = [member for member in members if member.source.worker not in current.deltas]
        if self._fixed or not members:
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
            commands += self.plans.correct(
                member, max(batches, 0 if member.idle else member.prestarted_batches + 1), now
            )
            if not member.idle:
                current.awaiting.add(member.source.worker)
        return saved_s, commands

    def _overlap_spans(self, member: WorkerState, number: int, samples: int) -> tuple[Span, ...]:
        """Samples for the steps that a worker makes after a round of so many before it has the round's result.

        They are fewer than the next round has: what comes after the merge is what its delta is made of.
        """
        if not self._job.rounds.warmup_rounds <= number + 1 < self._job.rounds.update_rounds:
            return ()
        batches = min(self._job.sync.delay_steps, max(0, samples - 1) // member.batch_size)
        return self.plans.assign(member, batches * member.batch_size)

    def _equal_in(self, number: int) -> bool:
        """Whether all workers get equally much in a round."""
        return self._equal or number < self._job.rounds.warmup_rounds


def _planned_finish(member: WorkerState, standing: ExpectedProgress) -> float:
    """Time at which the worker's present plan will be done, after the standings' origin."""
    return standing.pace.offset_s + max(0, member.planned - standing.done) * standing.pace.batch_s
