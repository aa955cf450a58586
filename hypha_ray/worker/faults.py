"""Faults that tests ask for: a slow machine, and the damage that the failpoint ``worker.payload`` does to a delta."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hypha_ray.config import Job
from hypha_ray.model.layout import Array
from hypha_ray.types import Flat
from hypha_ray.types.data import is_trained
from hypha_ray.types.events import HandOver

_FACTORS = {"zero": 0.0, "flip": -1.0, "huge": 1e6}
"""Actions that scale w − θ."""


class Throttle:
    """Slowness of a machine."""

    def __init__(self, job: Job, worker: int) -> None:
        slowdown = job.testing.slowdown
        times = job.testing.batch_times_s
        self._slowdown = slowdown[worker] if worker < len(slowdown) else 1.0
        self._least_s = job.testing.batch_s or 0.0
        if worker < len(times):
            self._least_s = times[worker]

    @property
    def slows(self) -> bool:
        """Whether the machine is to be slowed down."""
        return self._slowdown > 1 or self._least_s > 0

    def wait(self, step_s: float) -> None:
        """Wait after a step of this time for as long as the slower machine would."""
        wait_s = max((self._slowdown - 1) * step_s, self._least_s - step_s)
        if wait_s > 0:
            time.sleep(wait_s)


def corrupted(action: str, result: HandOver, theta: Sequence[Flat]) -> list[HandOver]:
    """Return the results that a worker under this action hands over instead of its own one.

    ``repeat`` sends everything twice, ``stale`` first sends it as of the round before. Each other action damages the
    parameters of copies of the payloads: ``nan`` and ``inf`` one value, ``zero``, ``flip`` and ``huge`` (× 10⁶) their
    difference to θ, ``shape``, ``dtype`` and ``names`` their form.
    """
    if action == "repeat":
        return [result, result]
    if action == "stale":
        earlier_delta = replace(result.delta, round=result.delta.round - 1)
        return [HandOver(earlier_delta, result.parts), result]
    payloads = result.parts[: len(theta)]
    parts: list[Flat] = []
    for payload, theta_of_fragment in zip(payloads, theta, strict=True):
        parts.append(_damaged(action, payload, theta_of_fragment))
    parts.extend(result.parts[len(theta) :])
    return [HandOver(result.delta, parts)]


def _damaged(action: str, payload: Flat, theta: Flat) -> Flat:
    damaged: Flat = {}
    for group, array in payload.items():
        if not is_trained(group):
            damaged[group] = array
            continue
        match action:
            case "nan" | "inf":
                damaged[group] = array.copy()
                damaged[group][0] = float(action)
            case "zero" | "flip" | "huge":
                damaged[group] = _scaled(array, theta[group], _FACTORS[action])
            case "shape":
                damaged[group] = array[:-1].copy()
            case "dtype":
                damaged[group] = array.astype(np.float16)
            case "names":
                damaged[f"{group}/renamed"] = array.copy()
            case _:
                raise ValueError(f"worker.payload knows no action {action!r}")
    return damaged


def _scaled(weights: Array, theta: Array, factor: float) -> Array:
    scaled: Array = theta + factor * (weights - theta)
    return scaled
