"""Where a worker's orders lie until its inner loop takes them: plan, weights of a round, predecessor's inner state."""

from __future__ import annotations

from hypha_ray.types import Flat, Layout, Plan
from hypha_ray.worker.held import Held
from hypha_ray.worker.waits import Waits


class Desk(Waits):
    """Written by the control thread, read by the inner loop. Every order may arrive twice, and in any order.

    Args:
        fragments: of the weights.
        downward: codec of differences between weights.

    """

    def __init__(self, fragments: int, downward: str = "fp32") -> None:
        super().__init__()
        self._fragments, self._held = fragments, Held(downward)
        self._plan: Plan | None = None
        self._weights: dict[int, dict[int, tuple[Flat, bool]]] = {}
        self._state: Flat | None = None
        self._layout: Layout | None = None
        self._restored = False
        self.round = -1
        """The round that the inner loop is in."""

    def assign(self, plan: Plan) -> bool:
        """Put a plan down, unless a newer one is there; returns whether it is the newest."""
        with self._changed:
            if self._plan is not None and (plan.round, plan.version) <= (self._plan.round, self._plan.version):
                return False
            self._plan = plan
            self._changed.notify_all()
            return True

    def merge(self, round_number: int, fragment: int, weights: Flat, difference: bool = False) -> None:
        """Put the weights down with which a round starts, or their coded difference to those of the round before."""
        with self._changed:
            if round_number > self.round:
                self._weights.setdefault(round_number, {})[fragment] = weights, difference
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
        """Where the tensors lie; waits for it."""
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
        """The newer version of a plan that gives nothing to do; None once a later round's weights are there. Waits."""
        with self._changed:
            self._wait(lambda: bool(self._whole()) or self._corrects(idle))
            return None if self._whole() else self._plan

    def weights(self) -> tuple[int, dict[int, Flat]]:
        """The newest round whose weights are whole, and these by fragment; waits for one that wasn't merged yet."""
        with self._changed:
            self._wait(lambda: bool(self._whole()))
            self.round = max(self._whole())
            parts = self._weights[self.round]
            self._weights = {number: later for number, later in self._weights.items() if number > self.round}
        return self.round, {fragment: self._held.take(fragment, *part) for fragment, part in parts.items()}

    def state(self) -> Flat | None:
        """The predecessor's inner state, which is given out once, then None; waits for it."""
        with self._changed:
            self._wait(lambda: self._restored or self._state is not None)
            state, self._state, self._restored = self._state, None, True
            return state

    def _corrects(self, plan: Plan) -> bool:
        newest = self._plan
        return newest is not None and newest.round == plan.round and newest.version > plan.version

    def _whole(self) -> list[int]:
        return [number for number, parts in self._weights.items() if len(parts) == self._fragments]
