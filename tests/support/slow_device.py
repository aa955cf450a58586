"""Devices whose figures come late, on a CPU, or that no host can read."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from hypha_ray.worker import supervised


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


class UnreadReading:
    """Reading of a device that never has the figures."""

    arrived = False

    def __init__(self, figures: torch.Tensor) -> None:
        assert figures.device.type == "meta"


class _Autocast(torch.autocast):
    """Mixed precision, which torch lacks on its meta device."""

    def __init__(self, device_type: str, *arguments: Any, **options: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *arguments, **options)


def use_unreadable_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers compute on torch's meta device, which raises when a number is read: a GPU would be waited for."""
    monkeypatch.setattr(supervised, "device_of", lambda wish: torch.device("meta"))
    monkeypatch.setattr(supervised, "reading_from", lambda device: UnreadReading)
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_get_fused_kernels_supported_devices", lambda: ["meta"])
    monkeypatch.setattr(torch, "autocast", _Autocast)
