"""Evidence against work and workers: losses at the same work, and hashes of workers' first weights."""

from __future__ import annotations

from collections.abc import Collection

from hypha_ray.types import Source

FATAL = 3
"""Losses in a row at the same work that end a run."""
_MAX_WORKS = 256
"""Most kinds of work that are remembered."""
KNOWN_ROUNDS = 4
"""Number of rounds whose hashes are kept; commits lag behind by one or two."""


class LossBook:
    """Losses by the work that the lost workers reported last."""

    def __init__(self) -> None:
        self._losses: dict[str, list[tuple[int, str]]] = {}
        """Numbers of workers, and their machines, by work."""

    def add(self, work: str, number: int, machine: str) -> None:
        """Record the loss of a worker; without known work do nothing."""
        if not work:
            return
        losses = self._losses.pop(work, [])
        self._losses[work] = [*losses, (number, machine)]
        if len(self._losses) > _MAX_WORKS:
            del self._losses[next(iter(self._losses))]

    def contributed(self, number: int) -> None:
        """Forget work that a worker of this number was lost at: another one has got past it."""
        for work, losses in list(self._losses.items()):
            if any(lost == number for lost, _ in losses):
                del self._losses[work]

    def count(self, work: str) -> int:
        """Number of losses at some work; 0 if it isn't known."""
        return len(self._losses.get(work, []))

    def is_fatal(self, work: str, numbers: Collection[int]) -> bool:
        """Whether work has ended three workers, on two machines or under all of these numbers."""
        losses = self._losses.get(work, [])
        lost_numbers = {number for number, _ in losses}
        machines = {machine for _, machine in losses}
        is_everywhere = len(machines) > 1 or lost_numbers.issuperset(numbers)
        return len(losses) >= FATAL and is_everywhere


class WeightHashes:
    """Hashes of commits and of joining workers; either may come first, because the store hashes in the background."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._claims: dict[Source, tuple[int, str]] = {}

    def record_commit(self, round: int, theta_sha256: str) -> list[Source]:
        """Record the hash of a commit; return the joining workers with another one."""
        self._known[round] = theta_sha256
        for old in sorted(self._known)[:-KNOWN_ROUNDS]:
            del self._known[old]
        mismatched: list[Source] = []
        for source, (claimed_round, claimed_sha256) in list(self._claims.items()):
            if claimed_round == round:
                del self._claims[source]
                if claimed_sha256 != theta_sha256:
                    mismatched.append(source)
        return mismatched

    def check(self, source: Source, round: int, theta_sha256: str) -> bool:
        """Check, or keep for the commit, a joining worker's hash of the weights after a round; False if it is wrong."""
        if round in self._known:
            return self._known[round] == theta_sha256
        self._claims[source] = round, theta_sha256
        return True

    def forget(self, source: Source) -> None:
        """Drop a lost worker's hash."""
        self._claims.pop(source, None)
