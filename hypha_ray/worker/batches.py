"""Computation of a batch: its copy to the device, its losses, sums over processes; and counts and clocks of a round."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hypha_ray.config import Job
from hypha_ray.config.automatic import OFF
from hypha_ray.exchange_schedule import ReportSchedule
from hypha_ray.model.execution import CompiledByShape, Compute, compile_layers, try_gradients
from hypha_ray.model.layout import blocks_of
from hypha_ray.model.loss_check import head_of
from hypha_ray.model.losses import Losses, training_losses
from hypha_ray.model.task import Task
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.step import Step
from hypha_ray.optim.torch_extras import MIXED
from hypha_ray.types import PromptsOfResponder, Report, Source, Sums, added

log = logging.getLogger(__name__)


class Reduction(Protocol):
    """Sums over all processes that have a part of a batch."""

    def total(self, count: int) -> int:
        """Return the sum of a number that each process has."""
        ...

    def add_up(self, parameters: Sequence[Tensor], loss: Tensor) -> None:
        """Replace gradients and loss by their sums, in the first process; in others they are undefined afterwards."""
        ...

    def norm(self, optimizer: Inner) -> Tensor:
        """Return the norm of the summed gradients, as the first process needs it."""
        ...


class SingleProcess:
    """Sums in a worker of one process."""

    def total(self, count: int) -> int:
        """Return the number itself."""
        return count

    def add_up(self, parameters: Sequence[Tensor], loss: Tensor) -> None:
        """Leave everything as it is."""

    def norm(self, optimizer: Inner) -> Tensor:
        """Return the norm of the gradients."""
        return optimizer.norm()


class InputCopies:
    """Copies on a stream of their own, from pinned memory; on a CPU there is nothing to copy.

    So a batch comes to the device while the step before it is computed.

    Args:
        device: device of the model.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_device(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors on the device, which may be used on its current stream."""
        if self._stream is None:
            return {name: tensor.to(self._device) for name, tensor in inputs.items()}
        with torch.cuda.stream(self._stream):
            copies = {name: tensor.pin_memory().to(self._device, non_blocking=True) for name, tensor in inputs.items()}
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for copy in copies.values():
            copy.record_stream(computing)  # The copy's memory is free for other copies once the step is over.
        return copies


class Computation:
    """Computes the losses of a trainer's batches, without compiling in a model's evaluation mode.

    Settings that were chosen automatically are on trial with the first batch. If it fails, they are disabled, and
    `problems` has a line about that. Running out of memory is no such failure.

    Args:
        job: the job file, with settings in the place of ``auto``.
        task: task from `resolve_task`.
        model: model to run.
        keeps_copies: whether copies of weights in 16 bits may be kept for a forward pass.
        scale: scale of losses, which changes in place; None: they aren't scaled.

    Raises:
        ConfigError: MODEL020, the loss can't be fused.

    """

    def __init__(self, job: Job, task: Task, model: Any, keeps_copies: bool, scale: Tensor | None = None) -> None:
        self._task = task
        self._scale = scale
        self._model = model
        self._keeps_copies = keeps_copies
        self.head: Any = None
        """Layer that the loss is fused with; None: it isn't fused."""
        if job.worker.fused_loss is True:
            self.head = head_of(task, model)
        self.autocast = MIXED.get(job.worker.autocast)
        """Dtype of mixed precision; None: full precision."""
        self.problems: tuple[str, ...] = ()
        """Lines for the user about settings that were disabled."""
        self.disabled: tuple[str, ...] = ()
        """Names of these settings."""
        self._settings_on_trial: set[str] = set()
        for name in job.reasons:
            is_enabled = getattr(job.worker, name) != OFF[name]
            if is_enabled and name != "attention":
                self._settings_on_trial.add(name)
        self._layers: list[torch.nn.Module] = []
        """Layers that are compiled one by one; none if the whole model is."""
        if job.worker.compile == "layers":
            self._layers = blocks_of(model)
        self._compute = self._choose_function(job.worker.compiles)

    def __call__(self, inputs: Mapping[str, torch.Tensor], device: torch.device) -> Losses:
        """Return the losses of a batch on its device."""
        on_trial = self._settings_on_trial
        self._settings_on_trial = set()
        try:
            if "compile" in on_trial:
                try_gradients(partial(self._compute_losses, inputs, device), self._model, device)
            return self._compute_losses(inputs, device)
        except Exception as error:  # Compilers and kernels raise anything.
            if not on_trial or isinstance(error, torch.OutOfMemoryError):
                raise
            log.exception("the settings that were chosen don't work")
            self._disable(on_trial, error)
            return self._compute_losses(inputs, device)

    def _compute_losses(self, inputs: Mapping[str, torch.Tensor], device: torch.device) -> Losses:
        mixes = self.autocast is not None
        with torch.autocast(device.type, self.autocast, enabled=mixes, cache_enabled=self._keeps_copies):
            return self._compute(inputs) if self._model.training else self._plain(inputs)

    def _disable(self, on_trial: set[str], error: Exception) -> None:
        """Disable settings that were chosen automatically, after an error."""
        if "autocast" in on_trial:
            self.autocast = None
        if "fused_loss" in on_trial:
            self.head = None
        is_compiled = isinstance(self._compute, CompiledByShape)
        self._compute = self._choose_function(is_compiled and "compile" not in on_trial)
        self.disabled = tuple(sorted(on_trial))
        names = ", ".join(f"worker.{name}" for name in self.disabled)
        text = " ".join(str(error).split())
        reason = f"{type(error).__name__}: {text}"[:200]
        self.problems = (f"{names} = auto: what was chosen doesn't work here, and is left off ({reason})",)

    def _choose_function(self, compiles: bool) -> Compute:
        compute = partial(training_losses, self._task, self._model)
        if self.head is not None:
            compute = partial(compute, head=self.head, scale=self._scale)
        self._plain = compute
        if not compiles:
            return compute
        if self._layers:
            return CompiledByShape(compute, partial(compile_layers, self._layers))
        return CompiledByShape(compute)


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
    """Time at which the batches of the next report began."""
    _reported: tuple[int, int, int, int, float] = (0, 0, 0, 0, 0.0)
    _timed_from: int = 1
    """Number of batches that aren't timed: the first one of a round is slower (cold caches, merge)."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of the wait for a batch, with which a step begins."""
        began_at = time.monotonic()
        if self._paused_s is not None:
            self._began_s += began_at - self._paused_s
            self._reported_s += began_at - self._paused_s
            self._timed_s += began_at - self._paused_s
            self._paused_s = None
        yield
        self.data_wait_s += time.monotonic() - began_at

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
        remaining_batches = batches * (self.planned - self.samples) / samples
        return self.schedule.due(seconds, batches, remaining_batches)

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
