"""The mean of workers' weights, and the outer step on it, in one sweep over memory.

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

Step = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]
"""Takes the mean of a block, scratch space of its size and its place, and writes results; returns what it changed."""


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


def sweep(
    read: Read, weights: Sequence[int], step: Step, theta: torch.Tensor, relative: bool
) -> tuple[list[float], float]:
    """Average the workers' values block by block, and take a step with each block.

    Args:
        read: the workers' values.
        weights: their weights in the mean.
        step: what is done with the mean.
        theta: the global weights.
        relative: the values are deltas already, not weights.

    Returns:
        Squared L2 norms of the workers' deltas, and of what `step` changed.

    """
    portions = shares(weights)
    average, spare = (torch.empty(min(BLOCK, len(theta)), dtype=theta.dtype) for _ in range(2))
    deltas, change = [0.0] * len(weights), 0.0
    for part in blocks(len(theta)):
        room, mean = spare[: part.stop - part.start], None
        for index, value in enumerate(read(part)):
            deltas[index] += square_sum(value if relative else torch.sub(value, theta[part], out=room))
            mean = fold(mean, value, portions[index], average[: len(room)])
        assert mean is not None
        change += square_sum(step(mean, room, part))
    return deltas, change


def blocks(size: int) -> Iterator[slice]:
    """Cut a range of elements into blocks."""
    return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))
