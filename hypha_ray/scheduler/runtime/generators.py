"""Care for generators: each is started where there is room, and replaced when it is dead or silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ray.exceptions import RayError

from hypha_ray.errors import CapacityError, HyphaError, first_line
from hypha_ray.scheduler.runtime.supervised_actor import SupervisedActor

_LOOK_S = 1.0
"""Seconds between two looks at a generator that lives."""
_RETRY_S = 5.0
"""Seconds until the next attempt to start one."""


async def keep_all(generators: Sequence[SupervisedActor], tell: Callable[[str], None]) -> None:
    """Keep generators alive, as `keep` does one."""
    await asyncio.gather(*[keep(generator, tell) for generator in generators])


async def keep(generator: SupervisedActor, tell: Callable[[str], None]) -> None:
    """Keep a generator alive. A run goes on without it, so no failure ends this.

    Args:
        generator: the generator.
        tell: takes a line for the user if the generator can't be started, each reason once.

    """
    told: str | None = None
    while True:
        try:
            await generator.ask(lambda actor: actor.ping.remote())
            told = None
            await asyncio.sleep(_LOOK_S)
        except CapacityError:  # Machines may come later, and their absence shows in the share of the generators.
            await asyncio.sleep(_RETRY_S)
        except (HyphaError, RayError) as error:
            reason = f"{generator.name} can't be started: {first_line(error)}"
            if reason != told:
                tell(reason)
            told = reason
            await asyncio.sleep(_RETRY_S)
