"""Workers on nodes that are drained are looked for in a thread, beside others that come and go."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from hypha_ray.scheduler.runtime import run_actors as actors
from hypha_ray.scheduler.runtime.run_actors import RunActors

WORKERS, LOOKS = 1000, 300


def test_workers_that_come_and_go_meanwhile_break_no_look_at_who_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "draining_nodes", lambda: frozenset({"going"}))
    looks: list[dict[str, str]] = []

    def placed() -> dict[str, str]:
        looks.append({f"worker-{n}": "going" if n == 7 else "staying" for n in range(WORKERS)})
        return looks[-1]

    one = RunActors.__new__(RunActors)
    one._workers = dict.fromkeys(range(WORKERS))  # type: ignore[arg-type]
    one._leases = SimpleNamespace(placed=placed)  # type: ignore[assignment]
    over, errors = threading.Event(), list[Exception]()

    def look() -> None:
        try:
            for _ in range(LOOKS):
                assert set(one.draining()) <= {7}
        except Exception as error:
            errors.append(error)
        over.set()

    thread = threading.Thread(target=look)
    thread.start()
    number = 0
    while not over.is_set():
        one._workers.pop(number % WORKERS, None)
        one._workers[number % WORKERS] = None  # type: ignore[assignment]
        number += 1
    thread.join()
    assert errors == [] and one.draining() == (7,)
    assert len(looks) == LOOKS + 1, "Ray is asked once a worker"
