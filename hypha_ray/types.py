"""The frozen records that travel between scheduler, workers, server and store.

A *span* is a run of samples of one slice in one epoch; every trained sample is in exactly one span of exactly one
committed delta. Every event from a worker carries its `Source`, so late, repeated and foreign ones are recognised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Flat = dict[str, npt.NDArray[np.generic]]
"""A fragment's tensors as they travel: group name to one contiguous 1-D array."""

Arrays = dict[str, npt.NDArray[np.generic]]
"""A slice or a batch: tensor name to array, the first dimension counts samples."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of slices, and the place that each of them comes from.

    `keys` is int64 [N, 3]: epoch, slice, and the sample's index in the slice's file. Validation is in epoch 0.
    """

    arrays: Arrays
    keys: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, chosen: slice | npt.NDArray[np.bool_]) -> Samples:
        """Return some of the samples."""
        return Samples({name: array[chosen] for name, array in self.arrays.items()}, self.keys[chosen])


@dataclass(frozen=True, slots=True)
class SliceInfo:
    """One file of a prepared dataset, as its manifest lists it."""

    index: int
    file: str
    sha256: str
    samples: int
    split: str = "train"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Samples ``start … stop - 1`` of a slice, in that epoch's order."""

    epoch: int
    slice: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: elements ``offset … offset + size - 1`` of a group of a fragment.

    `dtype` is the tensor's own, by its torch name without the prefix (``bfloat16``); the group's is at least float32.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fragment: int
    group: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's trained parameters and its buffers as flat arrays, the same on every machine.

    Groups are named ``parameters/float32``, ``buffers/float32``, ``buffers/int64``: parameters take outer steps, float
    buffers are averaged, integer buffers taken from one worker. A tied tensor stands once, under its first name.
    """

    entries: tuple[Entry, ...]
    tied: tuple[tuple[str, str], ...] = ()
    fragments: int = 1

    def groups(self, fragment: int) -> dict[str, int]:
        """Sizes of a fragment's groups, in elements."""
        sizes: dict[str, int] = {}
        for entry in (one for one in self.entries if one.fragment == fragment):
            sizes[entry.group] = max(sizes.get(entry.group, 0), entry.offset + entry.size)
        return sizes

    def bytes(self, *fragments: int) -> int:
        """Size of these fragments, or of all, in bytes."""
        groups = (group for one in fragments or range(self.fragments) for group in self.groups(one).items())
        return sum(size * np.dtype(name.split("/")[1]).itemsize for name, size in groups)

    def sha256(self) -> str:
        """Fingerprint by which two processes know that they mean the same model."""
        return hashlib.sha256(repr((self.entries, self.tied, self.fragments)).encode()).hexdigest()


def window(spans: Iterable[Span], start: int, stop: int) -> tuple[Span, ...]:
    """Samples ``start … stop - 1`` of the spans taken together."""
    parts: list[Span] = []
    for span in spans:
        first, last = max(start, 0), min(stop, span.samples)
        if first < last:
            parts.append(replace(span, start=span.start + first, stop=span.start + last))
        start, stop = start - span.samples, stop - span.samples
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Source:
    """Who speaks: a worker's number, and its incarnation, which grows with every (re)start under that number."""

    run: str
    worker: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one worker does in one round: first evaluate, then train on the spans, then hand over its delta.

    A later version of a round's plan has the same spans at its start. `ahead` is what the next round begins with, for
    while this one's result is on its way. `progress`: where in the schedule its samples begin and end, in rounds.
    """

    round: int
    version: int
    spans: tuple[Span, ...]
    batch_size: int
    evaluate: tuple[Span, ...] = ()
    keep: frozenset[int] = frozenset()
    final: bool = False
    """No more training: evaluate, then end."""
    restores: bool = False
    """Training waits for the inner state of the worker's predecessor, which is on its way."""
    ahead: tuple[Span, ...] = ()
    progress: tuple[float, float] | None = None

    @property
    def samples(self) -> int:
        """Samples to train on in this round."""
        return sum(span.samples for span in self.spans)

    @property
    def batches(self) -> int:
        """Batches to train on in this round; the last one may be short."""
        return -(-self.samples // self.batch_size)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a worker says; `round` is the round that it is in."""

    source: Source
    round: int


@dataclass(frozen=True, slots=True)
class Alive(Event):
    """The process runs: said about once a second where there is nothing else to say. Renews the lease."""


@dataclass(frozen=True, slots=True)
class Ready(Event):
    """The model is built: weights and plans are welcome."""

    layout: str
    device: str
    parameters: int


@dataclass(frozen=True, slots=True)
class Merged(Event):
    """The round's global weights are in the live parameters.

    The first one of an incarnation has their sha256, by which it proves what it has; `waited_s` was waited for them.
    """

    merge_s: float
    theta_sha256: str | None = None
    waited_s: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """Sums over the validation samples that this worker was given."""

    loss_sum: float
    count: int
    correct: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Report(Event):
    """Progress since the last report of this round.

    `tokens` leaves padding out, and is None for data without tokens. `scored` counts the positions that losses are
    means over, `loss_sum` is over these. `seconds` is the time of `timed_batches`, a round's first one excepted.
    """

    batches: int
    samples: int
    tokens: int | None
    scored: int
    loss_sum: float
    seconds: float
    timed_batches: int
    data_wait_s: float
    learning_rate: float
    gradient_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Delta(Event):
    """A round's result; the next `fragments` items of the stream are its payloads, one a fragment, in order.

    With `inner_state` one more item follows: the optimizer's state after the round, from which a successor goes on.
    `tokens` and `scored` are those of `Report`; `loss` is the mean over `scored`. `train_s` is from first batch to
    last; `quality` the payloads' relative error, and cosine to what they encode.
    """

    spans: tuple[Span, ...]
    samples: int
    tokens: int | None
    scored: int
    batches: int
    loss: float | None
    fragments: int
    payload_bytes: int
    train_s: float
    data_wait_s: float
    inner_state: bool = False
    quality: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Leaving(Event):
    """The worker was told that its machine goes away: it hands over what it has done in this round, and ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class Left(Event):
    """The last word of a worker that was leaving; its delta, if it had one, came before."""


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The worker can't go on, and nothing that another worker could do would help."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Contribution:
    """A delta that went into a round, as the server saw it, with its L2 norm over all fragments that it has."""

    worker: int
    incarnation: int
    samples: int
    norm: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """A delta that did not go into a round, and why."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the server did with a round's deltas; the L2 norm of the change of θ, and its bytes if that is sent down."""

    round: int
    accepted: tuple[Contribution, ...]
    rejected: tuple[Rejection, ...]
    update_norm: float
    coded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """One outer round in the commit log, the only truth about a run.

    `cursors` maps a slice to its samples used in `epoch`, the oldest epoch that isn't complete; `ahead` holds the same
    for newer epochs that have begun. Hashes are sha256 of the snapshot files, as `sha256sum` prints them.
    """

    round: int
    parent_sha256: str | None
    theta_sha256: str
    outer_sha256: str
    deltas: tuple[Contribution, ...]
    spans: tuple[tuple[int, tuple[Span, ...]], ...]
    cursors: dict[int, int]
    epoch: int
    ahead: dict[int, dict[int, int]]
    rejected: tuple[Rejection, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """What came of writing a round down: its record, and if something could not be written yet, what and why."""

    commit: Commit
    problem: str | None = None
