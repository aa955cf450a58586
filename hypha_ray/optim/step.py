"""Result of an inner step, and steps that a device hasn't finished: the host goes on, and reads the result later.

host      begin 1   begin 2   begin 3   read 1   begin 4   read 2 …
device    ──── step 1 ────►──── step 2 ────►──── step 3 ────►
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hypha_ray.types import PromptsOfResponder, Sums


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a batch, with tensors on the device that aren't waited for."""

    loss: torch.Tensor
    """Mean loss over the scored positions."""
    scored: int
    """Number of scored positions; with 0 the batch has changed nothing."""
    norm: torch.Tensor
    """L2 norm of the gradients before clipping."""
    tokens: int | None = None
    """Number of tokens without padding; None for data without tokens."""
    sums: Sums = field(default_factory=dict)
    """Further figures of the batch."""
    figures: torch.Tensor | None = None
    """Sums and weights of further figures, which aren't named yet, [figures, 2]; None without them."""
    bad: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 3), np.int64))
    """Keys, as `Samples.keys`, of samples that were left out because loss or gradient weren't finite."""
    shown: tuple[Mapping[str, Any], ...] = ()
    """Records of a few responses, for people to read."""
    revived: tuple[int, ...] = ()
    """Numbers of the model workers that have died and were replaced since the batch before."""
    problems: tuple[str, ...] = ()
    """Lines for the user about failures that didn't stop the training."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds of parts of the step, by the names of figures."""
    responders: tuple[PromptsOfResponder, ...] = ()
    """Prompts of the batch by the process that responded to them, if others than the worker may."""
    extra: int = 0
    """Number of samples that were used beside those of the batch: the next ones of the round."""


class PendingStep(Protocol):
    """Step that was begun."""

    @property
    def ready(self) -> bool:
        """Whether `result` waits for nothing."""

    def result(self) -> Step:
        """Return the result of the step, with tensors on the CPU if it was read; the first call may do work."""


class FinishedStep:
    """Step whose result is known."""

    ready = True

    def __init__(self, step: Step) -> None:
        self._step = step

    def result(self) -> Step:
        """Return the result."""
        return self._step


class Reading(Protocol):
    """Numbers on their way from a device to the host."""

    @property
    def arrived(self) -> bool:
        """Whether the numbers are there."""

    def numbers(self) -> Tensor:
        """Return the numbers, on the CPU, once they are there."""


class CudaReading:
    """Copy of a few numbers, of shape [n], into pinned memory, after all earlier work of the device."""

    def __init__(self, figures: Tensor) -> None:
        self._numbers = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
        self._numbers.copy_(figures, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(figures.device))

    @property
    def arrived(self) -> bool:
        """Whether the device has done the copy."""
        return bool(self._event.query())

    def numbers(self) -> Tensor:
        """Return the numbers, once the device has done the copy."""
        self._event.synchronize()
        return self._numbers


def reading_from(device: torch.device) -> Callable[[Tensor], Reading] | None:
    """Return a function that begins to read numbers from a device; None if a read waits for nothing, as on a CPU."""
    return CudaReading if device.type == "cuda" else None


class ReadStep:
    """Step whose figures are read from a device."""

    def __init__(self, reading: Reading, finish: Callable[[Tensor], Step]) -> None:
        self._reading = reading
        self._finish = finish
        self._step: Step | None = None

    @property
    def ready(self) -> bool:
        """Whether the figures are there."""
        return self._reading.arrived

    def result(self) -> Step:
        """Return the result, which is made once."""
        if self._step is None:
            self._step = self._finish(self._reading.numbers())
        return self._step
