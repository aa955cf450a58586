"""Waiting for the next item of an actor's stream without fetching its value."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import ObjectRefGenerator

FIRST_WAIT_S = 0.002
LONGEST_WAIT_S = 0.05
"""Seconds between two checks for the next item: the first, and the most."""


async def upcoming(stream: Any) -> None:
    """Wait until a stream has its next item, on whatever node the item lies.

    Ray's own ``anext`` waits for the item's value, which would copy to this node a payload that another node needs.
    """
    wait_s = FIRST_WAIT_S
    while isinstance(stream, ObjectRefGenerator):
        ready, _ = await asyncio.to_thread(ray.wait, [stream], timeout=0, fetch_local=False)
        if ready:
            return
        await asyncio.sleep(wait_s)
        wait_s = min(LONGEST_WAIT_S, 1.5 * wait_s)
