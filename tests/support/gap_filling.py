"""Distribution of test files over pytest-xdist's processes: one of three only fills the gaps that the others leave.

Tests with a cluster wait a fourth of their time, for Ray, leases and deadlines. What computes and looks at no clock is
done in that time, by a process of low priority.
"""

from __future__ import annotations

import os

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

FILLER = "gw2"
"""Name of the process that fills gaps: the third."""
NICENESS = 5
"""Of that process: it has a quarter of the time of another one that computes."""
TIMED = ("jobs", "cluster", "unit/bridge", "unit/rl", "unit/worker")
"""Rooms whose tests look at a clock, or start Ray."""
COMPUTING = (
    *(f"jobs/test_{what}.py" for what in ("command_lines", "early_refusals", "looking", "prepare")),
    *(
        f"unit/rl/test_{what}.py"
        for what in ("continuous_engine", "learner", "reward_model", "rewards", "server_engine")
    ),
    *(f"unit/worker/test_{what}.py" for what in ("flights", "loop", "preferences", "torchft_agreement")),
)
"""Files in them whose tests start no Ray, and look at no clock or have seconds to spare."""


class GapFilling(LoadFileScheduling):  # type: ignore[misc] # pytest-xdist has no types for it.
    """Gives each process a file at a time: the filler those that only compute, the others these at last."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        filler = node.gateway.id == FILLER
        fitting = (file for file in self.workqueue if _only_computes(file) == filler)
        self.workqueue.move_to_end(next(fitting, next(iter(self.workqueue))), last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node.gateway.id == FILLER and not any(map(_only_computes, self.workqueue)):
            if not node.shutting_down:
                node.shutdown()  # After what it has.
        else:
            super()._reschedule(node)


def fills_gaps() -> bool:
    """Whether this process is the filler, whose tests start no Ray."""
    return os.environ.get("PYTEST_XDIST_WORKER") == FILLER


def give_way() -> None:
    """Lower the priority of this process, if it is the filler."""
    if fills_gaps():
        os.nice(NICENESS)


def _only_computes(file: str) -> bool:
    room = file.removeprefix("tests/")
    return room in COMPUTING or not room.startswith(tuple(f"{timed}/" for timed in TIMED))
