"""Search for losses: the commit log, replayed against the dataset's manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hypha_ray.types import Commit, Span

Uses = dict[tuple[int, int], npt.NDArray[np.int32]]
"""By epoch and slice: how often each sample was committed."""


@dataclass(frozen=True, slots=True)
class Account:
    """Figures of a commit log about samples. All but the first two must be zero."""

    committed: int
    """Samples, those of all epochs together."""
    whole_epochs: int
    """Epochs that are complete, by the log itself."""
    repeated: int
    """Uses of a sample in an epoch beyond its first one."""
    lost: int
    """Samples that a complete epoch lacks, or that are counted as used and are in no delta."""
    foreign: int
    """Samples that the dataset doesn't have, or that a delta counts and doesn't name."""


def account(commits: Sequence[Commit], sizes: Mapping[int, int]) -> Account:
    """Replay a log.

    Args:
        commits: oldest first.
        sizes: samples of each slice of the training split.

    """
    uses: Uses = {}
    foreign = 0
    for commit in commits:
        foreign += _miscounted_by_deltas(commit)
        for _, spans in commit.spans:
            foreign += sum(_use(uses, span, sizes) for span in spans)
    whole_epochs = 0
    lost = 0
    if commits:
        whole_epochs = commits[-1].epoch
        lost = _miscounted_by_cursors(uses, commits[-1])
    for epoch in range(whole_epochs):
        lost += sum(_unused(uses, (epoch, index), size) for index, size in sizes.items())
    committed = 0
    repeated = 0
    for counts in uses.values():
        committed += int(counts.sum())
        repeated += int(np.maximum(counts - 1, 0).sum())
    return Account(committed, whole_epochs, repeated, lost, foreign)


def breaks(commits: Sequence[Commit]) -> int:
    """Places where a record is missing, or doesn't begin with the weights that the one before it ended with."""
    count = 0
    next_round = 0
    parent = None
    for commit in commits:
        count += commit.round != next_round or (next_round > 0 and commit.parent_sha256 != parent)
        next_round = commit.round + 1
        parent = commit.theta_sha256
    return count


def discarded(begun: Iterable[int], committed: Iterable[int], rounds: int) -> list[int]:
    """Numbers of rounds that were begun and never committed; what follows the last round is no round."""
    return sorted(number for number in set(begun) - set(committed) if number < rounds)


def begun_again(begun: Iterable[int]) -> int:
    """Number of rounds that were begun anew, because its scheduler or driver was gone; it keeps its number."""
    return sum(count - 1 for count in Counter(begun).values())


def _miscounted_by_deltas(commit: Commit) -> int:
    """Samples that deltas count and don't name, or name and don't count."""
    named = {worker: sum(span.samples for span in spans) for worker, spans in commit.spans}
    difference = 0
    for delta in commit.deltas:
        difference += abs(delta.samples - named.pop(delta.worker, 0))
    return difference + sum(named.values())


def _use(uses: Uses, span: Span, sizes: Mapping[int, int]) -> int:
    """Enter a span; returns how many of its samples the dataset doesn't have."""
    size = sizes.get(span.slice, 0)
    counts = uses.setdefault((span.epoch, span.slice), np.zeros(size, np.int32))
    start = min(max(span.start, 0), size)
    stop = min(max(span.stop, 0), size)
    counts[start:stop] += 1
    return span.samples - max(0, stop - start)


def _unused(uses: Uses, key: tuple[int, int], size: int) -> int:
    if key not in uses:
        return size
    return int((uses[key] == 0).sum())


def _miscounted_by_cursors(uses: Uses, last: Commit) -> int:
    """Difference in samples between the last record's cursors and the spans of all deltas."""
    by_cursors = {}
    for epoch, cursors in {last.epoch: last.cursors, **last.ahead}.items():
        for index, number in cursors.items():
            by_cursors[epoch, index] = number
    by_deltas = {}
    for (epoch, index), counts in uses.items():
        if epoch >= last.epoch:
            by_deltas[epoch, index] = int((counts > 0).sum())
    keys = by_cursors.keys() | by_deltas.keys()
    return sum(abs(by_cursors.get(key, 0) - by_deltas.get(key, 0)) for key in keys)
