"""Where a worker's orders lie until its inner loop takes them: the newest plan, and the weights of a round."""

from __future__ import annotations

from threading import Condition

from hypha_ray.types import Flat, Plan
from hypha_ray.worker.feeder import Closed


class Desk:
    """Written by the control thread, read by the inner loop. Every order may arrive twice, and in any order."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._changed = Condition()
        self._plan: Plan | None = None
        self._weights: dict[int, dict[int, Flat]] = {}
        self._merged = -1
        self._closed = False

    def assign(self, plan: Plan) -> bool:
        """Put a plan down, unless a newer one is there; returns whether it is the newest."""
        with self._changed:
            if self._plan is not None and (plan.round, plan.version) <= (self._plan.round, self._plan.version):
                return False
            self._plan = plan
            self._changed.notify_all()
            return True

    def merge(self, round_number: int, fragment: int, weights: Flat) -> None:
        """Put the weights down with which a round starts."""
        with self._changed:
            if round_number > self._merged:
                self._weights.setdefault(round_number, {})[fragment] = weights
                self._changed.notify_all()

    def close(self) -> None:
        """Let a waiting reader go: it gets `Closed`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def plan(self, round_number: int) -> Plan:
        """The newest plan, which is for this round or a later one; waits for it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (self._plan is not None and self._plan.round >= round_number)
            )
            if self._closed or self._plan is None:
                raise Closed
            return self._plan

    def weights(self) -> tuple[int, dict[int, Flat]]:
        """The newest round whose weights are whole, and these by fragment; waits for one that wasn't merged yet."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._whole())
            if self._closed:
                raise Closed
            self._merged = max(self._whole())
            weights = self._weights[self._merged]
            self._weights = {number: parts for number, parts in self._weights.items() if number > self._merged}
            return self._merged, weights

    def _whole(self) -> list[int]:
        return [number for number, parts in self._weights.items() if len(parts) == self._fragments]
