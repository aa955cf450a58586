"""Inner steps that a device hasn't finished: the host goes on, and reads later what has come of them.

host      begin 1   begin 2   begin 3   read 1   begin 4   read 2 …
device    ──── step 1 ────►──── step 2 ────►──── step 3 ────►
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hypha_ray.optim.step import Step


class PendingStep(Protocol):
    """Step that has been begun."""

    @property
    def ready(self) -> bool:
        """Whether `result` waits for nothing."""
        ...

    def result(self) -> Step:
        """Return what has come of the step, its tensors on the CPU if it was read; the first call may do work."""
        ...


class FinishedStep:
    """Step whose result is known.

    Args:
        step: the result.

    """

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
        ...

    def numbers(self) -> Tensor:
        """Return the numbers, on the CPU, once they are there."""
        ...


class CudaReading:
    """Copy of a few numbers into pinned memory, behind all that the device had to do when it was asked for.

    Args:
        figures: tensor of one dimension on the device.

    """

    def __init__(self, figures: Tensor) -> None:
        self._numbers = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
        self._numbers.copy_(figures, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(figures.device))

    @property
    def arrived(self) -> bool:
        """Whether the device has come to the copy."""
        return bool(self._event.query())

    def numbers(self) -> Tensor:
        """Return the numbers, once the device has come to the copy."""
        self._event.synchronize()
        return self._numbers


def reading_from(device: torch.device) -> Callable[[Tensor], Reading] | None:
    """Return what reads numbers from a device without a wait; None if a read waits for nothing, as on a CPU."""
    return CudaReading if device.type == "cuda" else None


class ReadStep:
    """Step whose figures are read from a device.

    Args:
        reading: the figures.
        finish: makes the result of the figures.

    """

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
