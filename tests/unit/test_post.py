"""A post without Ray: actors that answer late, or never."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from hypha_ray.errors import ClusterError
from hypha_ray.scheduler import post
from hypha_ray.scheduler.post import PATIENCE, Post

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
        kept = Post("server-0", start, lambda actor: None, SILENCE_S, 10.0, lambda name, why: reasons.append(why))
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


def test_actors_that_never_answer_are_given_up() -> None:
    with pytest.raises(ClusterError, match=f"server-0 died {PATIENCE} times in a row — got silent for 1.6 s"):
        ask(60.0)
