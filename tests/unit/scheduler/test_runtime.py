"""Parts of the runtime without Ray: actors that answer late, deaths and drains, and verdicts of several servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated.common_pb2 import Address
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayTaskError

from hypha_ray.config import Job
from hypha_ray.errors import CapacityError, ClusterError
from hypha_ray.scheduler.messages import Merge
from hypha_ray.scheduler.runtime import run_actors as actors
from hypha_ray.scheduler.runtime import supervised_actor as post
from hypha_ray.scheduler.runtime.global_weights import _join_verdicts
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.supervised_actor import (
    GONE,
    MAX_DEATHS,
    MEMORY_S,
    LostNode,
    NodeAttendance,
    SupervisedActor,
    death_text,
)
from hypha_ray.scheduler.runtime.telemetry_client import RoundTraces
from hypha_ray.scheduler.runtime.worker_dispatcher import WorkerDispatcher
from hypha_ray.types import Contribution, Rejection, Source, Verdict

SILENCE_S = 0.2
HEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: TrainWorker
\tactor_id: d554525d308c6a746b3f9a8601000000
\tpid: 5441
\tname: worker-0
\tnamespace: texts-1
\tip: 10.0.0.7
"""
ENDED = "The actor is dead because its worker process has died. Worker exit type: "
SILENTLY = (
    "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some "
    "common causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop."
)
WORKERS = 1000


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


def test_room_of_a_generator_that_has_just_died_is_looked_for_again_before_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(post, "GENERATOR_LOOK_S", 0.01)
    monkeypatch.setattr(post, "GENERATOR_RETRY_S", 0.01)
    no_room = CapacityError("CFG004", "the cluster has room for 1 of 2 generators beside the workers")
    starts: list[Any] = [Pinged(1), no_room, Pinged(1), no_room, no_room]
    lines: list[str] = []

    async def start() -> Any:
        if not starts:
            raise asyncio.CancelledError
        if isinstance(result := starts.pop(0), CapacityError):
            raise result
        return result

    async def run() -> None:
        kept = SupervisedActor("generator-0", start, lambda actor: None, SILENCE_S, 10.0, lambda name, why: None)
        with pytest.raises(asyncio.CancelledError):
            await post.keep(kept, lines.append)

    asyncio.run(run())
    assert lines == ["the cluster has room for 1 of 2 generators beside the workers; workers respond in their place"]


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


class Pinged:
    """Actor that answers so many pings, and is dead then."""

    def __init__(self, pings: int) -> None:
        self._pings, self.ping = pings, self

    async def remote(self) -> None:
        if self._pings == 0:
            raise ActorDiedError()
        self._pings -= 1


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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            HEAD + ENDED + SILENTLY,
            "its process 5441 on 10.0.0.7 ended without a word: killed (SIGKILL, which the system sends for lack of "
            "memory too) or crashed",
        ),
        (
            HEAD + "Task was killed due to the node running low on memory.",
            "its process 5441 on 10.0.0.7 was ended by Ray, because the machine was running out of memory",
        ),
        (
            HEAD + ENDED + "USER_ERROR Worker exit detail: Worker exits with an exit code 3.",
            "its process 5441 on 10.0.0.7 ended with exit code 3",
        ),
        (
            HEAD + "The actor died because its node has died. Node Id: 671dd7",
            "its machine 10.0.0.7 is gone",
        ),
        (
            HEAD + "It was killed by `ray.kill`.",
            "The actor died unexpectedly before finishing this task. (its process 5441 on 10.0.0.7)",
        ),
        (
            "Task failed because the node it was running on is dead or unavailable. Node IP: 10.0.0.7, node ID: 1db1",
            "its machine 10.0.0.7 is gone",
        ),
        ("The actor died.\nfurther lines", "The actor died."),
    ],
    ids=["killed", "memory", "exit code", "node", "otherwise", "node of a task", "unknown process"],
)
def test_death_is_one_line_with_machine_and_cause(text: str, line: str) -> None:
    assert death_text(RuntimeError(text)) == line


def node(number: int, alive: bool = True) -> dict[str, Any]:
    names = {"NodeManagerHostname": f"rack-{number}", "NodeManagerAddress": f"10.0.0.{number}"}
    return {"NodeID": f"id-{number}", "Alive": alive, **names}


def test_machine_that_vanishes_or_dies_is_noticed_once() -> None:
    attendance = NodeAttendance()
    assert attendance.lost([node(1), node(2), node(3)], {"id-3": [7, 4]}, 0.0) == []
    gone = [LostNode("rack-2 (10.0.0.2)", []), LostNode("rack-3 (10.0.0.3)", [4, 7])]
    assert attendance.lost([node(1), node(2, alive=False)], {}, 2.0) == gone
    assert attendance.lost([node(1), node(2, alive=False)], {}, 4.0) == []


def test_worker_that_is_lost_before_its_machine_was_on_it() -> None:
    attendance = NodeAttendance()
    attendance.lost([node(1)], {"id-1": [0, 1]}, 0.0)
    attendance.lost([node(1)], {"id-1": [1]}, MEMORY_S)
    attendance.lost([node(1)], {}, MEMORY_S + 2.0)
    assert attendance.lost([], {}, MEMORY_S + 4.0) == [LostNode("rack-1 (10.0.0.1)", [1])]


def test_machine_without_a_host_name_is_called_by_its_address() -> None:
    attendance = NodeAttendance()
    attendance.lost([node(1) | {"NodeManagerHostname": "10.0.0.1"}], {}, 0.0)
    assert attendance.lost([], {}, 2.0) == [LostNode("10.0.0.1", [])]


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


def test_norms_of_fragments_add_up_in_squares_as_those_of_parts_of_a_vector_do() -> None:
    first = Verdict(4, (Contribution(0, 1, 8, 3.0), Contribution(2, 5, 16, 2.0)), (), 6.0, 100)
    second = Verdict(4, (Contribution(0, 1, 8, 4.0), Contribution(2, 5, 16, 3.0)), (), 8.0, 50)
    third = Verdict(4, (Contribution(0, 1, 8, 12.0), Contribution(2, 5, 16, 6.0)), (), 0.0, 0)
    rejected = (Rejection(1, "a value that isn't finite"),)
    joined = _join_verdicts([first, second, third], rejected)
    assert joined == Verdict(4, (Contribution(0, 1, 8, 13.0), Contribution(2, 5, 16, 7.0)), rejected, 10.0, 150)
