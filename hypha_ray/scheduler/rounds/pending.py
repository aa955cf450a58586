"""Rounds that are over, and evaluations, until all is known for their records."""

from __future__ import annotations

from collections import deque

from hypha_ray.config import Job
from hypha_ray.model.tasks.table import find_task
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.ledger.ledger import Ledger
from hypha_ray.scheduler.messages import Outbox
from hypha_ray.scheduler.resume_point import RunTotals
from hypha_ray.scheduler.rounds.round import Evaluation, Round


class PendingRounds:
    """Committed rounds whose results some workers have yet to merge, and the evaluation that goes on.

    Args:
        job: the job file.
        tally: of the run.
        ledger: of the run.
        out: takes the records.

    """

    def __init__(self, job: Job, tally: RunTotals, ledger: Ledger, out: Outbox) -> None:
        self._rounds, self._totals, self._ledger, self._out = job.rounds.update_rounds, tally, ledger, out
        self._perplexity = find_task(job.model.type).perplexity
        self.awaiting_merge: deque[Round] = deque()
        """Oldest first."""
        self.evaluation: Evaluation | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing is open."""
        return not self.awaiting_merge and self.evaluation is None

    def busy(self, due: int) -> set[int]:
        """Workers that have to evaluate, or to merge results up to the weights of that number."""
        found = set(() if self.evaluation is None else self.evaluation.pending)
        return found.union(*(one.merging for one in self.awaiting_merge if one.number < due))

    def forget(self, worker: int) -> None:
        """Wait no longer for a lost worker; another one will evaluate its share."""
        for one in self.awaiting_merge:
            one.merging.discard(worker)
        if self.evaluation is not None:
            self.evaluation.lose(worker)

    def stop_waiting(self, due: int, now: float) -> None:
        """Write the records of weights before that number, without waiting for further merges or evaluations.

        Of a part of an evaluation there is no record.
        """
        for one in self.awaiting_merge:
            if one.number < due:
                one.merging.clear()
        if self.evaluation is not None and self.evaluation.weights_round < due:
            self.evaluation = None
        self.settle(now)

    def settle(self, now: float) -> None:
        """Write what is complete, a round after the evaluation of its weights."""
        self.settle_evaluation(now)
        while self.awaiting_merge and not self.awaiting_merge[0].merging:
            if self.evaluation is not None and self.evaluation.weights_round == self.awaiting_merge[0].number:
                break
            self.emit(now)

    def settle_evaluation(self, now: float) -> None:
        """Write the record of the evaluation, if it is complete."""
        if self.evaluation is not None and self.evaluation.complete:
            record = self.evaluation.record(self._perplexity)
            if record is not None:
                self._out.put(c.LogMetric({**record, "elapsed_s": self._totals.elapsed_s(now)}))
            self.evaluation = None

    def emit(self, now: float) -> None:
        """Write the record of the oldest round, if there is one."""
        if self.awaiting_merge:
            done = self.awaiting_merge.popleft()
            self._out.put(c.LogMetric(done.record(self._rounds, self._totals.elapsed_s(now), self._ledger.epoch)))
