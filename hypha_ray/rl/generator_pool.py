"""Pool of generators, as a worker sees it: it sends pieces of batches, and gets each answered once.

    worker     send batch k + 1   train on batch k ─────►   collect batch k + 1   …
    thread     piece ─► generator that is idle, answer ─► the next piece, whatever the worker does meanwhile

    queued ──assign──► under way ──answer──► answered        the first answer counts
       ▲                   │
       └── lost, overdue ──┘

Pieces are divided and numbered before any is sent. So the answers are the same, from any generator or the worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from hypha_ray.rl.dataflow.requests import Reply, Sample
from hypha_ray.types import Sums

A = TypeVar("A")
"""Answer to a piece."""
PieceKey: TypeAlias = tuple[int, int]
"""Number of the batch, and of the piece within it."""
Reference: TypeAlias = Hashable
"""Reference to an answer that may not have come yet."""
LOOK_S = 1.0
"""Seconds between two looks for generators that have come, and for answers that are overdue."""
_WAIT_S = 0.1
"""Longest wait in seconds for an answer, until the thread looks for pieces that were queued meanwhile."""


class Rollout(NamedTuple):
    """Responses to a piece, with their rewards."""

    sample: Sample
    """Responses, their log-probabilities and rewards."""
    sums: Sums
    """Figures of them."""
    facts: Mapping[str, Any]
    """Single values."""
    problems: tuple[str, ...]
    """Lines for the user."""
    seconds: float
    """Time of responding and rewarding."""

    def reply(self, kept_reply: Reply) -> Reply:
        """Return the reply by which a worker keeps the samples, with the figures of their making."""
        return replace(kept_reply, sums=self.sums, facts=self.facts, problems=self.problems, seconds=self.seconds)


def rollout_by(role: Any, prompts: Sample, arguments: Mapping[str, Any]) -> Rollout:
    """Respond to prompts by a role that responds and rewards."""
    began_at = perf_counter()
    outcome = role.generate(prompts, arguments)
    seconds = perf_counter() - began_at
    return Rollout(outcome.sample, outcome.sums, outcome.facts, outcome.problems, seconds)


def generator_name(generator: int) -> str:
    """Return the name of a generator in the namespace of its run."""
    return f"generator-{generator}"


class SharedWeights(NamedTuple):
    """Weights that pieces are responded with."""

    version: int
    """Number of batches that the worker had trained on."""
    handle: Any
    """Handle by which generators get them; None: generators need none."""


@dataclass(frozen=True)
class Piece:
    """Prompts of a batch that are responded to at once."""

    batch: int
    """Number of the batch; batches that are needed sooner have lower numbers."""
    index: int
    """Number of the piece in its batch."""
    prompts: Sample
    """Prompts, with the keys of the dataset."""
    weights: SharedWeights
    """Weights to respond with."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the operation."""

    @property
    def key(self) -> PieceKey:
        """Order of pieces."""
        return self.batch, self.index


class Responded(NamedTuple, Generic[A]):
    """Piece with its answer."""

    piece: Piece
    """The piece."""
    responder: str
    """Name of the generator, or of the worker itself, that gave the answer."""
    answer: A
    """The answer."""
    is_shared: bool = True
    """Whether a generator gave the answer, and not the worker itself."""


@dataclass
class _UnderWay:
    """Piece that a generator was asked to respond to."""

    piece: Piece
    asked_at: float
    """Time of the request in seconds."""
    is_overdue: bool = False
    """Whether the piece was queued again, because no answer had come."""


def pieces_of(
    batch: int, prompts: Sample, piece_prompts: int, weights: SharedWeights, arguments: Mapping[str, Any]
) -> Iterator[Piece]:
    """Divide a batch into pieces of so many prompts; the last one has the rest."""
    for index, start in enumerate(range(0, len(prompts.ids), piece_prompts)):
        part = prompts.take(prompts.ids[start : start + piece_prompts])
        yield Piece(batch, index, part, weights, arguments)


class Dispatch(Generic[A]):
    """Decisions about the pieces of one worker. It sends nothing itself, and isn't safe for threads.

    Args:
        deadline_s: seconds after which a piece without an answer goes to another generator.

    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._queue: dict[PieceKey, Piece] = {}
        self._under_way: dict[str, _UnderWay] = {}
        self._missing: dict[int, set[int]] = {}
        """Numbers of the pieces without an answer, by batch."""
        self._answers: dict[int, dict[int, Responded[A]]] = {}
        """Answers by batch and piece."""
        self._reachable: dict[str, None] = {}
        """Names of the generators, in the order in which they came."""

    @property
    def usable(self) -> tuple[str, ...]:
        """Names of the generators that would be asked: reachable, and not silent beyond the deadline."""
        silent_generators = {name for name, request in self._under_way.items() if request.is_overdue}
        return tuple(name for name in self._reachable if name not in silent_generators)

    def join(self, name: str) -> None:
        """Add a generator that can be asked."""
        self._reachable[name] = None

    def lose(self, name: str) -> None:
        """Remove a generator that has died; its piece is queued again."""
        self._reachable.pop(name, None)
        request = self._under_way.pop(name, None)
        if request is not None and not request.is_overdue:
            self._queue_again(request.piece)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Queue all pieces of a batch."""
        for piece in pieces:
            self._queue[piece.key] = piece
            self._missing.setdefault(piece.batch, set()).add(piece.index)
            self._answers.setdefault(piece.batch, {})

    def drop(self, batch: int) -> None:
        """Forget a batch. A generator that responds to a piece of it stays busy until it answers."""
        self._missing.pop(batch, None)
        self._answers.pop(batch, None)
        for key in [key for key in self._queue if key[0] == batch]:
            del self._queue[key]

    def assign(self, now: float) -> list[tuple[str, Piece]]:
        """Return which idle generator is to be asked for which piece; they count as asked."""
        assigned: list[tuple[str, Piece]] = []
        for name in self._reachable:
            if name in self._under_way or not self._shareable:
                continue
            piece = self._queue.pop(min(self._shareable))
            self._under_way[name] = _UnderWay(piece, now)
            assigned.append((name, piece))
        return assigned

    def take(self, batch: int) -> Piece | None:
        """Take a batch's next queued piece for the worker itself; None if the queue is empty."""
        keys = [key for key in self._queue if key[0] == batch]
        return self._queue.pop(min(keys)) if keys else None

    def answer(self, name: str, piece: Piece, answer: A, is_shared: bool = True) -> None:
        """Record an answer, unless another one was first, or the batch is forgotten."""
        request = self._under_way.get(name)
        if request is not None and request.piece is piece:
            del self._under_way[name]
        missing = self._missing.get(piece.batch, set())
        if piece.index not in missing:
            return
        missing.remove(piece.index)
        self._queue.pop(piece.key, None)
        self._answers[piece.batch][piece.index] = Responded(piece, name, answer, is_shared)

    def expire(self, now: float) -> tuple[str, ...]:
        """Queue pieces again whose generators haven't answered in time; return the names of these."""
        late_generators: list[str] = []
        for name, request in self._under_way.items():
            if not request.is_overdue and now - request.asked_at > self._deadline_s:
                request.is_overdue = True
                self._queue_again(request.piece)
                late_generators.append(name)
        return tuple(late_generators)

    def answers(self, batch: int) -> list[Responded[A]] | None:
        """Return the answers to a batch in the order of its pieces; None until all are there."""
        if self._missing[batch]:
            return None
        answers = self._answers[batch]
        return [answers[index] for index in sorted(answers)]

    @property
    def _shareable(self) -> list[PieceKey]:
        """Keys of the queued pieces whose weights generators can get."""
        return [key for key, piece in self._queue.items() if piece.weights.handle is not None]

    def _queue_again(self, piece: Piece) -> None:
        if piece.index in self._missing.get(piece.batch, ()):
            self._queue[piece.key] = piece


class GeneratorLostError(Exception):
    """A generator has died, or can't respond; its text is the reason."""


class Arrival(NamedTuple, Generic[A]):
    """Answer that has come, or the error in its place."""

    reference: Reference
    """Reference that the request returned."""
    answer: A | Exception
    """The answer; a `GeneratorLostError` if another generator may give it, otherwise an error that ends the run."""


class Generators(Protocol[A]):
    """Way to the generators of a run."""

    def look(self) -> Sequence[str]:
        """Return the names of the generators that can be asked, since the last look or again after they were lost."""

    def ask(self, name: str, piece: Piece) -> Reference:
        """Ask a generator to respond to a piece; return a reference to the answer."""

    def wait(self, references: Sequence[Reference], timeout_s: float) -> Sequence[Arrival[A]]:
        """Wait until one of the answers has come, or the time is over; return those that have come."""


class GeneratorPool(Generic[A]):
    """Generators that respond to the pieces of one worker.

    Args:
        generators: way to them.
        responder: name of the worker, for pieces that it responds to itself.
        deadline_s: seconds after which a piece without an answer goes to another generator.
        start_s: longest start of a generator in seconds, before which their absence is no problem.

    """

    def __init__(self, generators: Generators[A], responder: str, deadline_s: float, start_s: float) -> None:
        self._generators = generators
        self._responder = responder
        self._dispatch = Dispatch[A](deadline_s)
        self._changed = threading.Condition()
        """Guards everything below, and the dispatch."""
        self._sent: dict[Reference, tuple[str, Piece]] = {}
        self._error: Exception | None = None
        self._problems: list[str] = []
        self._absence_counts_from = time.monotonic() + start_s
        self._is_closed = False
        self._looked_at = -LOOK_S
        self._thread = threading.Thread(target=self._serve, name="generators", daemon=True)
        self._thread.start()

    def send(self, pieces: Sequence[Piece]) -> None:
        """Queue the pieces of a batch."""
        with self._changed:
            self._dispatch.add(pieces)
            self._changed.notify_all()

    def drop(self, batch: int) -> None:
        """Forget a batch."""
        with self._changed:
            self._dispatch.drop(batch)

    @property
    def is_reached(self) -> bool:
        """Whether a generator would be asked now."""
        with self._changed:
            return bool(self._dispatch.usable)

    def collect(self, batch: int, respond: Callable[[Piece], A], helps: bool) -> list[Responded[A]]:
        """Wait for the answers to a batch, in the order of its pieces, and forget it.

        Args:
            batch: number of the batch.
            respond: function by which the worker responds to a piece itself.
            helps: whether the worker does so while pieces are queued; otherwise only if it reaches no generator.

        Raises:
            HyphaError: whatever a generator's role, or `respond`, raises.

        """
        while True:
            with self._changed:
                piece: Piece | None = None
                while piece is None:
                    if self._error is not None:
                        raise self._error
                    answers = self._dispatch.answers(batch)
                    if answers is not None:
                        self._dispatch.drop(batch)
                        return answers
                    is_alone = not self._dispatch.usable
                    if helps or is_alone:
                        piece = self._dispatch.take(batch)
                    if piece is None:
                        self._changed.wait(LOOK_S)
                if is_alone:
                    self._tell_absence()
            answer = respond(piece)
            with self._changed:
                self._dispatch.answer(self._responder, piece, answer, is_shared=False)

    def take_problems(self) -> tuple[str, ...]:
        """Return the lines for the user since the last call."""
        with self._changed:
            problems = tuple(self._problems)
            self._problems.clear()
            return problems

    def close(self) -> None:
        """Ask no generator any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _tell_absence(self) -> None:
        """Say that no generator is there, unless they may still be on their way."""
        if time.monotonic() >= self._absence_counts_from:
            self._problems.append(f"{self._responder} reaches no generator, and responds itself meanwhile")

    def _serve(self) -> None:
        """Ask generators, and take their answers, until the pool is closed."""
        try:
            while self._serve_once():
                pass
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _serve_once(self) -> bool:
        """Ask idle generators, and wait for answers for a moment; False when the pool is closed."""
        self._look()
        with self._changed:
            if self._is_closed:
                return False
            now = time.monotonic()
            for name in self._dispatch.expire(now):
                self._problems.append(f"{name} is silent; others respond in its place")
                self._changed.notify_all()
            for name, piece in self._dispatch.assign(now):
                self._sent[self._generators.ask(name, piece)] = name, piece
            references = list(self._sent)
            if not references:
                self._changed.wait(LOOK_S)
                return True
        arrivals = self._generators.wait(references, _WAIT_S)
        with self._changed:
            for arrival in arrivals:
                self._receive(arrival)
            self._changed.notify_all()
        return True

    def _look(self) -> None:
        """Look for generators that have come, not more often than each `LOOK_S` seconds."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        names = self._generators.look()
        with self._changed:
            for name in names:
                self._dispatch.join(name)

    def _receive(self, arrival: Arrival[A]) -> None:
        name, piece = self._sent.pop(arrival.reference)
        match arrival.answer:
            case GeneratorLostError() as reason:
                self._dispatch.lose(name)
                self._problems.append(f"{name} is lost, and others respond in its place: {reason}")
                self._absence_counts_from = time.monotonic()
            case Exception() as error:
                self._error = error
            case answer:
                self._dispatch.answer(name, piece, answer)
