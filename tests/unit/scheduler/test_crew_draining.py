"""Workers that are to leave: Ray is asked in a thread, and the workers are read in the event loop alone."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from hypha_ray.scheduler.runtime import run_actors as actors
from hypha_ray.scheduler.runtime.run_actors import RunActors

WORKERS = 1000


class Workers(dict[int, None]):
    """Workers that only the event loop's thread may look through, since it changes them."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        assert threading.current_thread() is threading.main_thread()
        return super().__iter__()


def test_workers_on_drained_nodes_and_on_leases_that_end_are_told_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[threading.Thread] = []

    def placed() -> dict[str, str]:
        looks.append(threading.current_thread())
        return {f"worker-{n}": "going" if n in (7, WORKERS) else "staying" for n in range(WORKERS + 1)}

    async def ending() -> dict[str, str]:
        return {"worker-3": "its lease ends after 60 s", "server-0": "its owner lets the machine no longer"}

    monkeypatch.setattr(actors, "draining_nodes", lambda: frozenset({"going"}))
    one = RunActors.__new__(RunActors)
    one._workers = Workers(dict.fromkeys(range(WORKERS)))  # type: ignore[assignment]
    one.leases = SimpleNamespace(placed=placed, ending=ending)  # type: ignore[assignment]
    assert asyncio.run(one.leaving()) == {3: "its lease ends after 60 s", 7: "its node is being drained"}
    assert len(looks) == 1, "Ray is asked once a worker"
    assert looks[0] is not threading.main_thread()
