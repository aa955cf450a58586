"""A post without Ray: actors that answer late, or never."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated.common_pb2 import Address
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayTaskError

from hypha_ray.config import Job
from hypha_ray.errors import CapacityError, ClusterError
from hypha_ray.scheduler.messages import Merge
from hypha_ray.scheduler.runtime import supervised_actor as post
from hypha_ray.scheduler.runtime.supervised_actor import GONE, MAX_DEATHS, SupervisedActor
from hypha_ray.scheduler.runtime.telemetry_client import RoundTraces
from hypha_ray.scheduler.runtime.worker_dispatcher import WorkerDispatcher
from hypha_ray.types import Source

SILENCE_S = 0.2


class Slow:
    """Says at once that it lives, then nothing for a while, to whatever it is asked."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s, self._pings = silent_s, 0
        self.ping = self

    def remote(self) -> Coroutine[Any, Any, None]:
        self._pings += 1
        return asyncio.sleep(0 if self._pings == 1 else self._silent_s)

    def work(self) -> Coroutine[Any, Any, None]:
        return asyncio.sleep(self._silent_s)


def ask(silent_s: float) -> list[str]:
    """Ask a post whose actors all are this slow; returns why some were replaced."""
    reasons: list[str] = []

    async def start() -> Slow:
        return Slow(silent_s)

    async def run() -> None:
        kept = SupervisedActor(
            "server-0", start, lambda actor: None, SILENCE_S, 10.0, lambda name, why: reasons.append(why)
        )
        await kept.ask(lambda actor: actor.work())

    asyncio.run(run())
    return reasons


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post, "PULSE_S", 0.01)


def test_actor_that_answers_in_time_stays() -> None:
    assert ask(SILENCE_S / 4) == []


def test_successor_of_a_silent_actor_has_twice_as_long() -> None:
    assert ask(SILENCE_S * 3) == ["silent for 0.2 s", "silent for 0.4 s"]


def test_generators_without_a_machine_are_told_of_once_until_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post, "GENERATOR_RETRY_S", 0.01)
    rooms = iter([0, 0, 1, 0])
    lines: list[str] = []

    async def start() -> Any:
        room = next(rooms, None)
        if room is None:
            raise asyncio.CancelledError
        raise CapacityError("CFG004", f"the cluster has room for {room} of 2 generators beside the workers")

    async def run() -> None:
        kept = SupervisedActor("generator-0", start, lambda actor: None, SILENCE_S, 10.0, lambda name, why: None)
        with pytest.raises(asyncio.CancelledError):
            await post.keep(kept, lines.append)

    asyncio.run(run())
    assert [line.partition(" of 2 generators")[0][-1] for line in lines] == ["0", "1", "0"]
    assert all(line.endswith("beside the workers; workers respond in their place") for line in lines)


@pytest.mark.slow
def test_actors_that_never_answer_are_given_up() -> None:
    with pytest.raises(ClusterError, match=f"server-0 died {MAX_DEATHS} times in a row — got silent for 1.6 s"):
        ask(60.0)


# ── an argument that is lost ──────────────────────────────────────────────────────────────────────────────────────────


LOST = [
    ActorDiedError(),
    ActorUnavailableError("away", b"0" * 16),
    ObjectLostError("0" * 56, Address().SerializeToString(), ""),
]
"""What Ray says of an object that went with its node: by the last one only if its task had ended."""


class Told:
    """Lives, and answers each call with an error of Ray's: as a method does whose argument can't be had."""

    def __init__(self, errors: list[Exception]) -> None:
        self._errors, self.ping, self.calls = errors, self, 0

    async def remote(self, *_: Any) -> None:
        pass

    async def work(self) -> None:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)


@pytest.mark.parametrize("lost", LOST, ids=lambda lost: type(lost).__name__)
def test_lost_argument_is_raised_and_costs_no_actor(lost: Exception) -> None:
    error, ended, notes = RayTaskError("receive", "Traceback …", lost).as_instanceof_cause(), list[Any](), list[str]()
    actor = Told([error])

    async def start() -> Told:
        return actor

    async def run() -> None:
        kept = SupervisedActor("server-0", start, ended.append, SILENCE_S, 10.0, lambda name, why: notes.append(why))
        with pytest.raises(GONE):
            await kept.ask(lambda one: one.work())
        await kept.ask(lambda one: one.work())

    asyncio.run(run())
    assert actor.calls == 2 and not ended and not notes


@pytest.mark.parametrize("lost", LOST, ids=lambda lost: type(lost).__name__)
def test_order_about_lost_weights_is_no_death_of_the_worker_and_not_dropped(lost: Exception) -> None:
    error = RayTaskError("merge", "Traceback …", lost).as_instanceof_cause()
    tasks: list[asyncio.Task[None]] = []

    async def run() -> None:
        worker, to = Told([ActorUnavailableError("away", b"0" * 16), error]), Source("run", 1, 1)
        actors = SimpleNamespace(worker=lambda number: (worker, to))
        weights = SimpleNamespace(orders=lambda to, number, whole: [lambda one: one.work()])

        def spawn(task: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            tasks.append(asyncio.get_running_loop().create_task(task))
            return tasks[-1]

        traces = RoundTraces(Job(), attempt=1)
        dispatcher = WorkerDispatcher(actors, weights, None, None, print, spawn, traces)  # type: ignore[arg-type]
        dispatcher.order(Merge(1, 3))
        with pytest.raises(GONE):
            await tasks[0]
        assert worker.calls == 2, "a call that was lost on the way is made again"

    asyncio.run(run())
