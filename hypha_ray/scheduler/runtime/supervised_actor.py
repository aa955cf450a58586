"""Supervision of an actor without state of its own: another one can take its place at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError

from hypha_ray.errors import ClusterError, first_line
from hypha_ray.scheduler.runtime.deaths import death_text

PULSE_S = 1.0
"""Seconds without an answer after which the actor is pinged."""
AGAIN_S = 0.2
LOST = 20
"""Attempts of a call, `AGAIN_S` seconds apart, before the actor is replaced."""
PATIENCE = 4
"""Actors in a row that may die during one call before the call counts as the cause."""
GONE = (ObjectLostError, RayActorError)
"""Errors of Ray for a lost object; the second is raised if the object came from a stream that hadn't ended."""


class SupervisedActor:
    """Keeps one actor alive, and repeats calls that died with it: they are pure or idempotent.

    Args:
        name: name of the actor.
        start: starts a new actor.
        end: ends an actor, whatever state it is in.
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
            ClusterError: `PATIENCE` actors in a row died over the call.

        """
        lost = deaths = 0
        while deaths < PATIENCE:
            actor = await self._living()
            silence_s = self._silence_s * 2**deaths
            try:
                refs = call(actor)
                await self._watched(actor, refs[-1] if isinstance(refs, Sequence) else refs, silence_s)
                return refs
            except RayTaskError:
                raise  # The actor lives, and says this: an argument may be lost, with an actor that has died.
            except ActorUnavailableError as error:  # Lost on the way, or its answer was; or a death not yet certain.
                reason = first_line(error)
                lost = lost + 1
                if lost < LOST:
                    await asyncio.sleep(AGAIN_S)
                    continue
            except RayActorError as error:
                reason = death_text(error)
            except TimeoutError:
                reason = f"silent for {silence_s if self._awake else self._start_s:g} s"
            await self._replace(actor, reason)
            lost = 0
            deaths = deaths + 1
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
        """End an actor so that the next call starts another, unless another call has done so."""
        if self._actor is actor:
            self._note(self.name, reason)
            self.close()

    async def _watched(self, actor: Any, ref: Any, silence_s: float) -> None:
        """Wait for an answer, and ping the actor meanwhile.

        Raises:
            TimeoutError: the actor doesn't answer.

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
    """Value of a reference, as the coroutine that ``asyncio.wait_for`` and ``gather`` need."""
    return await ref
