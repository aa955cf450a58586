"""Workers of a model by ranks, division of a batch among copies of the model, and shards that move for it."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from hypha_ray.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """Model workers that hold one model together.

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
        one = self.tensor * self.pipeline
        if not self.workers or len(set(self.workers)) != len(self.workers) or len(self.workers) % one:
            fix = f"a multiple of {one} workers, each once"
            raise ConfigError(
                "RL013", "model workers can't be divided into copies of the model", str(self.workers), fix
            )

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
        stage = self.data * self.tensor
        starts = range(rank * self.tensor, len(self.workers), stage)
        return tuple(worker for start in starts for worker in self.workers[start : start + self.tensor])


class Shard(NamedTuple):
    """Name of the samples that one request made at one worker."""

    worker: int
    """Number of the model worker that holds them."""
    request: int
    """Number of the request that made them."""


Where: TypeAlias = Mapping[str, Mapping[str, Shard]]
"""Shard of each id under each key: `where[key][id]`."""


@dataclass(frozen=True)
class Moves:
    """Shards that workers have to get before a call, and the collectives that they stand for."""

    shards: Mapping[int, tuple[Shard, ...]]
    """Shards of other workers that each worker lacks, each once."""
    gathers: int
    """Number of workers that get shards of more than one other worker."""
    scatters: int
    """Number of shards of which workers get different ids."""
    broadcasts: int
    """Number of shards of which several workers get the same ids."""

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
    where: Where, wanted: Mapping[int, Sequence[str]], keys: Sequence[str], had: Collection[tuple[int, Shard]] = ()
) -> Moves:
    """Plan the transfers before a call.

    Args:
        where: place of every id under every key.
        wanted: ids that each worker needs.
        keys: keys that the call takes.
        had: pairs of a worker and a shard that it got before another call.

    """
    away: dict[Shard, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for worker, ids in wanted.items():
        for key in keys:
            places = [where[key][name] for name in ids]
            lacks = {one for one in set(places) if one.worker != worker and (worker, one) not in had}
            for name, shard in zip(ids, places, strict=True) if lacks else ():
                if shard in lacks:
                    away[shard][worker].add(name)
    shards = {worker: tuple(sorted(shard for shard, takers in away.items() if worker in takers)) for worker in wanted}
    differ = {shard: len({frozenset(ids) for ids in takers.values()}) for shard, takers in away.items()}
    return Moves(
        shards,
        gathers=sum(len({shard.worker for shard in got}) > 1 for got in shards.values()),
        scatters=sum(count > 1 for count in differ.values()),
        broadcasts=sum(count == 1 and len(away[shard]) > 1 for shard, count in differ.items()),
    )
