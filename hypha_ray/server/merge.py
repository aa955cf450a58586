"""Merge of workers' values and outer step on the result, in one sweep over memory.

A block of a megabyte stays in the processor's caches during all operations, decoding included. So each payload is read
from memory once, is never decoded in full size, and only the result is written. Threads take the blocks in turn.
Measurements are added up in the order of the blocks, so the number of threads changes no bit.

The rules are a mean, a trimmed mean, a median, or one that a user brings.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from hypha_ray.codec.feedback import BLOCK, blocks
from hypha_ray.config.schema import Sync
from hypha_ray.errors import guarded, member_errors
from hypha_ray.plugins import create, is_own
from hypha_ray.server.payloads import square_distance, square_sum

T = TypeVar("T")
Work = Callable[[slice, torch.Tensor, torch.Tensor], T]
"""Function of a block's place and two scratch arrays of its size."""

Read = Callable[[slice], list[torch.Tensor]]
"""Function that returns the workers' values of a block, read-only and in worker order."""

Merge = Callable[[Iterable[torch.Tensor], torch.Tensor], torch.Tensor]
"""Function of the workers' values, in worker order, and scratch space; the result may be one of the inputs."""

Step = Callable[[torch.Tensor, torch.Tensor, slice], float]
"""Function of a block's merged values, scratch space and its place. It writes the results, and returns the squared L2
norm of the change."""


class Squares(NamedTuple):
    """Squared L2 norms of a group: of each worker's delta before scaling, and of the change of θ."""

    deltas: list[float]
    change: float


def shares(weights: Sequence[float]) -> list[float]:
    """Share of each weight in the sum up to it: 1, n₂/(n₁ + n₂), …; 1 where that sum is zero."""
    total: float = 0
    portions = []
    for weight in weights:
        total += weight
        portions.append(weight / total if total else 1.0)
    return portions


def fold(mean: torch.Tensor | None, value: torch.Tensor, share: float, out: torch.Tensor) -> torch.Tensor:
    """Add one value to a running mean: mean ← mean + (x − mean)·share.

    The mean of equal values is exactly that value, because x − mean is zero; a sum divided by the count isn't always.
    From weight ½ on, `torch.lerp` computes ``end − (end − start)(1 − weight)``. That form, unlike its other one, keeps
    the sign of a zero; hence the swapped arguments.

    Args:
        mean: mean of the values so far, never written to unless it is `out`; None: there are none.
        value: the next value, never written to.
        share: its share, from `shares`.
        out: array for the new mean; unused if the result is `value` itself.

    """
    if mean is None:
        return value
    if share < 0.5:
        return torch.lerp(value, mean, 1 - share, out=out)
    return torch.lerp(mean, value, share, out=out)


def weights_of(sync: Sync, samples: Sequence[int]) -> Sequence[float]:
    """Weight of each worker in the mean, for deltas of so many samples."""
    if sync.weighting == "samples":
        return list(samples)
    if is_own("weightings", sync.weighting):
        with member_errors(f"weighting {sync.weighting}"):
            return own_weights(sync.weighting, sync.weighting_options, samples)
    return [1] * len(samples)


def merger(sync: Sync, samples: Sequence[int]) -> Merge:
    """Merge function of `sync.merge` for deltas of so many samples; trimmed means aren't weighted."""
    workers = len(samples)
    match sync.merge:
        case "mean":
            return mean(weights_of(sync, samples))
        case "trimmed_mean":
            trimmed = int(sync.trim * workers)
            return trimmed_mean(workers, max(1, trimmed))
        case "median":
            return trimmed_mean(workers, workers)
    return guarded(f"merge rule {sync.merge}", own_merge(sync.merge, sync.merge_options, weights_of(sync, samples)))


def mean(weights: Sequence[float]) -> Merge:
    """Weighted mean, as a running one in worker order: the mean of equal values is exactly that value."""
    portions = shares(weights)

    def merge(values: Iterable[torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
        running_mean = None
        for value, portion in zip(values, portions, strict=True):
            running_mean = fold(running_mean, value, portion, scratch)
        assert running_mean is not None
        return running_mean

    return merge


def plain_mean(values: Iterable[torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
    """Sum of deltas in worker order, divided by their number, as in an all-reduce."""
    count = 0
    for count, value in enumerate(values, 1):
        if count == 1:
            scratch.copy_(value)
        else:
            scratch.add_(value)
    return scratch.div_(count)


def trimmed_mean(workers: int, drop: int) -> Merge:
    """Coordinate-wise mean without the greatest and the least few values (trimmed mean, arXiv 1803.01498).

    All values have the same weight. At least the middle value is kept, or the middle two of an even number: with the
    greatest possible `drop` it is the coordinate-wise median. So two values are never trimmed. Up to `drop` poisoned
    workers can't move the result out of the range of the others' values.
    """
    drop = min(drop, (workers - 1) // 2)
    middle_mean = mean([1] * (workers - 2 * drop))

    def merge(values: Iterable[torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
        return middle_mean(ascending(values)[drop : workers - drop], scratch)

    return merge


def ascending(values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Sort each coordinate's values across rows: row 0 gets the least ones, the last row the greatest.

    Odd-even transposition sort: neighbours are compared and swapped, as many times as there are rows. For the few rows
    of a round it is many times faster than a sort along the strided axis, because it works on whole rows.
    """
    rows = [value.clone() for value in values]
    spare_row = torch.empty_like(rows[0])
    for turn in range(len(rows)):
        for low in range(turn % 2, len(rows) - 1, 2):
            first = rows[low]
            second = rows[low + 1]
            torch.minimum(first, second, out=spare_row)
            torch.maximum(first, second, out=second)
            rows[low] = spare_row
            spare_row = first
    return rows


@dataclass(slots=True)
class Values:
    """Workers' values of a group, whose deltas are measured while they are read.

    Attributes:
        read: function that returns the values of a block.
        theta: the group's global weights.
        relative: whether the values are deltas instead of weights.
        scales: factor of each worker's delta.
        deltas: whether to yield deltas, even if the values are weights.

    """

    read: Read
    theta: torch.Tensor
    relative: bool
    scales: Sequence[float]
    deltas: bool = False

    def block(self, part: slice, scratch: torch.Tensor, squares: list[float]) -> Iterator[torch.Tensor]:
        """Yield a block's values in worker order; append squared L2 norms of the unscaled deltas to `squares`."""
        theta = self.theta[part]
        for value, scale in zip(self.read(part), self.scales, strict=True):
            if scale == 1 and not self.relative and not self.deltas:
                squares.append(square_distance(value, theta, scratch))
                yield value
                continue
            delta = value
            if not self.relative:
                delta = torch.sub(value, theta, out=scratch)
            squares.append(square_sum(delta))
            if not self.relative and not self.deltas:
                yield torch.add(theta, delta, alpha=scale)
            elif scale == 1:
                yield delta
            else:
                yield delta * scale


def measure(values: Values, threads: int = 1) -> list[float]:
    """Squared L2 norms of the workers' deltas, by one sweep over them."""

    def work(part: slice, _: torch.Tensor, scratch: torch.Tensor) -> list[float]:
        squares: list[float] = []
        deque(values.block(part, scratch, squares), maxlen=0)  # Nothing is merged.
        return squares

    rows = over_blocks(values.theta, work, threads)
    return _column_sums(rows, len(values.scales))


def merge_and_step(values: Values, merge: Merge, step: Step) -> Work[list[float]]:
    """Work for `sweep`: merge a block's values, and take a step with the result."""

    def work(part: slice, merge_scratch: torch.Tensor, scratch: torch.Tensor) -> list[float]:
        squares: list[float] = []
        merged = merge(values.block(part, scratch, squares), merge_scratch)
        change = step(merged, scratch, part)
        return [*squares, change]

    return work


def sweep(values: Values, work: Work[list[float]], threads: int = 1, block: int = BLOCK) -> Squares:
    """Merge the workers' values block by block, and take a step with each; `work` returns squared norms.

    Returns:
        Squared L2 norms over all blocks.

    """
    rows = over_blocks(values.theta, work, threads, block)
    *deltas, change = _column_sums(rows, len(values.scales) + 1)
    return Squares(deltas, change)


def over_blocks(tensor: torch.Tensor, work: Work[T], threads: int, block: int = BLOCK) -> list[T]:
    """Apply a function to each block of a tensor like this one; return its results in the order of the blocks.

    Threads take blocks from one queue, so a slow thread delays only its current block.

    Returns:
        Results of `work`, in the order of the blocks.

    """
    parts = list(blocks(len(tensor), block))
    results: dict[int, T] = {}
    queue = deque(enumerate(parts))

    def work_off() -> None:
        scratch_size = min(block, len(tensor))
        scratch = torch.empty(scratch_size, dtype=tensor.dtype)
        more_scratch = torch.empty(scratch_size, dtype=tensor.dtype)
        while queue:
            try:
                index, part = queue.popleft()
            except IndexError:  # Another thread took the last block.
                return
            elements = part.stop - part.start
            results[index] = work(part, scratch[:elements], more_scratch[:elements])

    helpers = min(threads, len(parts)) - 1
    if helpers < 1:
        work_off()
    else:
        with ThreadPoolExecutor(helpers) as pool:
            futures = [pool.submit(work_off) for _ in range(helpers)]
            work_off()
            for future in futures:
                future.result()
    return [results[index] for index in range(len(parts))]


def _column_sums(rows: Sequence[Sequence[float]], width: int) -> list[float]:
    """Sum of each column, added in the order of the rows."""
    sums: list[float] = []
    for column in range(width):
        sums.append(sum(row[column] for row in rows))
    return sums


def own_merge(name: str, options: Mapping[str, Any] | None, weights: Sequence[float]) -> Merge:
    """Merge by a user's rule: a function of deltas, 1-D and in worker order, and of their weights.

    Raises:
        ConfigError: the rule can't be had.

    """
    rule = create("merge_rules", name, options)

    def merge(values: Iterable[torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
        copies = [value.clone() for value in values]
        merged_values = rule(copies, list(weights))
        require_like(name, merged_values, scratch)
        return scratch.copy_(merged_values.detach())

    return merge


def require_like(name: str, values: Any, expected: torch.Tensor) -> None:
    """Refuse what a member gave if it is no tensor of real numbers of the shape of another.

    Raises:
        ValueError: it isn't.

    """
    if not isinstance(values, torch.Tensor):
        raise ValueError(f"{name} gave {type(values).__name__}, not a tensor")
    if values.shape != expected.shape:
        raise ValueError(f"{name} gave shape {tuple(values.shape)} for {tuple(expected.shape)}")
    if values.is_complex():
        raise ValueError(f"{name} gave complex numbers")


def own_weights(name: str, options: Mapping[str, Any] | None, samples: Sequence[int]) -> list[float]:
    """Weights by a user's function of the deltas' samples.

    Raises:
        ConfigError: the function can't be had.
        ValueError: it gave no weights.

    """
    weighting = create("weightings", name, options)
    weights = [float(weight) for weight in weighting(list(samples))]
    is_complete = len(weights) == len(samples) and 0 < sum(weights) < math.inf
    if not is_complete or not all(weight >= 0 for weight in weights):
        raise ValueError(f"{name} gave {weights} for the samples {list(samples)}: no weights from 0, one for each")
    return weights
