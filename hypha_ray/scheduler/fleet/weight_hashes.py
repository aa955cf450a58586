"""Check that joiners begin with the weights of the commit: their hashes against those that the store wrote."""

from __future__ import annotations

from hypha_ray.types import Source

REMEMBERED = 4
"""Rounds whose hashes are kept; commits lag behind by one round or two."""


class WeightHashes:
    """Either side may come first: the store hashes in the background, while joiners train already."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._claims: dict[Source, tuple[int, str]] = {}

    def record_commit(self, round: int, theta_sha256: str) -> list[Source]:
        """Take note of the weights after a round; returns the joiners that have others."""
        self._known[round] = theta_sha256
        for old in sorted(self._known)[:-REMEMBERED]:
            del self._known[old]
        settled = {source: claim for source, claim in self._claims.items() if claim[0] == round}
        for source in settled:
            del self._claims[source]
        return [source for source, (_, claimed) in settled.items() if claimed != theta_sha256]

    def check(self, source: Source, round: int, theta_sha256: str) -> bool:
        """Take note of what a joiner says that it has as the weights after a round; False if that is wrong."""
        if round in self._known:
            return self._known[round] == theta_sha256
        self._claims[source] = round, theta_sha256
        return True

    def forget(self, source: Source) -> None:
        """Drop what a lost worker said."""
        self._claims.pop(source, None)
