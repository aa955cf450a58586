"""Plans of a round with a barrier: the batches of all workers, so that they finish together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import version_due
from hypha_ray.scheduler.barrier.round import Round
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
from hypha_ray.scheduler.planning.worker_plans import Sizes, ValidationSamples, WorkerPlans
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.types import Plan, SliceInfo, Span, WeightsVersion

CORRECTION_GAIN = 0.02
"""Relative gain in a round's length from which plans are corrected."""

LEAD_S = 0.3
"""Seconds before the end of a plan within which a longer one may arrive too late; then none is changed."""


class RoundPlanner:
    """Makes and corrects the plans of a round with a barrier."""

    def __init__(self, job: Job, slices: Sequence[SliceInfo], sizes: Sizes, past: ResumePoint) -> None:
        self._job = job
        self._equal = has_equal_batches(job)
        self._fixed = job.run.mode == "replay"
        """Whether plans are never corrected."""
        self._first = WeightsVersion(past.next_round)
        """Version of the weights that the run resumes with."""
        self.owed = 0
        """Samples that committed rounds lack, which the next ones make up."""
        longest = max(job.samples(number) for number in (0, job.rounds.warmup_rounds))
        self.plans = WorkerPlans(job, slices, sizes, past, 2 * longest + batch_size(job))
        self._validation = ValidationSamples(job, slices, past)

    def due(self, number: int) -> WeightsVersion:
        """Version of the weights that workers must have in a round: its own, or older with several exchanges."""
        return max(self._first, version_due(self._job, number))

    def plan_round(
        self, number: int, members: Sequence[WorkerState], newest: WeightsVersion, started_at: float
    ) -> tuple[Round, list[Command]]:
        """Plan a round while `newest` is the newest version; the round after the last only evaluates.

        The weights due in the round are evaluated if they, or versions skipped since the round before, are to be.
        """
        final = number == self._job.rounds.update_rounds
        weights = self.due(number)
        since = self.due(number - 1) + 1 if number > self._first else weights
        evaluated = any(map(self._validation.is_due, range(since, weights + 1)))
        # A worker that was sent newer weights with all fragments may merge those instead.
        able = [one for one in members if (one.full_version or 0) <= weights] if evaluated else []
        shares = self._validation.shares(able)
        equal = self._equal_in(number)
        paces = paces_at_start(members, bool(shares), equal)
        wanted = 0 if final else self._wanted(number)
        allocation = plan_batches(paces, wanted)
        known = number > 0 and not final and not equal
        opened = Round(number, started_at, allocation.finish_s if known else None, weights, wanted, shares)
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
        """Let a worker into the current round; the next correction gives it batches.

        In replay mode it takes over its predecessor's plan.
        """
        worker = member.source.worker
        orphan = current.replay_plans.pop(worker, None)
        final = current.number == self._job.rounds.update_rounds
        blank = Plan(current.number, 0, (), member.batch_size, final=final)
        plan = replace(blank if orphan is None else orphan, version=0, evaluate=share)
        feeds = self.plans.feed(member, [span.slice for span in (*share, *plan.spans)])
        return [*feeds, *self.plans.start(member, plan, newest)]

    def replan(self, current: Round, members: Sequence[WorkerState], now: float) -> tuple[float, list[Command]]:
        """Plan the rest of the round anew for workers that haven't delivered; return seconds saved and the new plans.

        Plans change only if the present ones miss the target, or new ones would end the round notably earlier.
        """
        members = [member for member in members if member.source.worker not in current.deltas]
        if self._fixed or not members:
            return 0.0, []
        every_s = self._job.report_interval_s
        origin, fleet = standings(members, current.started_at, current.evaluating, every_s, now)
        finishes = [_planned_finish(m, standing) for m, standing in zip(members, fleet, strict=True) if not m.idle]
        target = current.wanted
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
            # A worker with a plan is at least at its first batch after the merge, and delivers that.
            commands += self.plans.correct(
                member, max(batches, 0 if member.idle else member.prestarted_batches + 1), now
            )
            if not member.idle:
                current.awaiting.add(member.source.worker)
        return saved_s, commands

    def _wanted(self, number: int) -> int:
        """Samples of a round, with as many again at most of those that earlier rounds lack."""
        usual = self._job.samples(number)
        made_up = min(self.owed, usual)
        self.owed -= made_up
        return usual + made_up

    def _overlap_spans(self, member: WorkerState, number: int, samples: int) -> tuple[Span, ...]:
        """Samples for the steps that a worker makes between a round with so many samples and the merge of its result.

        They are fewer than the next round has, because its delta is made of the steps after the merge.
        """
        if not self._job.rounds.warmup_rounds <= number + 1 < self._job.rounds.update_rounds:
            return ()
        batches = min(self._job.sync.delay_steps, max(0, samples - 1) // member.batch_size)
        return self.plans.assign(member, batches * member.batch_size)

    def _equal_in(self, number: int) -> bool:
        """Whether all workers get equally many batches in a round."""
        return self._equal or number < self._job.rounds.warmup_rounds


def _planned_finish(member: WorkerState, standing: ExpectedProgress) -> float:
    """Time until the worker's present plan is done, from the standings' origin."""
    return standing.pace.offset_s + max(0, member.planned - standing.done) * standing.pace.batch_s
