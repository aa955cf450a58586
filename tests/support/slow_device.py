"""A device whose figures come late, on a CPU."""

from __future__ import annotations

import pytest
import torch

from hypha_ray.worker.training import supervised


class SlowDevice:
    """Readings that never say that they have arrived, so that the loop waits for them when it has to."""

    def __init__(self) -> None:
        self.begun = 0

    def reading(self, figures: torch.Tensor) -> SlowReading:
        self.begun += 1
        return SlowReading(figures.clone())


class SlowReading:
    arrived = False

    def __init__(self, figures: torch.Tensor) -> None:
        self._figures = figures

    def numbers(self) -> torch.Tensor:
        return self._figures


def use_slow_device(monkeypatch: pytest.MonkeyPatch) -> SlowDevice:
    """Let trainers compute on such a device from here on."""
    device = SlowDevice()
    monkeypatch.setattr(supervised, "reading_from", lambda _: device.reading)
    return device
