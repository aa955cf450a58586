"""Plans of a round with a barrier: the batches of all workers, so that they finish together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hypha_ray.config import Job
from hypha_ray.config.schema import rounds_for
from hypha_ray.exchange_schedule import version_due
from hypha_ray.scheduler.barrier.round import BarrierRound
from hypha_ray.scheduler.messages import Command, ResumePoint
from hypha_ray.scheduler.planner import Allocation
from hypha_ray.scheduler.planner import plan as plan_batches
from hypha_ray.scheduler.round_sizes import (
    CORRECTION_GAIN,
    RoundSamples,
    cautious,
    correct,
    fitted,
    longest_round,
    progress_of,
)
from hypha_ray.scheduler.worker_plans import (
    EQUAL,
    ReasonBook,
    Sizes,
    ValidationSamples,
    WorkerPlans,
    reason_of,
)
from hypha_ray.scheduler.worker_state import WorkerState, batch_size, has_equal_batches, paces_at_start
from hypha_ray.types import Plan, SliceInfo, Span, WeightsVersion, samples_of


@dataclass(frozen=True, slots=True)
class _Basis:
    """Figures that a round was planned by."""

    members: Sequence[WorkerState]
    exact: Allocation
    """Allocation by the workers' speeds."""
    allocation: Allocation
    """Allocation with margins for noise."""
    evaluating: bool
    equal: bool


class RoundPlanner:
    """Makes and corrects the plans of a round with a barrier."""

    def __init__(self, job: Job, slices: Sequence[SliceInfo], sizes: Sizes, resume_point: ResumePoint) -> None:
        self._job = job
        self._equal = has_equal_batches(job)
        self._fixed = job.run.mode == "replay"
        """Whether plans are never corrected."""
        self._first_version = WeightsVersion(resume_point.next_round)
        """Version of the weights that the run resumes with."""
        self.owed = 0
        """Samples that committed rounds lack, which the next ones make up."""
        self._round_samples: RoundSamples | None = None
        """Samples of the rounds; None if the run ends after a number of rounds."""
        self._workers_ahead = 0
        """Workers that train ahead after the round that is planned."""
        self._basis = _Basis((), Allocation(0.0, {}, 0), Allocation(0.0, {}, 0), False, False)
        self.plans = WorkerPlans(job, slices, sizes, resume_point, 2 * longest_round(job) + batch_size(job))
        self._validation = ValidationSamples(job, slices, resume_point)
        if self.plans.ends_by_samples:
            self._round_samples = RoundSamples(job, resume_point.next_round, self.plans.ledger.unused)

    def grow(self, round_number: int, members: Sequence[WorkerState]) -> bool:
        """Let rounds from this one on have more samples if exchanges take too much time; return whether they do."""
        samples = self.plans.round_sizes.samples
        if samples == self._job.rounds.samples_between_updates or self.plans.is_over(round_number):
            return False
        job = self._job.with_round_samples(samples)
        if self.plans.ends_by_samples:
            free_samples = self._free_samples(members)
            job = job.lasting(round_number + rounds_for(job, free_samples, round_number))
            self._round_samples = RoundSamples(job, round_number, free_samples)
        self._job = job
        self.plans.resize(job)
        self.plans.round_sizes.begin(round_number)
        return True

    def usual_samples(self, round_number: int) -> int:
        """Samples of a round if none are made up."""
        return self._job.samples(round_number)

    def due(self, round_number: int) -> WeightsVersion:
        """Version of the weights that workers must have in a round: its own, or older with several exchanges."""
        return max(self._first_version, version_due(self._job, round_number))

    def plan_round(
        self, round_number: int, members: Sequence[WorkerState], newest_version: WeightsVersion, started_at: float
    ) -> tuple[BarrierRound, list[Command]]:
        """Plan a round while `newest_version` is the newest version; the round after the last only evaluates.

        The weights due in the round are evaluated if they, or versions skipped since the round before, are to be.
        """
        is_final = self.plans.is_over(round_number)
        weights_version = self.due(round_number)
        shares = self._eval_shares(round_number, members, is_final)
        equal_batches = self._equal_in(round_number)
        target = 0 if is_final else self._target_samples(round_number, members)
        paces = paces_at_start(members, bool(shares), equal_batches)
        exact_allocation = allocation = plan_batches(paces, target)
        if not equal_batches:
            allocation = plan_batches(cautious(members, paces, exact_allocation), target)
        self._basis = _Basis(members, exact_allocation, allocation, bool(shares), equal_batches)
        is_predictable = round_number > 0 and not is_final and not equal_batches
        predicted_s = allocation.finish_s if is_predictable else None
        opened_round = BarrierRound(round_number, started_at, predicted_s, weights_version, target, shares)
        opened_round.progress = None if is_final else self.plans.round_sizes.progress(round_number, target)
        new_samples = self._new_samples(members, allocation, target)
        self._workers_ahead = 0
        unplanned_samples = sum(new_samples.values())
        commands: list[Command] = []
        for member in members:
            worker = member.source.worker
            share = shares.get(worker, ())
            unplanned_samples -= new_samples[worker]
            spans = self._round_spans(member, new_samples[worker])
            member.overlap_spans = self._overlap_spans(member, round_number, samples_of(spans), unplanned_samples)
            commands += self.plans.feed_spans(member, (*share, *spans, *member.overlap_spans))
            fields = self.plans.standing(member, spans) | {
                "ahead": member.overlap_spans,
                "progress": opened_round.progress,
            }
            plan = Plan(round_number, 0, spans, member.batch_size, share, final=is_final, **fields)
            commands += self.plans.start(member, plan, newest_version)
            if spans:
                opened_round.awaiting.add(worker)
        trains_ahead = any(member.overlap_spans for member in members)
        opened_round.overlapped = trains_ahead or self.due(round_number + 1) <= round_number
        return opened_round, commands

    def reasons(self) -> ReasonBook:
        """Reasons of the plans of the round that was planned last."""
        basis = self._basis
        reasons = ReasonBook()
        for member in basis.members:
            reason = EQUAL if basis.equal else reason_of(member, basis.exact, basis.allocation)
            batches = basis.allocation.batches[member.source.worker]
            reasons.explain(member, reason, batches, basis.evaluating)
        return reasons

    def _eval_shares(
        self, round_number: int, members: Sequence[WorkerState], is_final: bool
    ) -> dict[int, tuple[Span, ...]]:
        """Each worker's share in the evaluation that a round begins with; empty if none is due."""
        weights_version = self.due(round_number)
        oldest = self.due(round_number - 1) + 1 if round_number > self._first_version else weights_version
        if not any(self._validation.is_due(version, is_final) for version in range(oldest, weights_version + 1)):
            return {}
        # A worker that was sent newer weights with all fragments may merge those instead.
        able_members = [member for member in members if (member.full_version or 0) <= weights_version]
        return self._validation.shares(able_members)

    def _new_samples(self, members: Sequence[WorkerState], allocation: Allocation, target: int) -> dict[int, int]:
        """Samples that each worker is to have beside those that it has trained ahead, with which it has a batch more.

        A run that ends by samples has rounds without an overshoot: the last batch of a round may be a short one.
        """
        new_samples: dict[int, int] = {}
        all_ahead_samples = 0
        workers_ahead = set[int]()
        for member in members:
            worker = member.source.worker
            samples = allocation.batches[worker] * member.batch_size
            ahead_samples = samples_of(member.overlap_spans)
            if ahead_samples:
                samples = max(samples - ahead_samples, member.batch_size)
                all_ahead_samples += ahead_samples
                workers_ahead.add(worker)
            new_samples[worker] = samples
        if self.plans.ends_by_samples:
            return fitted(new_samples, workers_ahead, target - all_ahead_samples)
        return new_samples

    def _round_spans(self, member: WorkerState, samples: int) -> tuple[Span, ...]:
        """A worker's samples of a round: those that it has trained ahead, and new ones."""
        ahead_samples = samples_of(member.overlap_spans)
        member.prestarted_batches = -(-ahead_samples // member.batch_size)
        return member.overlap_spans + self.plans.assign(member, samples)

    def plan_joiner(
        self, current_round: BarrierRound, member: WorkerState, share: tuple[Span, ...], newest_version: WeightsVersion
    ) -> list[Command]:
        """Let a worker into the current round; the next correction gives it batches.

        In replay mode it takes over its predecessor's plan.
        """
        worker = member.source.worker
        predecessor_plan = current_round.replay_plans.pop(worker, None)
        is_final = self.plans.is_over(current_round.number)
        plan = predecessor_plan or Plan(
            current_round.number, 0, (), member.batch_size, final=is_final, progress=current_round.progress
        )
        feeds = self.plans.feed_spans(member, (*share, *plan.spans))
        plan = replace(plan, version=0, evaluate=share, **self.plans.standing(member, plan.spans))
        orders = self.plans.start(member, plan, newest_version)
        return [*feeds, *orders]

    def replan(
        self, current_round: BarrierRound, members: Sequence[WorkerState], now: float
    ) -> tuple[float, list[Command]]:
        """Plan the rest of the round anew for workers that haven't delivered; return seconds saved and the new plans.

        Plans change only if the present ones miss the target, or new ones would end the round notably earlier.
        """
        members = [member for member in members if member.source.worker not in current_round.deltas]
        if self._fixed or not members:
            return 0.0, []
        equal_batches = self._equal_in(current_round.number)
        report_every_s = self._job.report_interval_s
        origin, fleet = progress_of(
            members, current_round.started_at, current_round.evaluating, report_every_s, now, equal_batches
        )
        missing_samples = current_round.target_samples - current_round.samples
        planned_samples = sum(member.planned_samples for member in members)
        correction = correct(fleet, planned_samples, missing_samples, now - origin, equal_batches)
        if not correction.misses_target:
            length_s = origin + correction.present_finish_s - current_round.started_at
            if equal_batches or correction.saved_s <= CORRECTION_GAIN * length_s:
                return 0.0, []
        is_last = self.plans.ends_by_samples and current_round.number >= self._job.rounds.update_rounds - 1
        # A worker with a plan is at least at its first batch after the merge, and delivers that.
        least_batches = np.array([member.prestarted_batches + 1 for member in members])
        batches = np.where(fleet.idle, correction.batches, np.maximum(correction.batches, least_batches))
        if is_last:  # No samples are left for others, and those that a worker may have used aren't taken back.
            batches = np.maximum(batches, fleet.planned)
        commands: list[Command] = []
        for row in np.flatnonzero(batches != fleet.planned).tolist():
            commands += self.plans.correct(members[row], int(batches[row]), now)
        current_round.awaiting.update(member.source.worker for member in members if not member.idle)
        return correction.saved_s, commands

    def expected_deltas(
        self, current_round: BarrierRound, members: Sequence[WorkerState], now: float
    ) -> list[tuple[float, int]]:
        """Expected time and samples of the deltas of workers that haven't delivered, by their present plans."""
        if not members:
            return []
        report_every_s = self._job.report_interval_s
        origin, fleet = progress_of(members, current_round.started_at, current_round.evaluating, report_every_s, now)
        deltas: list[tuple[float, int]] = []
        for member, finish_s in zip(members, fleet.finish_s().tolist(), strict=True):
            deltas.append((max(now, origin + finish_s), member.planned_samples))
        return deltas

    def _target_samples(self, round_number: int, members: Sequence[WorkerState]) -> int:
        """Samples of a round, with as many again at most of those that earlier rounds lack."""
        if self._round_samples is not None:
            free_samples = self._free_samples(members)
            self.plans.reserve = self._round_samples.reserve(round_number, free_samples)
            return self._round_samples.target(round_number, free_samples)
        usual_samples = self._job.samples(round_number)
        made_up = min(self.owed, usual_samples)
        self.owed -= made_up
        return usual_samples + made_up

    def _free_samples(self, members: Sequence[WorkerState]) -> int:
        """Samples that are neither used nor of an earlier round, if the run ends by samples."""
        ahead_samples = sum(samples_of(member.overlap_spans) for member in members)
        return self.plans.ledger.available + ahead_samples

    def _overlap_spans(
        self, member: WorkerState, round_number: int, samples: int, unplanned_samples: int
    ) -> tuple[Span, ...]:
        """Samples of the next round that a worker trains on before it merges the result of this one.

        They are fewer than the next round has, because its delta is made of the steps after the merge. At the end of a
        run `unplanned_samples` are kept for the other workers, and one of the next round for each that trains ahead.
        """
        if not self._job.rounds.warmup_rounds <= round_number + 1 < self._job.rounds.update_rounds:
            return ()
        batches = min(self._job.sync.delay_steps, max(0, samples - 1) // member.batch_size)
        if not batches:
            return ()
        self._workers_ahead += 1
        self.plans.reserve = max(self.plans.reserve, self._workers_ahead)
        return self.plans.assign(member, batches * member.batch_size, unplanned_samples)

    def _equal_in(self, round_number: int) -> bool:
        """Whether all workers get equally many batches in a round."""
        is_warmup = round_number < self._job.rounds.warmup_rounds
        return self._equal or is_warmup
