"""Workers that tests fork are like those that Ray starts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.support.forked_workers import TOOLS

OWN = {"RAY_RAYLET_PID", "TEST_FORKS"}
"""Variables of each Ray, and of tests that fork."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)


class Mirror:
    """A worker that describes its own process."""

    def look(self) -> dict[str, Any]:
        import numpy as np

        process = Path("/proc/self")
        return {
            "parent": Path(f"/proc/{os.getppid()}/cmdline").read_text(),
            "of_job": (os.environ["RAY_RAYLET_PID"], ray.get_runtime_context().get_job_id()),
            "template": os.getppid(),
            "random": (float(np.random.random()), ray.NodeID.from_random().hex()),
            "alike": {
                "arguments": [argument.partition("=")[0] for argument in sys.argv],
                "environment": {name: value for name, value in os.environ.items() if name not in OWN},
                "folder": str(Path.cwd()),
                "path": sys.path,
                "leads its group": os.getpgid(0) == os.getpid(),
                "priority": (os.nice(0), (process / "oom_score_adj").read_text()),
                "handlers": [getattr(signal.getsignal(number), "__name__", None) for number in SIGNALS],
                "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            },
        }


def mirrors() -> list[dict[str, Any]]:
    """Start a Ray, and describe two of its workers."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
    try:
        workers = [ray.remote(Mirror).remote() for _ in range(2)]
        seen: list[dict[str, Any]] = ray.get([worker.look.remote() for worker in workers])
        return seen
    finally:
        ray.shutdown()


@pytest.mark.long
def test_forked_workers_are_like_those_that_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their PYTHONPATH is that of a campaign against a job, which has a folder more than the variable had at first.

    Workers of two Rays are forked from one process.
    """
    monkeypatch.setenv("PYTHONPATH", TOOLS, prepend=os.pathsep)
    forked = [*mirrors(), *mirrors()]
    monkeypatch.delenv("TEST_FORKS")
    started = mirrors()
    assert all("forked_workers" in worker["parent"] for worker in forked)
    assert not any("forked_workers" in worker["parent"] for worker in started)
    for one in forked:
        assert one["alike"] == started[0]["alike"] == started[1]["alike"]
    assert len({worker["template"] for worker in forked}) == 1
    assert forked[0]["of_job"] == forked[1]["of_job"] != forked[2]["of_job"] == forked[3]["of_job"]
    assert all(len(set(numbers)) == 4 for numbers in zip(*(worker["random"] for worker in forked), strict=True))
