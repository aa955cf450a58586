"""Rate of committed work, with kills and without.

A *worker-step* is a full batch of samples in an accepted delta of a commit record: committed samples ÷ batch size. Work
that was done and lost, or is done and not committed yet, is none.

    E = worker-steps per second under kills ÷ worker-steps per second of the same job's calm rounds

Both are counted between *edges*: the moments at which a record appears in ``commits/``. A window holds whole rounds and
their whole time, so nothing is cut in half. Three choices keep its edges from favouring either side:

* The first rounds after the start aren't counted: the planner doesn't know the workers yet.
* The window under kills begins a round after kills have begun, and kills go on to its end. So at its first edge it
  takes over what earlier kills have spoiled, as much on average as it leaves behind at its last edge. A window that
  began with a healthy fleet and ended in the middle of a loss would hide a part of what that loss costs.
* Its length in rounds is chosen beforehand, not by how well it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import mean, stdev

WARM_UP_ROUNDS = 2
"""Rounds after the start that aren't counted."""
RUN_IN_ROUNDS = 1
"""Rounds after the first moment of chaos that aren't counted."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A commit as it was seen: its round, when it appeared, and the samples in it."""

    round: int
    at_s: float
    samples: int


@dataclass(frozen=True, slots=True)
class Window:
    """Whole rounds between two edges."""

    begin_s: float
    end_s: float
    rounds: int
    samples: int
    deviation: float
    """Standard deviation of a round's time ÷ its mean."""

    @property
    def seconds(self) -> float:
        """Length."""
        return self.end_s - self.begin_s

    @property
    def round_s(self) -> float:
        """Mean time of a round: T, where the window is calm."""
        return self.seconds / self.rounds

    def steps_per_s(self, batch_size: int) -> float:
        """Committed worker-steps per second."""
        return self.samples / batch_size / self.seconds


def window(edges: Sequence[Edge], first: int, last: int) -> Window | None:
    """Rounds `first … last`, from the commit before them on; the last may be missing. None: there is no whole round."""
    inside = [edge for edge in edges if first - 1 <= edge.round <= last]
    if len(inside) < 2 or inside[0].round != first - 1:
        return None
    begin = inside[0]
    ends = inside[1:]
    times_s = [after.at_s - before.at_s for before, after in pairwise(inside)]
    deviation = stdev(times_s) / mean(times_s) if len(times_s) > 1 else 0.0
    samples = sum(edge.samples for edge in ends)
    return Window(begin.at_s, ends[-1].at_s, len(ends), samples, deviation)


def last_calm_round(calm_rounds: int) -> int:
    """The round whose commit ends the calm."""
    return WARM_UP_ROUNDS + calm_rounds - 1


def rounds_of(calm_rounds: int, chaos_rounds: int) -> int:
    """Rounds that a run needs."""
    return WARM_UP_ROUNDS + calm_rounds + RUN_IN_ROUNDS + chaos_rounds


def calm_window(edges: Sequence[Edge], calm_rounds: int) -> Window | None:
    """The measured rounds without kills."""
    return window(edges, WARM_UP_ROUNDS, last_calm_round(calm_rounds))


def chaos_window(edges: Sequence[Edge], calm_rounds: int, chaos_rounds: int) -> Window | None:
    """The measured rounds under kills."""
    first = last_calm_round(calm_rounds) + RUN_IN_ROUNDS + 1
    return window(edges, first, first + chaos_rounds - 1)


def efficiency(calm: Window, chaos: Window) -> tuple[float, float]:
    """E, and its standard error if the times of rounds are independent."""
    value = (chaos.samples / chaos.seconds) / (calm.samples / calm.seconds)
    error = sqrt(calm.deviation**2 / calm.rounds + chaos.deviation**2 / chaos.rounds)
    return value, value * error
