"""What the scenarios of the scheduler's core have in common."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypha_ray.scheduler import messages as c
from tests.support.virtual_fleet import Faults, VirtualFleet, job_of, slices_of

FIRST_ONLY = Faults(room=lambda source: source.incarnation == 10_001)
"""No lost worker can be replaced."""


def rounds(update_rounds: int = 3, samples: int = 400, batch: int = 4, **more: int) -> dict[str, int]:
    return {"update_rounds": update_rounds, "samples_between_updates": samples, "max_batch_size": batch, **more}


def used(fleet: VirtualFleet) -> Counter[tuple[int, int, int]]:
    """How often each (epoch, slice, sample) is in a commit."""
    return Counter(
        (span.epoch, span.slice, sample)
        for persist in fleet.persisted
        for _, spans in persist.spans
        for span in spans
        for sample in range(span.start, span.stop)
    )


def fleet_of(
    *speeds: float, faults: Faults | None = None, update_rounds: int = 3, samples: int = 400, **tables: Any
) -> VirtualFleet:
    return VirtualFleet(
        job_of(rounds=rounds(update_rounds, samples), **tables), list(speeds), slices_of(20, 64), faults
    )


def done(fleet: VirtualFleet) -> VirtualFleet:
    """Run it; it must end well, with every sample used once at most."""
    fleet.run()
    assert fleet.finished is not None and fleet.finished.error is None
    assert set(used(fleet).values()) == {1}
    return fleet


def on(fleet: VirtualFleet, kind: type, action: Any, after_s: float = 0.01, when: Any = lambda command: True) -> None:
    """Do something once, shortly after the first command of a kind."""
    perform, waiting = fleet._perform, [action]

    def spy(command: c.Command) -> None:
        perform(command)
        if waiting and isinstance(command, kind) and when(command):
            fleet.at(after_s, waiting.pop())

    fleet._perform = spy  # type: ignore[method-assign]
