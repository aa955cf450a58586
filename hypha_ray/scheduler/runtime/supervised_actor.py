"""A post: an actor that keeps nothing a run depends on, so that another can take its place at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError

from hypha_ray.errors import ClusterError

PULSE_S = 1.0
"""Seconds of waiting for an answer after which the actor is asked whether it lives."""
AGAIN_S = 0.2
LOST = 20
"""Times that a call may get lost, `AGAIN_S` apart, before the actor is replaced."""
PATIENCE = 4
"""Actors in a row that may die over one call, before the fault is taken to be in the call."""
GONE = (ObjectLostError, RayActorError)
"""Errors by which Ray says that an object is lost: the second if the stream that it came of hadn't ended."""


class SupervisedActor:
    """Holds one actor, and repeats what was asked of one that died or fell silent: calls are pure or idempotent.

    Args:
        name: the actor's.
        start: makes the actor, anew each time.
        end: ends one, whatever state it is in.
        silence_s: longest time without an answer to a pulse. A successor of an actor that was silent over a call has
            twice as long for it, since that may have been the machine's fault.
        start_s: how long it may take to start.
        note: told the reason whenever an actor is replaced.

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
        self._start, self._end, self._note = start, end, note
        self._silence_s, self._start_s = silence_s, start_s
        self._lock = asyncio.Lock()
        self._actor: Any = None
        self._awake = False
        """The actor has answered before: its silence isn't that of one which is only just starting."""

    async def ask(self, call: Callable[[Any], Any], receipt: int = -1) -> Any:
        """Make a call, and wait for it. An error of its own is raised, also that an argument is lost.

        The actor's death isn't one: the call is made again, on its successor.

        Args:
            call: takes the actor, returns the ref of its result, or refs of several results.
            receipt: index of the result that is waited for; it should be small, for it is read here.

        Returns:
            What `call` returned, once the receipt has its value.

        Raises:
            ClusterError: one actor after the other died over it.

        """
        lost = deaths = 0
        while deaths < PATIENCE:
            actor, silence_s = await self._living(), self._silence_s * 2**deaths
            try:
                refs = call(actor)
                await self._watched(actor, refs[receipt] if isinstance(refs, Sequence) else refs, silence_s)
                return refs
            except RayTaskError:
                raise  # The actor lives, and says this: an argument may be lost, with an actor that has died.
            except ActorUnavailableError as error:  # Lost on the way, or its answer was; or a death not yet certain.
                reason, lost = str(error).partition("\n")[0], lost + 1
                if lost < LOST:
                    await asyncio.sleep(AGAIN_S)
                    continue
            except RayActorError as error:
                reason = str(error).partition("\n")[0]
            except TimeoutError:
                reason = f"silent for {silence_s if self._awake else self._start_s:g} s"
            await self._replace(actor, reason)
            lost, deaths = 0, deaths + 1
        fix = "look into Ray's logs: it may lack memory"
        raise ClusterError("NET004", f"{self.name} died {PATIENCE} times in a row", got=reason, fix=fix)

    def close(self) -> None:
        """End the actor."""
        if self._actor is not None:
            self._end(self._actor)
            self._actor = None

    async def _living(self) -> Any:
        async with self._lock:
            if self._actor is None:
                self._awake, self._actor = False, await self._start()
            return self._actor

    async def _replace(self, actor: Any, reason: str) -> None:
        """Replace the actor, unless that has been done already."""
        if self._actor is actor:
            self._note(self.name, reason)
            self.close()

    async def _watched(self, actor: Any, ref: Any, silence_s: float) -> None:
        """Wait for an answer, and feel the actor's pulse meanwhile.

        Raises:
            TimeoutError: it has none.

        """
        answer = asyncio.ensure_future(value(ref))
        try:
            while not (await asyncio.wait({answer}, timeout=PULSE_S))[0]:
                limit_s = silence_s if self._awake else self._start_s
                with suppress(ActorUnavailableError):
                    await asyncio.wait_for(value(actor.ping.remote()), limit_s)
                    self._awake = True
            answer.result()
            self._awake = True
        finally:
            answer.cancel()


async def value(ref: Any) -> Any:
    """Value of a ref, as the coroutine that asyncio wants where it sets a limit or waits beside others."""
    return await ref
