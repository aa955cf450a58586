"""Streams of Ray's actors, whose items are taken as refs."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import ObjectRefGenerator

FIRST_WAIT_S, LONGEST_WAIT_S = 0.002, 0.05
"""Between two looks at whether an item is there."""


async def upcoming(stream: Any) -> None:
    """Wait until a stream has its next item, wherever that lies.

    Ray's own ``anext`` waits for the item's value, which brings a payload to this node that is wanted on another one.
    """
    wait_s = FIRST_WAIT_S
    while isinstance(stream, ObjectRefGenerator):
        ready, _ = await asyncio.to_thread(ray.wait, [stream], timeout=0, fetch_local=False)
        if ready:
            return
        await asyncio.sleep(wait_s)
        wait_s = min(LONGEST_WAIT_S, 1.5 * wait_s)
