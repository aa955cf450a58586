"""Check of joining workers: the hash of their first weights must be the one that the store wrote."""

from __future__ import annotations

from hypha_ray.types import Source

REMEMBERED = 4
"""Number of rounds whose hashes are kept; commits lag behind by one or two."""


class WeightHashes:
    """Hashes of commits and of joining workers; either may come first, because the store hashes in the background."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._claims: dict[Source, tuple[int, str]] = {}

    def record_commit(self, round: int, theta_sha256: str) -> list[Source]:
        """Record the hash of a commit; return the joining workers with another one."""
        self._known[round] = theta_sha256
        for old in sorted(self._known)[:-REMEMBERED]:
            del self._known[old]
        settled = {source: claim for source, claim in self._claims.items() if claim[0] == round}
        for source in settled:
            del self._claims[source]
        return [source for source, (_, claimed) in settled.items() if claimed != theta_sha256]

    def check(self, source: Source, round: int, theta_sha256: str) -> bool:
        """Check, or keep for the commit, a joining worker's hash of the weights after a round; False if it is wrong."""
        if round in self._known:
            return self._known[round] == theta_sha256
        self._claims[source] = round, theta_sha256
        return True

    def forget(self, source: Source) -> None:
        """Drop a lost worker's hash."""
        self._claims.pop(source, None)
