"""Schedule of strikes: times and roles, as a seed determines them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TypeVar

T = TypeVar("T")
STOPPABLE = frozenset({"worker", "server", "shard", "scheduler", "store", "telemetry"})
"""Roles that are supervised: a stopped process is replaced. A stopped driver or node would stay."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One strike: so many seconds after the one before it, at a process that is alive then."""

    after_s: float
    role: str
    stop: bool
    """SIGSTOP instead of SIGKILL."""
    draw: float
    """Chooses the victim: 0 ≤ x < 1."""

    def choose(self, living: Sequence[T]) -> T | None:
        """Choose the victim; None if no process lives."""
        return living[int(self.draw * len(living))] if living else None


def poisson(random: Random, roles: Sequence[str], mean_s: float, signal: str) -> Iterator[Strike]:
    """Strikes without end at exponentially distributed intervals, as of failures that know nothing of one another."""
    while True:
        yield _strike(random, roles, random.expovariate(1 / mean_s), signal)


def even(random: Random, roles: Sequence[str], spacing_s: float, round_s: float, signal: str) -> Iterator[Strike]:
    """Strikes without end at even intervals, off by up to half a round: so that every moment of a round is hit."""
    while True:
        yield _strike(random, roles, spacing_s + random.uniform(-0.5, 0.5) * round_s, signal)


def planned(
    seed: int, roles: Sequence[str], mean_rounds: float, round_s: float, signal: str, kills: int | None
) -> Iterator[Strike]:
    """The strikes of a campaign: `kills` evenly spaced ones, or a Poisson process without end.

    Args:
        seed: of everything that is drawn.
        roles: what to strike at; drawn uniformly.
        mean_rounds: mean time between two strikes, in rounds.
        round_s: length of a calm round.
        signal: ``kill``, ``stop`` or ``mixed``.
        kills: how many; None: without end, at random.

    """
    random = Random(seed)
    mean_s = mean_rounds * round_s
    if kills is None:
        return poisson(random, roles, mean_s, signal)
    return islice(even(random, roles, mean_s, round_s, signal), kills)


def _strike(random: Random, roles: Sequence[str], after_s: float, signal: str) -> Strike:
    role = random.choice(roles)
    lot = random.random()
    draw = random.random()
    stop = role in STOPPABLE and (signal == "stop" or (signal == "mixed" and lot < 0.5))
    return Strike(after_s, role, stop, draw)
