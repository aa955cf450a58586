"""Workers' values are merged, and an outer step taken on the result, in one sweep over memory.

Blocks of a megabyte stay in the processor's caches while everything is done to them, decoding included: so each payload
is read from memory once, none is ever there decoded in full size, and nothing but the result is written. Several
threads take one block after the other; what they measure is added up in the blocks' order: their number changes no bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from hypha_ray.codec.blocks import BLOCK, blocks
from hypha_ray.config.schema import Sync
from hypha_ray.server.admission import square_distance, square_sum

T = TypeVar("T")

Work = Callable[[slice, torch.Tensor, torch.Tensor], T]
"""Takes the place of a block, and two pieces of scratch space of its size."""

Read = Callable[[slice], list[torch.Tensor]]
"""Gives the workers' values of a block, in worker order; they are read-only."""

Merge = Callable[[Iterable[torch.Tensor], torch.Tensor], torch.Tensor]
"""Makes one value of the workers', taken in worker order; there is room for it, but it may be one of theirs."""

Step = Callable[[torch.Tensor, torch.Tensor, slice], float]
"""Takes the merged values of a block, scratch space of its size and its place, and writes results; returns the squared
L2 norm of what it changed."""


def shares(weights: Sequence[int]) -> list[float]:
    """Share that each of the weights has in the sum so far: 1, n₂/(n₁ + n₂), …; 1 where that is zero."""
    total = 0
    result = []
    for weight in weights:
        total += weight
        result.append(weight / total if total else 1.0)
    return result


def fold(mean: torch.Tensor | None, value: torch.Tensor, share: float, out: torch.Tensor) -> torch.Tensor:
    """Take one more value into a running mean: mean ← mean + (x − mean)·share.

    Equal values give just that value, whatever their number, because x − mean is then zero; sum-then-divide doesn't
    offer that. From weight ½ on, `torch.lerp` computes ``end − (end − start)(1 − weight)``, which unlike its other half
    keeps even the sign of a zero: hence the exchange.

    Args:
        mean: of the values so far, never written to unless it is `out`; None: there are none.
        value: the next one, never written to.
        share: its weight, as `shares` gives it.
        out: where the new mean goes, unless it is the value itself.

    """
    if mean is None:
        return value
    if share < 0.5:
        return torch.lerp(value, mean, 1 - share, out=out)
    return torch.lerp(mean, value, share, out=out)


def weights_of(sync: Sync, weights: Sequence[int]) -> list[int]:
    """Weight of each worker's values in the mean, for deltas that came with these."""
    return list(weights) if sync.weighting == "samples" else [1] * len(weights)


def merger(sync: Sync, weights: Sequence[int]) -> Merge:
    """The merge that `sync.merge` asks for, of deltas with these weights; only the mean weighs them."""
    workers = len(weights)
    match sync.merge:
        case "mean":
            return mean(weights_of(sync, weights))
        case "trimmed_mean":
            return trimmed_mean(workers, max(1, int(sync.trim * workers)))
        case "median":
            return trimmed_mean(workers, workers)


def mean(weights: Sequence[int]) -> Merge:
    """The weighted mean, as a running one in worker order: equal values give just that value."""
    portions = shares(weights)

    def merge(values: Iterable[torch.Tensor], room: torch.Tensor) -> torch.Tensor:
        result = None
        for value, portion in zip(values, portions, strict=True):
            result = fold(result, value, portion, room)
        assert result is not None
        return result

    return merge


def plain_mean(values: Iterable[torch.Tensor], room: torch.Tensor) -> torch.Tensor:
    """The sum of deltas, in worker order, over their number: what an all-reduce makes of them."""
    count = 0
    for count, value in enumerate(values, 1):
        if count == 1:
            room.copy_(value)
        else:
            room.add_(value)
    return room.div_(count)


def trimmed_mean(workers: int, drop: int) -> Merge:
    """The mean of each coordinate's values without the greatest and the least few (arXiv 1803.01498).

    All values weigh alike. At least the middle one is left, or the middle two of an even number: dropping as many as
    that allows gives the coordinate-wise median. So two values are never trimmed. As many poisoned workers as values
    are dropped at each end can't take the result out of the range of the others' values.

    Args:
        workers: how many values there are.
        drop: how many of them to drop at each end.

    """
    drop = min(drop, (workers - 1) // 2)
    middle = mean([1] * (workers - 2 * drop))

    def merge(values: Iterable[torch.Tensor], room: torch.Tensor) -> torch.Tensor:
        return middle(ascending(values)[drop : workers - drop], room)

    return merge


def ascending(values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Sort each coordinate's values: row 0 gets the least ones, the last row the greatest.

    By odd-even transposition: neighbours are put in order, as often as there are rows. For the few rows of a round that
    is many times faster than a sort along the strided axis, since it works on whole rows.
    """
    rows = [value.clone() for value in values]
    spare = torch.empty_like(rows[0])
    for turn in range(len(rows)):
        for low in range(turn % 2, len(rows) - 1, 2):
            left, right = rows[low : low + 2]
            torch.minimum(left, right, out=spare)
            torch.maximum(left, right, out=right)
            rows[low], spare = spare, left
    return rows


@dataclass(slots=True)
class Values:
    """The workers' values of a group, which are measured while they are read.

    Attributes:
        read: gives them.
        theta: the group's global weights.
        relative: the values are deltas already, not weights.
        scales: what each worker's delta is multiplied by.
        deltas: give deltas, even if the values are weights.

    """

    read: Read
    theta: torch.Tensor
    relative: bool
    scales: Sequence[float]
    deltas: bool = False

    def block(self, part: slice, room: torch.Tensor, squares: list[float]) -> Iterator[torch.Tensor]:
        """Give a block's values, in worker order.

        Args:
            part: its place.
            room: for one value.
            squares: gets the squared L2 norm of each worker's delta, as it came.

        """
        before = self.theta[part]
        for value, scale in zip(self.read(part), self.scales, strict=True):
            if scale == 1 and not self.relative and not self.deltas:
                squares.append(square_distance(value, before, room))
                yield value
                continue
            delta = value if self.relative else torch.sub(value, before, out=room)
            squares.append(square_sum(delta))
            if self.relative or self.deltas:
                yield delta if scale == 1 else delta * scale
            else:
                yield torch.add(before, delta, alpha=scale)


def measure(values: Values, threads: int = 1) -> list[float]:
    """Squared L2 norms of the workers' deltas, for which everything is read once."""

    def work(part: slice, _: torch.Tensor, room: torch.Tensor) -> list[float]:
        squares: list[float] = []
        deque(values.block(part, room, squares), maxlen=0)
        return squares

    return _columns(over_blocks(values.theta, work, threads), len(values.scales))


def merge_and_step(values: Values, merge: Merge, step: Step) -> Work[list[float]]:
    """Work of `sweep` on a block: merge the workers' values, and take a step with the result."""

    def work(part: slice, merged: torch.Tensor, room: torch.Tensor) -> list[float]:
        squares: list[float] = []
        result = merge(values.block(part, room, squares), merged)
        return [*squares, step(result, room, part)]

    return work


def sweep(values: Values, work: Work[list[float]], threads: int = 1, block: int = BLOCK) -> tuple[list[float], float]:
    """Merge the workers' values block by block, and take a step with each block.

    Args:
        values: the workers' values.
        work: gives squared L2 norms of each worker's delta, and of what it changed.
        threads: blocks that are worked on at a time.
        block: elements of a block.

    Returns:
        The sums of what `work` gave: of each worker's delta, and of the changes.

    """
    *squares, change = _columns(over_blocks(values.theta, work, threads, block), len(values.scales) + 1)
    return squares, change


def over_blocks(like: torch.Tensor, work: Work[T], threads: int, block: int = BLOCK) -> list[T]:
    """Do something with each block of a tensor.

    A thread takes a block whenever it has none, so one that the machine holds up costs the others nothing.

    Args:
        like: the tensor.
        work: what to do.
        threads: blocks that are worked on at a time.
        block: elements of a block.

    Returns:
        What `work` gave, in the blocks' order.

    """
    parts = list(blocks(len(like), block))
    results: dict[int, T] = {}
    left = deque(enumerate(parts))

    def labour() -> None:
        one, other = (torch.empty(min(block, len(like)), dtype=like.dtype) for _ in range(2))
        while left:
            try:
                index, part = left.popleft()
            except IndexError:  # Another thread was faster.
                return
            size = part.stop - part.start
            results[index] = work(part, one[:size], other[:size])

    if (helpers := min(threads, len(parts)) - 1) < 1:
        labour()
    else:
        with ThreadPoolExecutor(helpers) as pool:
            futures = [pool.submit(labour) for _ in range(helpers)]
            labour()
            for future in futures:
                future.result()
    return [results[index] for index in range(len(parts))]


def _columns(rows: Sequence[Sequence[float]], width: int) -> list[float]:
    """The sums over all rows, in their order."""
    return [sum(row[column] for row in rows) for column in range(width)]
