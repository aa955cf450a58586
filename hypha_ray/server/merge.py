"""Workers' values are merged, and an outer step taken on the result, in one sweep over memory.

Blocks of a megabyte stay in the processor's caches while everything is done to them, decoding included: so each payload
is read from memory once, none is ever there decoded in full size, and nothing but the result is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hypha_ray.codec.blocks import BLOCK, blocks
from hypha_ray.config.schema import Sync
from hypha_ray.server.gates import square_sum

Read = Callable[[slice], list[torch.Tensor]]
"""Gives the workers' values of a block, in worker order; nobody writes into them."""

Merge = Callable[[Iterable[torch.Tensor], torch.Tensor], torch.Tensor]
"""Makes one value of the workers', taken in worker order; there is room for it, but it may be one of theirs."""

Step = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]
"""Takes the merged values of a block, scratch space of its size and its place, and writes results; returns what it
changed."""


def shares(weights: Sequence[int]) -> list[float]:
    """Share that each of the weights has in the sum so far: 1, n₂/(n₁ + n₂), …."""
    total = 0
    result = []
    for weight in weights:
        total += weight
        result.append(weight / total)
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


def merger(sync: Sync, samples: Sequence[int]) -> Merge:
    """What `sync.merge` asks for, for deltas of so many samples; only the mean weighs them."""
    workers = len(samples)
    match sync.merge:
        case "mean":
            return mean(samples if sync.weighting == "samples" else [1] * workers)
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
        squares: squared L2 norm of each worker's delta as it came, in what was read so far.

    """

    read: Read
    theta: torch.Tensor
    relative: bool
    scales: Sequence[float]
    squares: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.squares = [0.0] * len(self.scales)

    def block(self, part: slice, room: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give a block's values, in worker order, and measure each of them; there must be room for one."""
        before = self.theta[part]
        for index, (value, scale) in enumerate(zip(self.read(part), self.scales, strict=True)):
            delta = value if self.relative else torch.sub(value, before, out=room)
            self.squares[index] += square_sum(delta)
            if scale == 1:
                yield value
            else:
                yield delta * scale if self.relative else torch.add(before, delta, alpha=scale)


def measure(values: Values) -> list[float]:
    """Squared L2 norms of the workers' deltas, for which everything is read once."""
    spare = torch.empty(min(BLOCK, len(values.theta)), dtype=values.theta.dtype)
    for part in blocks(len(values.theta)):
        for _ in values.block(part, spare[: part.stop - part.start]):
            pass
    return values.squares


def sweep(values: Values, merge: Merge, step: Step) -> float:
    """Merge the workers' values block by block, and take a step with each block.

    Args:
        values: the workers' values; they are measured too.
        merge: makes one value of theirs.
        step: what is done with the merged value.

    Returns:
        The squared L2 norm of what `step` changed.

    """
    merged, spare = (torch.empty(min(BLOCK, len(values.theta)), dtype=values.theta.dtype) for _ in range(2))
    change = 0.0
    for part in blocks(len(values.theta)):
        room = spare[: part.stop - part.start]
        result = merge(values.block(part, room), merged[: len(room)])
        change += square_sum(step(result, room, part))
    return change
