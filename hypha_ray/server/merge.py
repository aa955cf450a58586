"""What becomes of workers' weights when they are merged, and the outer step on it, in one sweep over memory.

Blocks of a megabyte stay in the processor's caches while everything is done to them, so each array is read from memory
once, and nothing but the result is written there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from hypha_ray.server.gates import square_sum

BLOCK = 1 << 18
"""Elements that are worked on at a time."""

Read = Callable[[slice], list[torch.Tensor]]
"""Gives the workers' values of a block, in worker order; nobody writes into them."""

Merge = Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]
"""Makes one value of the workers', given in worker order, for which there is room; it may also be one of theirs."""

Step = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]
"""Takes the mean of a block, scratch space of its size and its place, and writes results; returns what it changed."""


Swept = tuple[list[float], float]
"""Squared L2 norms of the workers' deltas, and of what a step changed."""


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


def mean(weights: Sequence[int]) -> Merge:
    """The weighted mean, as a running one in worker order: equal values give just that value."""
    portions = shares(weights)

    def merge(values: list[torch.Tensor], room: torch.Tensor) -> torch.Tensor:
        result = None
        for value, portion in zip(values, portions, strict=True):
            result = fold(result, value, portion, room)
        assert result is not None
        return result

    return merge


def trimmed_mean(trim: float) -> Merge:
    """The mean of what is left of each coordinate without its greatest and its least values (arXiv 1803.01498).

    Of n values ``max(1, ⌊trim·n⌋)`` are dropped at each end, and all others weigh alike. Of two values nothing would be
    left, so there it is the median. It bears as many poisoned workers as it drops at one end.

    Args:
        trim: part of the values to drop at each end.

    """

    def merge(values: list[torch.Tensor], room: torch.Tensor) -> torch.Tensor:
        drop = max(1, int(trim * len(values)))
        if len(values) <= 2 * drop:
            return median(values, room)
        kept = torch.stack(values).sort(dim=0).values[drop : len(values) - drop]
        return mean([1] * len(kept))(list(kept), room)

    return merge


def median(values: list[torch.Tensor], room: torch.Tensor) -> torch.Tensor:
    """The median of each coordinate, half-way between the middle two of an even number; see `trimmed_mean`."""
    ordered, half = torch.stack(values).sort(dim=0).values, len(values) // 2
    if len(values) % 2:
        return room.copy_(ordered[half])
    return torch.lerp(ordered[half - 1], ordered[half], 0.5, out=room)


def measure(read: Read, workers: int, theta: torch.Tensor, relative: bool) -> list[float]:
    """Squared L2 norms of the workers' deltas, and nothing else; arguments as for `sweep`."""
    deltas, spare = [0.0] * workers, torch.empty(min(BLOCK, len(theta)), dtype=theta.dtype)
    for part in blocks(len(theta)):
        for index, value in enumerate(read(part)):
            deltas[index] += _square(value, theta[part], spare[: part.stop - part.start], relative)
    return deltas


def scaled(read: Read, scales: Sequence[float], theta: torch.Tensor, relative: bool) -> Read:
    """The workers' values as if their deltas were so many times as long."""

    def scaled_read(part: slice) -> list[torch.Tensor]:
        pairs = zip(read(part), scales, strict=True)
        return [v if s == 1 else v * s if relative else torch.lerp(theta[part], v, s) for v, s in pairs]

    return scaled_read


def sweep(read: Read, workers: int, merge: Merge, step: Step, theta: torch.Tensor, relative: bool) -> Swept:
    """Merge the workers' values block by block, and take a step with each block.

    Args:
        read: the workers' values.
        workers: how many there are.
        merge: makes one value of theirs.
        step: what is done with the merged value.
        theta: the global weights.
        relative: the values are deltas already, not weights.

    Returns:
        Squared L2 norms of the workers' deltas, and of what `step` changed.

    """
    merged, spare = (torch.empty(min(BLOCK, len(theta)), dtype=theta.dtype) for _ in range(2))
    deltas, change = [0.0] * workers, 0.0
    for part in blocks(len(theta)):
        room, values = spare[: part.stop - part.start], read(part)
        for index, value in enumerate(values):
            deltas[index] += _square(value, theta[part], room, relative)
        change += square_sum(step(merge(values, merged[: len(room)]), room, part))
    return deltas, change


def _square(value: torch.Tensor, theta: torch.Tensor, room: torch.Tensor, relative: bool) -> float:
    """Squared L2 norm of a worker's delta."""
    return square_sum(value if relative else torch.sub(value, theta, out=room))


def blocks(size: int) -> Iterator[slice]:
    """Cut a range of elements into blocks."""
    return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))
