"""Batches of an island before it trains on them: responses by generators, refill with further prompts, and figures.

Generators of the run respond to batches, or the island itself:

     step              k                  k+1                 k+2
     generators        batch k+1 ───────► batch k+2 ───────► batch k+3         rl.staleness = 1
     island            batch k            batch k+1           batch k+2

Without staleness a batch goes out when it is needed, and the island responds to pieces of it as well.

Further prompts take the place of those whose groups have no signal, as in DAPO's dynamic sampling (arXiv 2503.14476):

batch ─► responses, rewards ─┬─► groups with a signal ──────────────────────────────► the batch that is trained on
             ▲               └─► others: as many of the round's next prompts ─┐
             └────────────────────────────────────────────────────────────────┘ up to `rl.refill` times
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.model.layout import array_of, tensor_of
from hypha_ray.rl.dataflow.graph import GENERATING
from hypha_ray.rl.dataflow.model_worker import Role
from hypha_ray.rl.dataflow.requests import Reply, Sample
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
from hypha_ray.rl.policy import prompt_ids
from hypha_ray.types import PromptsOfResponder, Samples, Sums, added, joined

Respond: TypeAlias = Callable[[Samples], Mapping[str, Sequence[Reply]]]
"""Function that responds to prompts and rewards the responses; it returns the replies by the names of calls."""
Replies: TypeAlias = Mapping[str, Sequence[Reply]]
"""Replies of workers, by the names of calls."""


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
        piece_prompts: number of prompts of a piece.
        staleness: number of steps that a batch goes out ahead.

    """

    def __init__(
        self, role: Role, generators: WeightStore, pool: GeneratorPool[Rollout], piece_prompts: int, staleness: int
    ) -> None:
        self._role = role
        self._generators = generators
        self._pool = pool
        self._size = piece_prompts
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
        batch_number = self._ahead.pop(names[0])
        return self._pool.collect(batch_number, self._respond, helps=not self._staleness)

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
        weights = {name: tensor.clone() for name, tensor in self._role.weights().items()}
        arrays = self._generators.get(piece.weights.handle)
        self._role.take_weights({name: tensor_of(array) for name, array in arrays.items()}, 1.0)
        try:
            return rollout_by(self._role, piece.prompts, piece.arguments)
        finally:
            self._role.take_weights(weights, 1.0)


def _arrays(role: Role) -> dict[str, Any]:
    return {name: array_of(tensor) for name, tensor in role.weights().items()}


@dataclass(frozen=True, slots=True)
class Refilled:
    """Batch whose groups have a signal, as far as there were prompts."""

    batch: Samples
    """Prompts that are trained on; all of the first draw if none has a signal."""
    draws: tuple[Mapping[str, Sequence[Reply]], ...]
    """Replies of each draw."""
    left_out: tuple[str, ...]
    """Ids of the prompts that aren't trained on."""
    extra: int
    """Number of prompts that were drawn beside those of the batch."""


class Refill:
    """Refill of batches.

    Args:
        draws: largest number of draws of further prompts for a batch.

    """

    def __init__(self, draws: int) -> None:
        self._draws = draws
        self._upcoming: Iterator[Samples] = iter(())
        self._next: list[Samples] = []
        """Batches after the present one that have been read."""

    def announce(self, upcoming_batches: Iterator[Samples]) -> None:
        """Take in the batches that come next in the round; they are read when they are needed."""
        self._upcoming = upcoming_batches
        self._next = []

    def refilled(self, batch: Samples, respond: Respond) -> Refilled:
        """Respond to a batch, and to further prompts in the place of those without a signal.

        A repeated call for the same batch draws the same prompts.
        """
        prompts = batch
        parts: list[Samples] = []
        left_out: list[str] = []
        draws: list[Mapping[str, Sequence[Reply]]] = []
        missing = len(batch)
        extra_prompts = 0
        for draw_number in range(self._draws + 1):
            replies = respond(prompts)
            draws.append(replies)
            without_signal = _without_signal(replies)
            ids = prompt_ids(prompts.keys)
            has_signal = ~np.isin(ids, list(without_signal))
            left_out += filter(without_signal.__contains__, ids)
            parts.append(_rows(prompts, has_signal))
            missing -= int(has_signal.sum())
            if not missing or draw_number == self._draws:
                break
            prompts = self._take(extra_prompts, missing)
            if not len(prompts):
                break
            extra_prompts += len(prompts)
        if missing == len(batch):
            parts = [batch]
            del left_out[: len(batch)]
        return Refilled(joined(parts), tuple(draws), tuple(left_out), extra_prompts)

    def _take(self, start: int, count: int) -> Samples:
        """Return up to `count` of the prompts that come next, from `start` on; none if there are no more."""
        while sum(map(len, self._next)) < start + count:
            batch = next(self._upcoming, None)
            if batch is None:
                break
            self._next.append(batch)
        if not self._next:
            return Samples({}, np.empty((0, 3), np.int64))
        return _rows(joined(self._next), slice(start, start + count))


def _rows(samples: Samples, rows: npt.NDArray[np.bool_] | slice) -> Samples:
    return Samples({name: array[rows] for name, array in samples.arrays.items()}, samples.keys[rows])


def _without_signal(replies: Mapping[str, Sequence[Reply]]) -> set[str]:
    ids: set[str] = set()
    for reply in replies["rew_inf"]:
        ids.update(reply.facts["without_signal"])
    return ids


class Traversed(NamedTuple):
    """Replies to a batch that was taken through the graph of a step."""

    replies: Replies
    """Replies of the step, and of a stream before it."""
    before: tuple[Reply, ...]
    """Replies of draws before the step; their figures are among `sums`."""
    shown: Sequence[Mapping[str, Any]]
    """Records of a few responses."""
    sums: Sums
    """Figures beside those of `replies`."""
    transfers: Mapping[str, int]
    """Number of collectives of each kind that would make the transfers."""
    extra: int = 0
    """Number of prompts that were drawn beside those of the batch."""
    responders: tuple[PromptsOfResponder, ...] = ()
    """Prompts by the process that responded to them, if others than the worker may."""

    @property
    def collectives(self) -> Sums:
        """Figures of the transfers."""
        return {name: (float(number), 1.0) for name, number in self.transfers.items()}


def sums_of(replies: Replies) -> Sums:
    """Return the figures of all replies."""
    return added(reply.sums for reply in chain.from_iterable(replies.values()))


def with_advantages(
    records: Sequence[Mapping[str, Any]], advantages: Mapping[str, Sequence[float]]
) -> tuple[Mapping[str, Any], ...]:
    """Return the records of responses with their advantages, which are given by the ids of prompts."""
    complete: list[Mapping[str, Any]] = []
    for record in records:
        key = "-".join(str(record[part]) for part in ("epoch", "slice", "sample"))
        group = advantages.get(key)  # A group that was left out before advantages were computed has none.
        advantage = None if group is None else group[record["number"]]
        complete.append({**record, "advantage": advantage})
    return tuple(complete)


def staleness_sums(streamed: Sequence[Reply], version: int) -> Sums:
    """Return the figure of how many steps old the weights were that sampled streamed responses, by token."""
    sums: list[Sums] = []
    for reply in streamed:
        assert reply.meta is not None
        tokens = sum(reply.meta.flat("responses"))
        steps = version - reply.facts["version"]
        sums.append({"staleness": (float(steps * tokens), float(tokens))})
    return added(sums)


def shown_of(responded: Sequence[Responded[Rollout]], most_responses: int) -> tuple[Mapping[str, Any], ...]:
    """Return the records of a batch's first responses, each with the name of the process that has given it."""
    records: list[Mapping[str, Any]] = []
    for part in responded:
        for record in part.answer.facts["shown"]:
            records.append({**record, "responder": part.responder})
    return tuple(records[:most_responses])


def responders_of(responded: Sequence[Responded[Rollout]]) -> tuple[PromptsOfResponder, ...]:
    """Return the prompts of a batch by the process that responded to them."""
    parts: list[PromptsOfResponder] = []
    for part in responded:
        keys = part.piece.prompts.data["keys"].tolist()
        prompts = tuple((epoch, index, sample) for epoch, index, sample in keys)
        parts.append(PromptsOfResponder(part.responder, prompts))
    return tuple(parts)


def shares_of_generators(responded: Sequence[Responded[Rollout]]) -> Sums:
    """Return the figure of the share of prompts that generators have responded to, and not the worker itself."""
    prompts = 0
    by_generators = 0
    for part in responded:
        count = len(part.piece.prompts.ids)
        prompts += count
        by_generators += count * part.is_shared
    return {"by_generators": (float(by_generators), float(prompts))}


def times(traversed: Traversed) -> dict[str, float]:
    """Return the seconds that all processes have responded and rewarded for, and those that the first one has trained.

    Waits for other processes are in neither, so that they tell how many processes of the one kind keep the other busy.
    """
    generation_s = sum(reply.seconds for reply in traversed.before)
    training_s = 0.0
    for name, replies in traversed.replies.items():
        if name in GENERATING:
            generation_s += sum(reply.seconds for reply in replies)
        else:
            training_s += sum(reply.seconds for reply in replies if reply.worker == 0)
    return {"generation_s": generation_s, "training_s": training_s}
