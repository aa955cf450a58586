"""Supervision of an actor without state of its own: its death is explained, and another one takes its place."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError, RayTaskError

from hypha_ray.errors import CapacityError, ClusterError, HyphaError, first_line

_PROCESS = re.compile(r"^\s*pid: (\d+)", re.MULTILINE)
_ADDRESS = re.compile(r"(?:^\s*ip|\bNode IP): ([^\s,]+)", re.MULTILINE)
_EXIT_CODE = re.compile(r"exit code (\d+)")
_SILENT_END = "End of file"
"""Ray's words for a connection that ended with its process, of which Ray doesn't learn the signal."""
_NO_MEMORY = "running low on memory"
_NODE_DIED = re.compile("node has died|node it was running on is dead")
"""Ray's words about an actor, and about a task."""
MEMORY_S = 60.0
"""Time for which a lost worker counts to its machine: Ray finds a machine to be dead later than its processes."""
PULSE_S = 1.0
"""Seconds without an answer after which the actor is pinged."""
AGAIN_S = 0.2
MAX_LOST_CALLS = 20
"""Attempts of a call, `AGAIN_S` seconds apart, before the actor is replaced."""
MAX_DEATHS = 4
"""Actors in a row that may die during one call before the call counts as the cause."""
GENERATOR_LOOK_S = 1.0
"""Seconds between two looks at a generator that lives."""
GENERATOR_RETRY_S = 5.0
"""Seconds until the next attempt to start one."""
GONE = (ObjectLostError, RayActorError)
"""Errors of Ray for a lost object; the second is raised if the object came from a stream that hadn't ended."""


def death_text(error: BaseException) -> str:
    """Write the death of an actor's process in one line, with its machine and its cause as far as Ray tells them."""
    text = str(error)
    process = _PROCESS.search(text)
    address = _ADDRESS.search(text)
    if _NODE_DIED.search(text):
        return f"its machine {address[1]} is gone" if address else "its machine is gone"
    if process is None:
        return first_line(error)
    subject = f"its process {process[1]} on {address[1]}" if address else f"its process {process[1]}"
    if _NO_MEMORY in text:
        return f"{subject} was ended by Ray, because the machine was running out of memory"
    if _SILENT_END in text:
        causes = "killed (SIGKILL, which the system sends for lack of memory too) or crashed"
        return f"{subject} ended without a word: {causes}"
    if code := _EXIT_CODE.search(text):
        return f"{subject} ended with exit code {code[1]}"
    return f"{first_line(error)} ({subject})"


class LostNode(NamedTuple):
    """A machine that has left the cluster."""

    name: str
    """Host name and address, as people know the machine."""
    workers: list[int]
    """Numbers of the workers that were on it, in rising order."""


@dataclass(slots=True)
class NodeAttendance:
    """Notices machines that vanish from the cluster, and which workers go with them."""

    _names: dict[str, str] = field(default_factory=dict)
    """Names of the machines that were alive at the last look, by Ray's id of the node."""
    _last_seen_at: dict[str, dict[int, float]] = field(default_factory=dict)
    """Time at which each worker was last seen on each node."""

    def lost(
        self, nodes: Iterable[Mapping[str, Any]], workers: Mapping[str, Iterable[int]], now: float
    ) -> list[LostNode]:
        """Return the machines that were alive at the last look and aren't any more.

        Args:
            nodes: nodes of the cluster, as `ray.nodes` has them.
            workers: numbers of the workers on each node, by Ray's id of the node.
            now: time of this look, in seconds.

        """
        for node, numbers in workers.items():
            seen_at = self._last_seen_at.setdefault(node, {})
            seen_at.update(dict.fromkeys(numbers, now))
        alive = {node["NodeID"]: _name(node) for node in nodes if node["Alive"]}
        lost_nodes: list[LostNode] = []
        for node, name in self._names.items():
            if node not in alive:
                seen_at = self._last_seen_at.pop(node, {})
                recent = [worker for worker, last_seen_at in seen_at.items() if now - last_seen_at <= MEMORY_S]
                lost_nodes.append(LostNode(name, sorted(recent)))
        self._names = alive
        return lost_nodes


def _name(node: Mapping[str, Any]) -> str:
    """Host name and address of a node; one of them if they are the same."""
    host = str(node.get("NodeManagerHostname") or "")
    address = str(node["NodeManagerAddress"])
    if host in ("", address):
        return address
    return f"{host} ({address})"


class SupervisedActor:
    """Keeps one actor alive, and repeats calls that died with it: they are pure or idempotent.

    Args:
        name: name of the actor.
        start: starts a new actor.
        end: ends an actor in any state.
        silence_s: longest wait for the answer to a ping; doubled for a successor in the same call, because the
            machine may have been slow.
        start_s: longest start of an actor, in seconds.
        note: takes name and reason of each replacement.

    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[Any]],
        end: Callable[[Any], None],
        silence_s: float,
        start_s: float,
        note: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self._start = start
        self._end = end
        self._note = note
        self._silence_s = silence_s
        self._start_s = start_s
        self._lock = asyncio.Lock()
        self._actor: Any = None
        self._awake = False
        """Whether the actor has answered yet; until then silence may be its start."""

    async def ask(self, call: Callable[[Any], Any]) -> Any:
        """Make a call and wait for its last result; an actor that dies is replaced, and the call repeated.

        Errors of the call itself are raised, also that an argument is lost.

        Args:
            call: takes the actor, returns the ref of its result, or refs of several results. The last one is a
                receipt: it is read here, so it should be small.

        Returns:
            What `call` returned, once the receipt has its value.

        Raises:
            ClusterError: `MAX_DEATHS` actors in a row died over the call.

        """
        lost_calls = deaths = 0
        while deaths < MAX_DEATHS:
            actor = await self._living_actor()
            silence_s = self._silence_s * 2**deaths
            try:
                refs = call(actor)
                receipt = refs[-1] if isinstance(refs, Sequence) else refs
                await self._wait_for_answer(actor, receipt, silence_s)
                return refs
            except RayTaskError:
                raise  # The actor lives, and says this: an argument may be lost, with an actor that has died.
            except ActorUnavailableError as error:  # Lost on the way, or its answer was; or a death not yet certain.
                reason = first_line(error)
                lost_calls += 1
                if lost_calls < MAX_LOST_CALLS:
                    await asyncio.sleep(AGAIN_S)
                    continue
            except RayActorError as error:
                reason = death_text(error)
            except TimeoutError:
                limit_s = silence_s if self._awake else self._start_s
                reason = f"silent for {limit_s:g} s"
            await self._replace(actor, reason)
            lost_calls = 0
            deaths += 1
        fix = "look into Ray's logs: it may lack memory"
        raise ClusterError("NET004", f"{self.name} died {MAX_DEATHS} times in a row", got=reason, fix=fix)

    @property
    def living(self) -> Any | None:
        """The present actor; None before its start and while it is replaced."""
        return self._actor

    def close(self) -> None:
        """End the actor."""
        if self._actor is not None:
            self._end(self._actor)
            self._actor = None

    async def _living_actor(self) -> Any:
        async with self._lock:
            if self._actor is None:
                actor = await self._start()
                self._awake = False
                self._actor = actor
            return self._actor

    async def _replace(self, actor: Any, reason: str) -> None:
        """End an actor so that the next call starts another, unless another call has done so."""
        if self._actor is actor:
            self._note(self.name, reason)
            self.close()

    async def _wait_for_answer(self, actor: Any, ref: Any, silence_s: float) -> None:
        """Wait for an answer, and ping the actor meanwhile.

        Raises:
            TimeoutError: the actor doesn't answer.

        """
        answer = asyncio.ensure_future(value(ref))
        try:
            while not (await asyncio.wait({answer}, timeout=PULSE_S))[0]:
                limit_s = silence_s if self._awake else self._start_s
                with suppress(ActorUnavailableError):
                    pong = value(actor.ping.remote())
                    await asyncio.wait_for(pong, limit_s)
                    self._awake = True
            answer.result()
            self._awake = True
        finally:
            answer.cancel()


async def value(ref: Any) -> Any:
    """Value of a reference, as the coroutine that ``asyncio.wait_for`` and ``gather`` need."""
    return await ref


async def keep_all(generators: Sequence[SupervisedActor], report_problem: Callable[[str], None]) -> None:
    """Keep generators alive, as `keep` does one."""
    await asyncio.gather(*map(partial(keep, report_problem=report_problem), generators))


async def keep(generator: SupervisedActor, report_problem: Callable[[str], None]) -> None:
    """Keep a generator alive. A run goes on without it, so no failure ends this.

    Args:
        generator: the generator.
        report_problem: takes a line for the user if the generator has no machine or can't be started, each reason once.

    """
    told_reason: str | None = None
    lived_before = False
    while True:
        reason = None
        pause_s = GENERATOR_RETRY_S
        try:
            await generator.ask(lambda actor: actor.ping.remote())
            pause_s = GENERATOR_LOOK_S
            lived_before = True
        except CapacityError as error:  # Machines may come later.
            if lived_before:  # Ray counts what it has reserved as free a moment later.
                pause_s = GENERATOR_LOOK_S
            else:
                reason = f"{error.what}; workers respond in their place"
            lived_before = False
        except (HyphaError, RayError) as error:
            reason = f"{generator.name} can't be started: {first_line(error)}"
        if reason is not None and reason != told_reason:
            report_problem(reason)
        told_reason = reason
        await asyncio.sleep(pause_s)
