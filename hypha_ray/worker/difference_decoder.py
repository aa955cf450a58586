"""Decoder of global weights that are sent as differences to the previous ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypha_ray.codec import difference_codec
from hypha_ray.types import Flat, FragmentUpdate


class DifferenceDecoder:
    """Turns differences into weights.

    Args:
        name: the codec's.
        options: the codec's own options.

    """

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        self._codec = difference_codec(name, options)
        self._theta: dict[int, Flat] = {}
        self._spare: dict[int, Flat] = {}
        """Arrays of the round before the last: the last one's may still be read."""

    def take(self, piece: FragmentUpdate, weights: Flat) -> Flat:
        """Weights of a fragment: those received, or the previous ones with the received difference."""
        fragment = piece.fragment
        if self._codec is None:
            return weights
        if not piece.difference:
            self._theta[fragment] = weights
            self._spare.pop(fragment, None)
            return weights
        from hypha_ray.codec.difference import advance

        before = self._theta[fragment]
        new = advance(self._codec, before, weights, self._spare.get(fragment))
        self._theta[fragment] = new
        if all(array.flags.writeable for array in before.values()):  # They aren't the object store's.
            self._spare[fragment] = before
        return new
