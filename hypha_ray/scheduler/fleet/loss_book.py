"""Losses of workers at the same work, such as a reward function on a prompt that never ends."""

from __future__ import annotations

from collections.abc import Collection

FATAL = 3
"""Losses in a row at the same work that end a run."""
_REMEMBERED = 256
"""Most kinds of work that are remembered."""


class LossBook:
    """Counts losses by the work that lost workers last told of."""

    def __init__(self) -> None:
        self._losses: dict[str, list[tuple[int, str]]] = {}
        """Numbers of workers, and their machines, by work."""

    def add(self, work: str, number: int, machine: str) -> None:
        """Record the loss of a worker; without known work do nothing."""
        if not work:
            return
        losses = self._losses.pop(work, [])
        self._losses[work] = [*losses, (number, machine)]
        if len(self._losses) > _REMEMBERED:
            del self._losses[next(iter(self._losses))]

    def contributed(self, number: int) -> None:
        """Forget work that a worker of this number was lost at: another one has got past it."""
        self._losses = {
            work: losses for work, losses in self._losses.items() if all(number != lost for lost, _ in losses)
        }

    def count(self, work: str) -> int:
        """Number of losses at some work; 0 if it isn't known."""
        return len(self._losses.get(work, []))

    def is_fatal(self, work: str, numbers: Collection[int]) -> bool:
        """Whether work has ended three workers, on two machines or under all of these numbers."""
        losses = self._losses.get(work, [])
        machines = {machine for _, machine in losses}
        everywhere = set(numbers) <= {number for number, _ in losses}
        return len(losses) >= FATAL and (len(machines) > 1 or everywhere)
