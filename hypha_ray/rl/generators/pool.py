"""Pool of generators, as a worker sees it: it sends pieces of batches, and gets each answered once.

worker     send batch k + 1   train on batch k ─────►   collect batch k + 1   …
thread     piece ─► generator that is idle, answer ─► the next piece, whatever the worker does meanwhile
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from hypha_ray.rl.generators.dispatch import Dispatch, Piece, Responded

A = TypeVar("A")
"""Answer to a piece."""
Reference: TypeAlias = Hashable
"""Reference to an answer that may not have come yet."""
LOOK_S = 1.0
"""Seconds between two looks for generators that have come, and for answers that are overdue."""
_WAIT_S = 0.1
"""Longest wait in seconds for an answer, until the thread looks for pieces that were queued meanwhile."""


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
