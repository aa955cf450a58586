"""Pieces of batches on their way to generators: which one is asked next, and what is done if it doesn't answer.

    queued ──assign──► under way ──answer──► answered        the first answer counts
       ▲                   │
       └── lost, overdue ──┘

Pieces are divided and numbered before anything is asked. So the answers are the same, whoever gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from hypha_ray.rl.dataflow.sample import Sample

A = TypeVar("A")
"""Answer to a piece."""
PieceKey: TypeAlias = tuple[int, int]
"""Number of the batch, and of the piece within it."""


class SharedWeights(NamedTuple):
    """Weights that pieces are responded with."""

    version: int
    """Number of batches that the worker had trained on."""
    handle: Any
    """Handle by which generators get them; None if none is to get them."""


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
    batch: int, prompts: Sample, size: int, weights: SharedWeights, arguments: Mapping[str, Any]
) -> Iterator[Piece]:
    """Divide a batch into pieces of `size` prompts; the last one has the rest."""
    for index, start in enumerate(range(0, len(prompts.ids), size)):
        part = prompts.take(prompts.ids[start : start + size])
        yield Piece(batch, index, part, weights, arguments)


class Dispatch(Generic[A]):
    """Decisions about the pieces of one worker. It asks nobody itself, and isn't safe for threads.

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
        silent = {name for name, request in self._under_way.items() if request.is_overdue}
        return tuple(name for name in self._reachable if name not in silent)

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
        """Take a batch's next queued piece for the worker itself; None if none is queued."""
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
        late: list[str] = []
        for name, request in self._under_way.items():
            if not request.is_overdue and now - request.asked_at > self._deadline_s:
                request.is_overdue = True
                self._queue_again(request.piece)
                late.append(name)
        return tuple(late)

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
