"""Workers of a model by ranks, division of a batch among copies of the model, and shards that move for it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from hypha_ray.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """Model workers that share the copies of one model.

    Tensor ranks are next to each other, then data ranks, then pipeline stages, as in Megatron-LM (arXiv:2104.04473).

    Raises:
        ConfigError: RL013 the workers can't be divided so.

    """

    workers: tuple[int, ...]
    """Numbers of the model workers, each once."""
    tensor: int = 1
    """Number of workers that share a layer."""
    pipeline: int = 1
    """Number of stages."""

    def __post_init__(self) -> None:
        size = self.tensor * self.pipeline
        number = len(self.workers)
        if not number or len(set(self.workers)) != number or number % size:
            problem = "model workers can't be divided into copies of the model"
            raise ConfigError("RL013", problem, str(self.workers), f"a multiple of {size} workers, each once")

    @property
    def data(self) -> int:
        """Number of copies of the model, each of which gets another part of a batch."""
        return len(self.workers) // (self.tensor * self.pipeline)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Worker of each copy that holds its inputs and outputs: the last stage, tensor rank 0."""
        last = len(self.workers) - self.data * self.tensor
        return self.workers[last :: self.tensor]

    def copy(self, rank: int) -> tuple[int, ...]:
        """Return the workers of the copy with this data rank."""
        stage_size = self.data * self.tensor
        workers: list[int] = []
        for start in range(rank * self.tensor, len(self.workers), stage_size):
            workers += self.workers[start : start + self.tensor]
        return tuple(workers)


class Shard(NamedTuple):
    """Name of the samples that one request made at one worker."""

    worker: int
    """Number of the model worker that holds them."""
    request: int
    """Number of the request that made them."""


Locations: TypeAlias = Mapping[str, Mapping[str, Shard]]
"""Shard of each id under each key: `locations[key][id]`."""


@dataclass(frozen=True)
class Moves:
    """Shards that workers need before a call, and the collectives that would move them."""

    shards: Mapping[int, tuple[Shard, ...]]
    """Shards of other workers that each worker lacks, each once."""
    gathers: int
    """Number of workers that get shards of more than one other worker."""
    scatters: int
    """Number of shards from which workers get different ids."""
    broadcasts: int
    """Number of shards from which several workers get the same ids."""

    @property
    def counts(self) -> Counter[str]:
        """Number of collectives of each kind."""
        return Counter(gathers=self.gathers, scatters=self.scatters, broadcasts=self.broadcasts)


def windows(samples: int, parts: int) -> tuple[range, ...]:
    """Divide samples into ranges one after the other, whose sizes differ by one at most."""
    bounds = [samples * part // parts for part in range(parts + 1)]
    return tuple(range(first, last) for first, last in pairwise(bounds))


def balanced(tokens: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Divide samples so that parts have about as many tokens, and each at least one sample if there are enough.

    The longest sample goes to the part with the fewest tokens (Graham 1969, longest processing time first); ties go to
    the part with the fewest samples.

    Args:
        tokens: tokens of each sample.
        parts: number of parts.

    Returns:
        Indices of the samples of each part, in ascending order.

    """
    members: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, 0, part) for part in range(parts)]
    for index in sorted(range(len(tokens)), key=lambda index: (-tokens[index], index)):
        total, count, part = heapq.heappop(heap)
        members[part].append(index)
        heapq.heappush(heap, (total + tokens[index], count + 1, part))
    return tuple(tuple(sorted(part)) for part in members)


def moves(
    locations: Locations,
    ids_of_workers: Mapping[int, Sequence[str]],
    keys: Sequence[str],
    transferred: Collection[tuple[int, Shard]] = (),
) -> Moves:
    """Plan the transfers before a call.

    Args:
        locations: shard of every id under every key.
        ids_of_workers: ids that each worker needs.
        keys: keys that the call takes.
        transferred: pairs of a worker and a shard that it got before another call.

    """
    targets: dict[Shard, dict[int, set[str]]] = {}  # Ids that each worker gets from a shard.
    for worker, ids in ids_of_workers.items():
        for key in keys:
            for name in ids:
                shard = locations[key][name]
                if shard.worker != worker and (worker, shard) not in transferred:
                    targets.setdefault(shard, {}).setdefault(worker, set()).add(name)
    incoming: dict[int, list[Shard]] = {worker: [] for worker in ids_of_workers}
    scatters = 0
    broadcasts = 0
    for shard in sorted(targets):
        for worker in targets[shard]:
            incoming[worker].append(shard)
        ids_of_targets = {frozenset(ids) for ids in targets[shard].values()}
        if len(ids_of_targets) > 1:
            scatters += 1
        elif len(targets[shard]) > 1:
            broadcasts += 1
    gathers = 0
    for shards in incoming.values():
        sources = {shard.worker for shard in shards}
        gathers += len(sources) > 1
    return Moves({worker: tuple(shards) for worker, shards in incoming.items()}, gathers, scatters, broadcasts)
