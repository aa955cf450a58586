"""Orders of a worker until its inner loop takes them: plan, weights of a round, predecessor's inner state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hypha_ray.types import Flat, FragmentUpdate, Layout, Plan, WeightsVersion
from hypha_ray.worker.difference_decoder import DifferenceDecoder
from hypha_ray.worker.interrupts import Interruptible


class Arrived(NamedTuple):
    """New global weights by fragment: all of them, or the changed ones."""

    version: WeightsVersion
    whole: bool
    fragments: dict[int, Flat]


class Inbox(Interruptible):
    """Orders for the inner loop, written by the control thread. Each may arrive twice, and in any order.

    Args:
        downward: codec of differences between weights.
        options: the codec's own options.

    """

    def __init__(self, downward: str = "fp32", options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._held = DifferenceDecoder(downward, options)
        self._plan: Plan | None = None
        self._weights: dict[WeightsVersion, dict[int, tuple[FragmentUpdate, Flat]]] = {}
        self._state: Flat | None = None
        self._layout: Layout | None = None
        self._restored = False
        self.version: WeightsVersion | None = None
        """Version of the weights that the inner loop took last; None before the first."""

    def assign(self, plan: Plan) -> bool:
        """Store a plan, unless a newer one is there; returns whether it is the newest."""
        with self._changed:
            if self._plan is not None and _order(plan) <= _order(self._plan):
                return False
            self._plan = plan
            self._changed.notify_all()
            return True

    def merge(self, piece: FragmentUpdate, weights: Flat) -> None:
        """Store a fragment of new weights, unless the inner loop has them."""
        with self._changed:
            if self.lacks(piece.version):
                self._weights.setdefault(piece.version, {})[piece.fragment] = piece, weights
                self._changed.notify_all()

    def lacks(self, version: WeightsVersion) -> bool:
        """Whether the inner loop has taken only older weights, or none."""
        return self.version is None or self.version < version

    def restore(self, state: Flat) -> None:
        """Store the inner state with which the worker's predecessor ended."""
        with self._changed:
            if not self._restored:
                self._state = state
                self._changed.notify_all()

    def describe(self, layout: Layout) -> None:
        """Store the layout, for a reader that doesn't build the model."""
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

    def weights(self, due: WeightsVersion | None = None) -> Arrived:
        """The weights to take next, once all of their fragments are there.

        A worker without the previous weights takes whole ones, and so does one for which newer whole ones are there.

        Args:
            due: newest version that is wanted, unless there are only newer ones; None: the newest there is.

        """
        with self._changed:
            self._wait(lambda: self._following(due) is not None)
            version = self.version = self._following(due)
            assert version is not None
            pieces = self._weights[version]
            self._weights = {later: parts for later, parts in self._weights.items() if later > version}
        flats = {fragment: self._held.take(piece, flat) for fragment, (piece, flat) in pieces.items()}
        return Arrived(version, all(piece.whole for piece, _ in pieces.values()), flats)

    def state(self) -> Flat | None:
        """The predecessor's inner state, which is given out once, then None; waits for it."""
        with self._changed:
            self._wait(lambda: self._restored or self._state is not None)
            state = self._state
            self._state = None
            self._restored = True
            return state

    def _following(self, due: WeightsVersion | None) -> WeightsVersion | None:
        """Version of the weights to take next; None while they aren't there."""
        pieces = {version: [piece for piece, _ in those.values()] for version, those in self._weights.items()}
        complete = {version: those for version, those in pieces.items() if len(those) == those[0].of}
        whole = [version for version, those in complete.items() if those[0].whole]
        wanted = [version for version in whole if due is None or version <= due]
        following = None if self.version is None else WeightsVersion(self.version + 1)
        if not wanted and following in complete:
            return following
        return max(wanted or whole, default=None)


def _order(plan: Plan) -> tuple[int, int]:
    """By which the newer one of two plans is known."""
    return plan.round, plan.version
