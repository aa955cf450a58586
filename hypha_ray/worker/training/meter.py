"""Counts and clocks of a worker's round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hypha_ray.exchange_schedule import ReportSchedule
from hypha_ray.optim.step import Step
from hypha_ray.types import PromptsOfResponder, Report, Source, Sums, added


@dataclass(slots=True)
class Meter:
    """Adds up the results of steps into reports and totals of the round."""

    source: Source
    round: int
    schedule: ReportSchedule
    planned: int = 0
    """Number of samples of the worker's present plan."""
    begun: int = 0
    """Number of samples whose steps have begun."""
    batches: int = 0
    """Number of batches with results."""
    samples: int = 0
    """Number of samples with results."""
    tokens: int | None = None
    """Number of tokens without padding; None for data without tokens."""
    scored: int = 0
    """Number of positions that the losses are means over."""
    data_wait_s: float = 0.0
    sums: Sums = field(default_factory=dict)
    """Further figures of the round's reported steps."""
    responders: list[PromptsOfResponder] = field(default_factory=list)
    """Prompts by the process that responded to them, of each batch."""
    _steps: list[Sums] = field(default_factory=list)
    _losses: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Losses and scored positions of steps; they may be on the device until a report needs them."""
    _loss_sum: float = 0.0
    _norm: torch.Tensor | None = None
    _learning_rate: float = 0.0
    _began_s: float = field(default_factory=time.monotonic)
    _paused_s: float | None = None
    _reported_s: float = field(default_factory=time.monotonic)
    """Time of the last report, or of the round's beginning: the scheduler takes longer silence for a slow batch."""
    _timed_s: float = field(default_factory=time.monotonic)
    """Time at which the batches began that the next report has the time of."""
    _reported: tuple[int, int, int, int, float] = (0, 0, 0, 0, 0.0)
    _timed_from: int = 1
    """Number of batches that aren't timed: the first one of a round is slower (cold caches, merge)."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of the wait for a batch, with which a step begins."""
        began = time.monotonic()
        if self._paused_s is not None:
            self._began_s += began - self._paused_s
            self._reported_s += began - self._paused_s
            self._timed_s += began - self._paused_s
            self._paused_s = None
        yield
        self.data_wait_s += time.monotonic() - began

    def step(self, result: Step, samples: int, learning_rate: float) -> None:
        """Count a batch and its result."""
        self.batches += 1
        self.samples += samples
        if result.tokens is not None:
            self.tokens = (self.tokens or 0) + result.tokens
        self.scored += result.scored
        self.responders += result.responders
        self._learning_rate = learning_rate
        if result.sums:
            self._steps.append(result.sums)
        if result.times:
            self._steps.append({name: (seconds, 1.0) for name, seconds in result.times.items()})
        if result.scored:
            self._losses.append((result.loss, result.scored))
            self._norm = result.norm
        if self.batches == 1:
            self._timed_s = time.monotonic()

    def pause(self) -> None:
        """Stop the clocks until the next step begins."""
        self._paused_s = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether a report is due."""
        samples = self.samples - self._reported[1]
        if not samples:
            return False
        seconds = time.monotonic() - self._reported_s
        batches = self.batches - self._reported[0]
        remaining = batches * (self.planned - self.samples) / samples
        return self.schedule.due(seconds, batches, remaining)

    @property
    def pending(self) -> bool:
        """Whether anything isn't reported yet."""
        return self.batches > self._reported[0]

    @property
    def train_s(self) -> float:
        """Seconds since the round's first batch was asked for."""
        return time.monotonic() - self._began_s

    @property
    def loss(self) -> float | None:
        """Mean loss of the round's reported positions; None if nothing was scored."""
        if not self.scored:
            return None
        return self._loss_sum / self.scored

    def report(self) -> Report:
        """Figures of the results since the last report."""
        loss_sum = sum(float(loss) * scored for loss, scored in self._losses)
        now = time.monotonic()
        batches, samples, tokens, scored, waited_s = self._reported
        report = Report(
            source=self.source,
            round=self.round,
            batches=self.batches - batches,
            samples=self.samples - samples,
            tokens=None if self.tokens is None else self.tokens - tokens,
            scored=self.scored - scored,
            loss_sum=loss_sum,
            seconds=now - self._timed_s,
            timed_batches=self.batches - max(batches, self._timed_from),
            data_wait_s=self.data_wait_s - waited_s,
            learning_rate=self._learning_rate,
            gradient_norm=None if self._norm is None else float(self._norm),
            sums=added(self._steps),
        )
        self.sums = added([self.sums, report.sums])
        self._steps.clear()
        self._losses.clear()
        self._loss_sum += loss_sum
        self._reported = (self.batches, self.samples, self.tokens or 0, self.scored, self.data_wait_s)
        self._reported_s = now
        self._timed_s = now
        return report
