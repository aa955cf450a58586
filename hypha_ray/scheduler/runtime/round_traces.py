"""Spans of rounds at the scheduler, which the spans of all other processes belong to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import version_due
from hypha_ray.scheduler.messages import Assign, Command, Input, Persist, Reduce, Reduced
from hypha_ray.store.commits import reduction_of
from hypha_ray.traces.tracing import RoundKey, now_ns, start_round, traced
from hypha_ray.types import Delta, Evaluated, Merged, WeightsVersion

if TYPE_CHECKING:
    from opentelemetry.trace import Span

OPEN_ROUNDS = 10
"""Rounds of each worker for which the span of a round stays open: without a barrier, deltas may be as late."""


class RoundTraces:
    """Spans of an attempt's rounds, each from the first plan to the end of all that was done for the round.

    A round is over some rounds later, so the end of its span is set then, in hindsight.

    Args:
        job: the job file.
        attempt: number of the scheduler, over the whole run.

    """

    def __init__(self, job: Job, attempt: int) -> None:
        self._job = job
        self._attempt = attempt
        self._most_open = job.sync.in_flight + 1 if job.sync.traits.has_barrier else OPEN_ROUNDS * job.num_workers
        self._spans: dict[int, Span] = {}
        """Open spans by round."""
        self._ended_ns: dict[int, int] = {}
        """Time of the last thing done for each of these rounds, in nanoseconds since 1970."""
        self._begun: dict[int, int] = {}
        """Round that each worker has begun last."""
        self._reductions: dict[int, int] = {}
        """Round of the reduction that made a commit's weights, by the commit's round, until the commit is written."""

    def follow(self, command: Command) -> None:
        """Start the span of a round with its first plan."""
        match command:
            case Assign(plan=plan):
                if plan.evaluate:
                    self._start(version_due(self._job, plan.round) - 1)
                if not plan.final:
                    self._start(plan.round)
            case Reduce(round=number):
                self._start(number)
            case Persist(round=number):
                self._reductions[number] = reduction_of(command)

    def hear(self, event: Input) -> None:
        """Extend the span of a round to what was done for it now."""
        match event:
            case Merged(source=source, version=version):
                self._extend(self.of_weights(version))
                self._extend(self._begun.get(source.worker, version))  # It may have dropped that round.
                self._begun[source.worker] = version
            case Evaluated(round=number):
                self._extend(version_due(self._job, number) - 1)
            case Delta(round=number):
                self._extend(number)
            case Reduced(verdict=verdict):
                self._extend(verdict.round)

    def committed(self, round: int) -> None:
        """Extend the span of the round whose reduction a commit has."""
        self._extend(self._reductions.pop(round))

    def of_weights(self, version: WeightsVersion) -> int:
        """Round that weights are sent for: that whose result they are, or the first one, which begins with them."""
        return version - 1 if version - 1 in self._spans else version

    @contextmanager
    def transfer(self, round: int, direction: str, worker: int, **attributes: int) -> Iterator[None]:
        """Record the block as a transfer from a worker, ``up``, or to it, ``down``; none of a round without a span."""
        if round not in self._spans:
            yield
            return
        with traced("transfer", RoundKey(self._attempt, round), direction=direction, worker=worker, **attributes):
            yield
        self._extend(round)

    def end(self) -> None:
        """End all spans."""
        for number in list(self._spans):
            self._end(number)

    def _start(self, number: int) -> None:
        newest = max(self._spans, default=number)
        if number in self._spans or number <= newest - self._most_open:
            return
        started = start_round(RoundKey(self._attempt, number))
        if started is None:
            return
        self._spans[number] = started
        self._ended_ns[number] = now_ns()
        for older in list(self._spans):
            if older <= number - self._most_open:
                self._end(older)

    def _extend(self, number: int) -> None:
        if number in self._spans:
            self._ended_ns[number] = now_ns()

    def _end(self, number: int) -> None:
        self._spans.pop(number).end(self._ended_ns.pop(number))
