"""Samples of an island, and requests of a master to model workers: hooks on them, replies, and the order of sending.

Samples are sequences of unequal length, packed one after the other under each key. A sample belongs to a prompt and is
known by its id. A key such as ``responses`` holds one or more sequences of each prompt, for example its group of
responses. Nothing is padded, and arrays keep their dtype.

Requests are plain values. One request is one call of a model worker: the hooks before it, the operation, and the hooks
after it, with nothing in between. So hooks that need several workers at once can't be
interleaved with another call's.

    at once           fetch, spec, model_config, clear_data_cache     no hooks
    after a flush     initialize                                      no hooks
                      generate, inference, train_step                 hooks before and after

A flush sends the waiting requests one after the other without a pause, small groups first. A worker runs its calls in
the order in which one sender sends them. So any two workers see their common requests in one order, and collectives
inside them can't wait for each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from hypha_ray.errors import ClusterError
from hypha_ray.types import Sums

Packed: TypeAlias = npt.NDArray[Any]
"""Array [sum of the lengths of all sequences, ...]."""
Lengths: TypeAlias = tuple[tuple[int, ...], ...]
"""Lengths of the sequences of each id, in the order of the ids."""
Name: TypeAlias = Literal[
    "fetch", "spec", "model_config", "clear_data_cache", "initialize", "generate", "inference", "train_step"
]
AT_ONCE: Final = frozenset({"fetch", "spec", "model_config", "clear_data_cache"})
"""Requests that a worker answers while others wait: they are short and need no other worker."""
COMPUTE: Final = frozenset({"generate", "inference", "train_step"})
"""Requests that may have hooks."""
R = TypeVar("R", bound=Hashable)
"""Reference to a reply, which may not have come yet."""


@dataclass(frozen=True)
class Meta:
    """Description of samples without their arrays; a master sees nothing else of them.

    Raises:
        ValueError: an id is there twice, or a key hasn't lengths for each id.

    """

    ids: tuple[str, ...]
    """Ids of the prompts, each once."""
    lengths: Mapping[str, Lengths]
    """Lengths of the sequences under each key."""

    def __post_init__(self) -> None:
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("ids of samples must differ")
        for key, lengths in self.lengths.items():
            if len(lengths) != len(self.ids):
                raise ValueError(f"{key} has lengths for {len(lengths)} ids of {len(self.ids)}")

    def tokens(self, key: str) -> tuple[int, ...]:
        """Return the total length of each id's sequences under a key."""
        return tuple(map(sum, self.lengths[key]))

    def flat(self, key: str) -> list[int]:
        """Return the length of each sequence under a key."""
        return list(chain.from_iterable(self.lengths[key]))


@dataclass(frozen=True)
class Sample:
    """Samples with their arrays.

    Raises:
        ValueError: the arrays don't have the keys or the lengths that `meta` says.

    """

    meta: Meta
    """Ids and lengths."""
    data: Mapping[str, Packed]
    """Packed array of each key of `meta`."""

    def __post_init__(self) -> None:
        if self.data.keys() != self.meta.lengths.keys():
            raise ValueError(f"keys of the arrays, {sorted(self.data)}, aren't those of the lengths")
        for key, array in self.data.items():
            total = sum(self.meta.tokens(key))
            if len(array) != total:
                raise ValueError(f"{key} has {len(array)} rows, its lengths add up to {total}")

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the prompts."""
        return self.meta.ids

    def select(self, keys: Iterable[str]) -> Sample:
        """Return the same ids with some of the keys."""
        lengths: dict[str, Lengths] = {}
        data: dict[str, Packed] = {}
        for key in keys:
            lengths[key] = self.meta.lengths[key]
            data[key] = self.data[key]
        return Sample(Meta(self.ids, lengths), data)

    def take(self, ids: Sequence[str]) -> Sample:
        """Return some of the ids, in the order given."""
        if tuple(ids) == self.ids:
            return self
        row_of = {name: row for row, name in enumerate(self.ids)}
        rows = [row_of[name] for name in ids]
        lengths: dict[str, Lengths] = {}
        data: dict[str, Packed] = {}
        for key, array in self.data.items():
            lengths_of_key = self.meta.lengths[key]
            bounds = list(accumulate(self.meta.tokens(key), initial=0))
            parts = [array[bounds[row] : bounds[row + 1]] for row in rows]
            lengths[key] = tuple(lengths_of_key[row] for row in rows)
            data[key] = np.concatenate([array[:0], *parts])
        return Sample(Meta(tuple(ids), lengths), data)

    def update(self, sample: Sample) -> Sample:
        """Return the samples with the keys of another one, whose ids are the same in any order."""
        if set(sample.ids) != set(self.ids):
            raise ValueError("samples can only be given keys of the same ids")
        added = sample.take(self.ids)
        lengths = {**self.meta.lengths, **added.meta.lengths}
        return Sample(Meta(self.ids, lengths), {**self.data, **added.data})


def gather(samples: Sequence[Sample]) -> Sample:
    """Join samples of different ids that have the same keys, in their order."""
    if len(samples) == 1:
        return samples[0]
    ids = tuple(chain.from_iterable(sample.ids for sample in samples))
    lengths: dict[str, Lengths] = {}
    data: dict[str, Packed] = {}
    for key in samples[0].data:
        lengths[key] = tuple(chain.from_iterable(sample.meta.lengths[key] for sample in samples))
        data[key] = np.concatenate([sample.data[key] for sample in samples])
    return Sample(Meta(ids, lengths), data)


class Shard(NamedTuple):
    """Name of the samples that one request made at one worker."""

    worker: int
    """Number of the model worker that holds them."""
    request: int
    """Number of the request that made them."""


@dataclass(frozen=True)
class Transfer:
    """Hook before a call: take in the shards that come with the request."""

    shards: tuple[Shard, ...]
    """Shards of other workers, in the order of the request's arguments."""


@dataclass(frozen=True)
class Reallocate:
    """Hook before or after a call: give a role's weights to another one."""

    source: str
    """Role whose weights are given."""
    target: str
    """Role that becomes `eta` times the source plus `1 - eta` times its own weights."""
    eta: float = 1.0
    """Share of the source's weights in the new ones, above 0 and at most 1."""


@dataclass(frozen=True)
class Offload:
    """Hook after a call: move a role's weights out of the device's memory, until the role is needed again."""

    role: str
    """Role whose weights are moved."""


@dataclass(frozen=True)
class Evaluate:
    """Hook after a training step: have a role respond to prompts, and add its figures to the reply."""

    role: str
    """Role that responds and rewards."""
    prompts: Sample
    """Prompts, with the keys of the dataset."""
    round: int
    """Round of the run."""


@dataclass(frozen=True)
class Save:
    """Hook after a training step: write a role's model to a folder that `from_pretrained` loads."""

    role: str
    """Role whose model is written."""
    folder: str
    """Folder on the machine of the model worker."""


Hook: TypeAlias = Transfer | Reallocate | Offload | Evaluate | Save


@dataclass(frozen=True)
class ModelRequest:
    """One request to one model worker.

    Raises:
        ValueError: a hook isn't allowed in its place.

    """

    number: int
    """Number of the request, the same for all workers that it goes to; later ones have higher numbers."""
    name: Name
    """Name of the operation."""
    worker: int
    """Number of the model worker."""
    role: str | None = None
    """Role that the request is for; None: the whole worker."""
    ids: tuple[str, ...] = ()
    """Ids that the operation is for, in their order."""
    takes: tuple[str, ...] = ()
    """Keys that the operation takes."""
    before: tuple[Hook, ...] = ()
    """Hooks before the operation; a transfer comes first."""
    after: tuple[Hook, ...] = ()
    """Hooks after the operation."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values that the operation needs beside its samples."""

    def __post_init__(self) -> None:
        if (self.before or self.after) and self.name not in COMPUTE:
            raise ValueError(f"{self.name} takes no hooks")
        for index, hook in enumerate(self.before):
            late_transfer = isinstance(hook, Transfer) and index > 0
            if late_transfer or isinstance(hook, Offload | Evaluate | Save):
                hook_name = type(hook).__name__
                raise ValueError(f"{hook_name} can't stand at place {index} before {self.name}")
        for hook in self.after:
            needs_training = isinstance(hook, Evaluate | Save)
            if isinstance(hook, Transfer) or (needs_training and self.name != "train_step"):
                hook_name = type(hook).__name__
                raise ValueError(f"{hook_name} can't stand after {self.name}")

    @property
    def at_once(self) -> bool:
        """Whether the request is sent without waiting for a flush."""
        return self.name in AT_ONCE


@dataclass(frozen=True)
class Reply:
    """Answer of one worker; it has no arrays."""

    worker: int
    """Number of the worker."""
    request: int
    """Number of the request."""
    meta: Meta | None = None
    """Description of the samples that were made; None if none were."""
    sums: Sums = field(default_factory=dict)
    """Figures of the operation."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Single values, such as the norm of a gradient or those of `spec` and `model_config`."""
    problems: tuple[str, ...] = ()
    """Lines for the user about failures beside the operation, which itself succeeded."""
    seconds: float = 0.0
    """Time of the operation, without its hooks."""


class Transport(Protocol[R]):
    """Way to the model workers: calls in this process, or calls of Ray actors."""

    def send(self, request: ModelRequest) -> R:
        """Send a request, and with it the shards of its transfer; return a reference to the reply."""

    def receive(self, replies: Sequence[R], deadline_s: float) -> tuple[R, Reply]:
        """Wait for the first of some replies.

        Raises:
            ClusterError: none came within the deadline, or a worker died.

        """


class WorkerLostError(ClusterError):
    """A model worker has died; nothing was trained on the batch that was under way."""


@dataclass
class Pending:
    """Requests of one number, until all of their workers have answered."""

    requests: tuple[ModelRequest, ...]
    """One request for each worker."""
    replies: list[Reply] = field(default_factory=list)
    """Replies that have come."""

    @property
    def done(self) -> bool:
        """Whether all workers have answered."""
        return len(self.replies) == len(self.requests)


class RequestQueue(Generic[R]):
    """Requests of one master: those that wait for a flush, and those on their way.

    Args:
        transport: way to the model workers.
        deadline_s: longest time in seconds to wait for a reply.

    """

    def __init__(self, transport: Transport[R], deadline_s: float) -> None:
        self._transport = transport
        self._deadline_s = deadline_s
        self._waiting: list[Pending] = []
        self._sent: dict[R, Pending] = {}

    def request(self, *requests: ModelRequest) -> Pending:
        """Send the requests of one number if they need no flush; otherwise let them wait for the next one."""
        pending = Pending(requests)
        if requests[0].at_once:
            self._send(pending)
        else:
            self._waiting.append(pending)
        return pending

    def flush(self) -> None:
        """Send all waiting requests, those to few workers first, and otherwise in the order in which they were made."""
        waiting_requests = self._waiting
        self._waiting = []
        for pending in sorted(waiting_requests, key=lambda pending: len(pending.requests)):
            self._send(pending)

    def _send(self, pending: Pending) -> None:
        for request in pending.requests:
            reference = self._transport.send(request)
            self._sent[reference] = pending

    def wait(self) -> Pending:
        """Wait until one more request is answered by all of its workers, and return it.

        Raises:
            ClusterError: no reply came within the deadline, or a worker died.

        """
        while True:
            reference, reply = self._transport.receive(list(self._sent), self._deadline_s)
            pending = self._sent.pop(reference)
            pending.replies.append(reply)
            if pending.done:
                return pending
