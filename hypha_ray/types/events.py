"""Events that a worker streams to the scheduler, the figures in them, and the work that signs of life name.

Figures are sums, which add up over micro-batches, reports and workers. A mean is made where a record is written.

Work is named so that one which ends every worker is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.types.data import Flat, Span, record
from hypha_ray.types.rounds import PromptsOfResponder, Source, WeightsVersion

Sums = dict[str, tuple[float, float]]
"""A figure's name to its sum and its weight, of which the figure is the quotient."""
CHOSEN = "reward_chosen"
"""Name of the mean reward of preferred answers."""
REJECTED = "reward_rejected"
"""Name of the mean reward of answers that others were preferred to, or that are undesirable."""
MARGIN = "margin"
"""Name of the difference of both."""


def added(parts: Iterable[Sums]) -> Sums:
    """Sums and weights of all parts together; a figure that a part lacks has no weight there."""
    totals: Sums = {}
    for part in parts:
        for name, (value, weight) in part.items():
            total, total_weight = totals.get(name, (0.0, 0.0))
            totals[name] = total + value, total_weight + weight
    return totals


def means(sums: Sums) -> dict[str, float]:
    """Each sum divided by its weight, and the margin of rewards; a figure without weight is left out."""
    figures: dict[str, float] = {}
    for name, (total, weight) in sums.items():
        if weight:
            figures[name] = total / weight
    if CHOSEN in figures and REJECTED in figures:
        figures[MARGIN] = figures[CHOSEN] - figures[REJECTED]
    return figures


@record(frozen=True, slots=True)
class Event:
    """Message of a worker."""

    source: Source


@record(frozen=True, slots=True)
class RoundEvent(Event):
    """Message about the round that a worker is in."""

    round: int


@record(frozen=True, slots=True)
class Alive(Event):
    """Sign of life, about once a second if there is nothing else to send. Renews the lease."""

    work: str = ""
    """Function and prompt, or samples, that the worker is at; empty if that isn't known."""
    limited: bool = False
    """Whether this work has a limit of time, so that it ends by itself."""
    machine: str = ""
    """Name of the worker's machine; empty if that isn't known."""


@record(frozen=True, slots=True)
class Ready(Event):
    """The model is built: the worker awaits weights and plans."""

    layout: str
    device: str
    parameters: int
    batch_size: int | None = None
    """Largest batch that fits into its lease; None if that wasn't tried."""
    settings: Mapping[str, str | bool] = field(default_factory=dict)
    """Settings that its model is computed with; empty if a trainer outside of Ray computes it."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reasons of those settings that were chosen automatically."""

    @property
    def machine(self) -> dict[str, Any]:
        """Device, batch size if it was tried, and settings with their reasons, as fields of a record."""
        fields: dict[str, Any] = {"device": self.device}
        if self.batch_size is not None:
            fields["batch_size"] = self.batch_size
        if self.settings:
            fields["settings"] = self.settings
        if self.reasons:
            fields["reasons"] = self.reasons
        return fields


@record(frozen=True, slots=True)
class Merged(Event):
    """Global weights are in the live parameters.

    The first message of an incarnation has their sha256 as proof; `waited_s` is the time that it waited for them.
    """

    version: WeightsVersion
    theta_sha256: str | None = None
    waited_s: float | None = None

    @property
    def round(self) -> int:
        """Number that the round beginning with these weights has for the worker."""
        return self.version


@record(frozen=True, slots=True)
class Evaluated(RoundEvent):
    """Figures of the validation samples that this worker was given, by the names of records, and its time for them."""

    sums: Sums
    seconds: float

    @property
    def has_weight(self) -> bool:
        """Whether there is a figure with a weight."""
        return any(weight for _, weight in self.sums.values())


@record(frozen=True, slots=True)
class Report(RoundEvent):
    """Progress since the last report of this round.

    `tokens` leaves padding out, and is None for data without tokens. `scored` counts the positions that losses are
    means over, `loss_sum` is over these. `seconds` is the time of `timed_batches`, a round's first one excepted.
    `sums` are further figures.
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
    sums: Sums = field(default_factory=dict)


@record(frozen=True, slots=True)
class Damaged(RoundEvent):
    """Samples without a finite loss and gradient, as pairs of a slice and an index in its file.

    They were left out of the training; `whole`: and so was the rest of their batch.
    """

    samples: tuple[tuple[int, int], ...]
    whole: bool


@record(frozen=True, slots=True)
class RolloutReport(RoundEvent):
    """A few of the round's responses with their rewards, as records to be shown."""

    responses: tuple[Mapping[str, Any], ...]


@record(frozen=True, slots=True)
class ModelWorkersRevived(RoundEvent):
    """Model workers of an island that died and were replaced, by their numbers."""

    model_workers: tuple[int, ...]


@record(frozen=True, slots=True)
class WorkerWarned(RoundEvent):
    """Lines for the user about what failed beside a worker's training, which goes on."""

    lines: tuple[str, ...]
    disabled: tuple[str, ...] = ()
    """Names of settings that were chosen automatically and failed, and are disabled since."""


@record(frozen=True, slots=True)
class Delta(RoundEvent):
    """A round's result; the next `fragments` items of the stream are its payloads, one a fragment, in order.

    With `inner_state` one more item follows: the optimizer's state after the round, from which a successor goes on.
    `tokens`, `scored` and `sums` are those of `Report`; `loss` is the mean over `scored`. `train_s` is from first batch
    to last; `quality` the payloads' relative error, and cosine to what they encode.
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
    sums: Sums = field(default_factory=dict)
    responders: tuple[PromptsOfResponder, ...] = ()
    """Prompts by the process that responded to them, if others than the worker may."""
    token_operations: float | None = None
    """Operations of training on a token; None if they aren't known."""
    peak_operations: float | None = None
    """Operations in a second that the worker's GPUs are made for; None if that isn't known."""
    peak_memory_bytes: int | None = None
    """Most memory of tensors on the worker's GPU since its last result; None without a GPU."""


@record(frozen=True, slots=True)
class Leaving(Event):
    """The worker was told that its machine goes away: it hands over what it has done in this round, and ends."""

    reason: str


@record(frozen=True, slots=True)
class Left(Event):
    """Last message of a worker that was leaving; its delta, if it had one, came before."""


@record(frozen=True, slots=True)
class Failed(Event):
    """The worker can't go on, and nothing that another worker could do would help."""

    error: Exception


@dataclass(frozen=True, slots=True)
class WorkState:
    """Work of a process."""

    text: str = ""
    """Function and prompt, or samples; empty if nothing is known."""
    limited: bool = False
    """Whether a limit of time ends the work."""


_current = WorkState()


def current_work() -> WorkState:
    """Return what the process does now; safe in any thread."""
    return _current


@contextmanager
def working(text: str = "", limited: bool = False) -> Iterator[Callable[[str], None]]:
    """Name the work of the block; after it the process does its previous work.

    Returns:
        Function that changes the text.

    """
    global _current  # noqa: PLW0603  One inner loop works in a process.

    def change(text: str) -> None:
        global _current  # noqa: PLW0603
        _current = WorkState(text, limited)

    previous_work = _current
    change(text)
    try:
        yield change
    finally:
        _current = previous_work


@dataclass(frozen=True, slots=True)
class HandOver:
    """Result of a round."""

    delta: Delta
    parts: Sequence[Flat]
    """Payloads of the delta, and the inner state if the delta has one."""
