"""Records of a round: a worker's plan, updates of fragments, the server's verdict, and the commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NewType

from hypha_ray.types.data import Span, record, samples_of

WeightsVersion = NewType("WeightsVersion", int)
"""Version of the global weights: round n begins with version n. Without a barrier it counts reductions."""
STARTS_PER_ATTEMPT = 10_000
"""Incarnations per attempt, so that those of a later scheduler are greater."""


def attempt_of(incarnation: int) -> int:
    """Number of the scheduler, over the whole run, that started an incarnation."""
    return incarnation // STARTS_PER_ATTEMPT


@record(frozen=True, slots=True)
class Source:
    """Sender of an event: a worker's number, and its incarnation, which grows with every start under that number."""

    run: str
    worker: int
    incarnation: int

    @property
    def attempt(self) -> int:
        """Number of the scheduler that started it, over the whole run."""
        return attempt_of(self.incarnation)


@record(frozen=True, slots=True)
class Plan:
    """Work of one worker in one round: evaluate, train on the spans, then hand over the delta.

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
    rejections: int = 0
    """Deltas of this incarnation that were rejected; after each one its inner state begins anew."""

    @property
    def samples(self) -> int:
        """Samples to train on in this round."""
        return samples_of(self.spans)

    @property
    def batches(self) -> int:
        """Batches to train on in this round; the last one may be short."""
        return -(-self.samples // self.batch_size)


@dataclass(frozen=True, slots=True)
class FragmentUpdate:
    """One fragment of new global weights.

    Args:
        version: version of the weights.
        fragment: index of the fragment.
        of: number of fragments that a worker is sent of this version.
        whole: whether they are all fragments, for a worker that drops its own weights; otherwise the changed ones.
        difference: whether the payload is the coded difference to the fragment's weights before.

    """

    version: WeightsVersion
    fragment: int
    of: int = 1
    whole: bool = True
    difference: bool = False


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """Progress of a round of an asynchronous run when deltas are reduced.

    `unit` is the weight that a whole round is expected to have; `weight` is what the `arrivals` so far have of it.
    """

    round: int
    size: int
    """Deltas that make the round."""
    unit: int
    arrivals: int = 0
    weight: int = 0
    norms: tuple[float, ...] = ()
    """Norms of recently accepted deltas, by which others are judged."""

    def closes(self, deltas: int) -> bool:
        """Whether this number of further deltas completes the round."""
        return self.arrivals + deltas >= self.size


@record(frozen=True, slots=True)
class Contribution:
    """A delta that went into a round, as the server saw it, with its L2 norm over all fragments that it has."""

    worker: int
    incarnation: int
    samples: int
    norm: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """A delta that did not go into a round, and why; no worker is to blame for one that got lost."""

    worker: int
    reason: str
    blamed: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a round at the server; the L2 norm of the change of θ, and its bytes if that is sent down."""

    round: int
    accepted: tuple[Contribution, ...]
    rejected: tuple[Rejection, ...]
    update_norm: float
    coded_bytes: int = 0


class PromptsOfResponder(NamedTuple):
    """Prompts that one process of a run has responded to."""

    responder: str
    """Name of the process: a generator, or the worker itself."""
    prompts: tuple[tuple[int, int, int], ...]
    """Epoch, slice and index of each prompt."""


def by_responder(parts: Iterable[PromptsOfResponder]) -> tuple[PromptsOfResponder, ...]:
    """Join the prompts of each responder, in the order of their names; prompts are in rising order."""
    prompts: dict[str, list[tuple[int, int, int]]] = {}
    for part in parts:
        prompts.setdefault(part.responder, []).extend(part.prompts)
    return tuple(PromptsOfResponder(name, tuple(sorted(prompts[name]))) for name in sorted(prompts))


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """A round from the scheduler: all of a `Commit` except the hashes, and the scheduler's own state."""

    round: int
    verdict: Verdict
    spans: tuple[tuple[int, tuple[Span, ...]], ...]
    """Samples of each accepted delta, by worker."""
    cursors: Mapping[int, int]
    """Samples used of each slice in `epoch`."""
    epoch: int
    """The oldest epoch that isn't complete."""
    ahead: Mapping[int, Mapping[int, int]]
    """Samples used of each slice in newer epochs."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """State that a later scheduler needs beside the log: totals, statistics, strikes; plain JSON, in the snapshot."""
    responders: tuple[PromptsOfResponder, ...] = ()
    """Prompts of the accepted deltas by the process that responded to them; empty if only workers may."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One outer round in the commit log, the only truth about a run.

    `cursors` maps a slice to its samples used in `epoch`, the oldest incomplete epoch; `ahead` holds the same
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
    responders: tuple[PromptsOfResponder, ...] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """Result of writing a round: its record, and the reason of anything that could not be written yet.

    `written` tells whether the record is on the disk, and with it all before it.
    """

    commit: Commit
    problem: str | None = None
    written: bool = True
