"""Responses to an island's batches by the generators of its run, or by the island itself.

     step              k                  k+1                 k+2
     generators        batch k+1 ───────► batch k+2 ───────► batch k+3         rl.staleness = 1
     island            batch k            batch k+1           batch k+2

Without staleness a batch goes out when it is needed, and the island responds to pieces of it as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hypha_ray.model.layout import array_of, tensor_of
from hypha_ray.rl.dataflow.sample import Sample
from hypha_ray.rl.generator_pool import (
    GeneratorPool,
    Generators,
    Piece,
    Responded,
    Rollout,
    SharedWeights,
    pieces_of,
    rollout_by,
)
from hypha_ray.rl.roles.role import Role


class WeightStore(Generators[Rollout], Protocol):
    """Way to generators, and to weights that they and the island can get."""

    def put(self, arrays: Mapping[str, Any]) -> Any:
        """Store weights; return a handle, which keeps them."""

    def get(self, handle: Any) -> Mapping[str, Any]:
        """Return weights by their handle."""


class SharedRollouts:
    """Batches of an island that generators respond to.

    Args:
        role: role of the island that responds and rewards, with the weights in training.
        generators: way to the generators.
        pool: pool of them.
        size: number of prompts of a piece.
        staleness: number of steps that a batch goes out ahead.

    """

    def __init__(
        self, role: Role, generators: WeightStore, pool: GeneratorPool[Rollout], size: int, staleness: int
    ) -> None:
        self._role = role
        self._generators = generators
        self._pool = pool
        self._size = size
        self._staleness = staleness
        self._batches = 0
        """Number of batches that were sent."""
        self._version = 0
        """Number of calls of `fetch`: between two of them weights may have changed."""
        self._ahead: dict[tuple[str, ...], int] = {}
        """Numbers of the batches on their way, by the ids of their prompts."""

    def fetch(self, batches: Sequence[Sample], version: int, round: int) -> list[Responded[Rollout]]:
        """Send out the batches that aren't on their way, wait for the first one, and drop all batches but these.

        Args:
            batches: prompts of the batch that is trained on next, and of the batches after it.
            version: number of batches that were trained on.
            round: round of the run.

        Raises:
            HyphaError: whatever responding or rewarding raises.

        """
        self._version += 1
        names = [batch.ids for batch in batches]
        self._drop([ids for ids in self._ahead if ids not in names])
        new_batches = [batch for batch in batches if batch.ids not in self._ahead]
        if new_batches:
            weights = self._weights()
            for batch in new_batches:
                self._send(batch, weights, {"version": version, "round": round})
        number = self._ahead.pop(names[0])
        return self._pool.collect(number, self._respond, helps=not self._staleness)

    def begin_anew(self) -> None:
        """Drop all batches: the weights have been replaced."""
        self._drop(list(self._ahead))

    def take_problems(self) -> tuple[str, ...]:
        """Return the lines for the user since the last call."""
        return self._pool.take_problems()

    def close(self) -> None:
        """Ask no generator any more."""
        self._pool.close()

    def _weights(self) -> SharedWeights:
        """Return the present weights, stored if a generator or a later step may need them."""
        handle = None
        if self._staleness or self._pool.is_reached:
            handle = self._generators.put(_arrays(self._role))
        return SharedWeights(self._version, handle)

    def _send(self, batch: Sample, weights: SharedWeights, arguments: Mapping[str, int]) -> None:
        self._batches += 1
        self._pool.send(list(pieces_of(self._batches, batch, self._size, weights, arguments)))
        self._ahead[batch.ids] = self._batches

    def _drop(self, names: Sequence[tuple[str, ...]]) -> None:
        for ids in names:
            self._pool.drop(self._ahead.pop(ids))

    def _respond(self, piece: Piece) -> Rollout:
        """Respond to a piece with its own weights; those in training are the same afterwards."""
        if piece.weights.version == self._version:
            return rollout_by(self._role, piece.prompts, piece.arguments)
        present = {name: tensor.clone() for name, tensor in self._role.weights().items()}
        arrays = self._generators.get(piece.weights.handle)
        self._role.take_weights({name: tensor_of(array) for name, array in arrays.items()}, 1.0)
        try:
            return rollout_by(self._role, piece.prompts, piece.arguments)
        finally:
            self._role.take_weights(present, 1.0)


def _arrays(role: Role) -> dict[str, Any]:
    return {name: array_of(tensor) for name, tensor in role.weights().items()}
