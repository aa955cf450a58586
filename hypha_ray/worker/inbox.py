"""Orders of a worker until its inner loop takes them: plan, weights of a round, predecessor's inner state."""

from __future__ import annotations

from typing import NamedTuple

from hypha_ray.types import Flat, FragmentUpdate, Layout, Plan
from hypha_ray.worker.difference_decoder import DifferenceDecoder
from hypha_ray.worker.interrupts import Interruptible


class Arrived(NamedTuple):
    """The weights that a round starts with, by fragment; all of them, or just those that are new."""

    round: int
    whole: bool
    fragments: dict[int, Flat]


class Inbox(Interruptible):
    """Written by the control thread, read by the inner loop. Every order may arrive twice, and in any order.

    Args:
        downward: codec of differences between weights.

    """

    def __init__(self, downward: str = "fp32") -> None:
        super().__init__()
        self._held = DifferenceDecoder(downward)
        self._plan: Plan | None = None
        self._weights: dict[int, dict[int, tuple[FragmentUpdate, Flat]]] = {}
        self._state: Flat | None = None
        self._layout: Layout | None = None
        self._restored = False
        self.round = -1
        """Number of the weights that the inner loop has taken last."""

    def assign(self, plan: Plan) -> bool:
        """Put a plan down, unless a newer one is there; returns whether it is the newest."""
        with self._changed:
            if self._plan is not None and _order(plan) <= _order(self._plan):
                return False
            self._plan = plan
            self._changed.notify_all()
            return True

    def merge(self, piece: FragmentUpdate, weights: Flat) -> None:
        """Put a piece of the weights down with which a round starts."""
        with self._changed:
            if piece.round > self.round:
                self._weights.setdefault(piece.round, {})[piece.fragment] = piece, weights
                self._changed.notify_all()

    def restore(self, state: Flat) -> None:
        """Put the inner state down with which the worker's predecessor ended."""
        with self._changed:
            if not self._restored:
                self._state = state
                self._changed.notify_all()

    def describe(self, layout: Layout) -> None:
        """Put down where the tensors lie in the flat arrays, for a reader that doesn't build the model."""
        with self._changed:
            self._layout = layout
            self._changed.notify_all()

    def layout(self) -> Layout:
        """Layout of the tensors; waits for it."""
        with self._changed:
            self._wait(lambda: self._layout is not None)
            assert self._layout is not None
            return self._layout

    def plan(self, round_number: int) -> Plan:
        """The newest plan, which is for this round or a later one; waits for it."""
        with self._changed:
            self._wait(lambda: self._plan is not None and self._plan.round >= round_number)
            assert self._plan is not None
            return self._plan

    def correction(self, idle: Plan) -> Plan | None:
        """The newer version of a plan that gives nothing to do; None once a later round's is there. Waits."""
        with self._changed:
            self._wait(lambda: self._plan is not None and _order(self._plan) > _order(idle))
            assert self._plan is not None
            return self._plan if self._plan.round == idle.round else None

    def weights(self, due: int | None = None) -> Arrived:
        """The weights that are to be taken next, of those of which all pieces are there; waits for such.

        A worker without the previous weights takes whole ones; so it does if others are older than these.

        Args:
            due: number up to which they are wanted, newer ones only where there are no others; None: the newest.

        """
        with self._changed:
            self._wait(lambda: self._following(due) is not None)
            number = self._following(due)
            assert number is not None
            self.round = number
            pieces = self._weights[self.round]
            self._weights = {number: later for number, later in self._weights.items() if number > self.round}
        flats = {fragment: self._held.take(piece, flat) for fragment, (piece, flat) in pieces.items()}
        return Arrived(self.round, all(piece.whole for piece, _ in pieces.values()), flats)

    def state(self) -> Flat | None:
        """The predecessor's inner state, which is given out once, then None; waits for it."""
        with self._changed:
            self._wait(lambda: self._restored or self._state is not None)
            state, self._state, self._restored = self._state, None, True
            return state

    def _following(self, due: int | None) -> int | None:
        """Number of the weights that are to be taken next, if they are there."""
        pieces = {number: [piece for piece, _ in those.values()] for number, those in self._weights.items()}
        complete = {number: those for number, those in pieces.items() if len(those) == those[0].of}
        whole = [number for number, those in complete.items() if those[0].whole]
        wanted = [number for number in whole if due is None or number <= due]
        if not wanted and self.round + 1 in complete:
            return self.round + 1
        return max(wanted or whole, default=None)


def _order(plan: Plan) -> tuple[int, int]:
    """By which the newer one of two plans is known."""
    return plan.round, plan.version
