"""A simulated worker to which more can happen, and whose figures say what it trained from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypha_ray.scheduler import messages as c
from hypha_ray.simulation.worker import SimulatedWorker, Surroundings
from hypha_ray.types import Alive, Delta, Evaluated, Event, Plan, Report, Source


class WalkWorker(SimulatedWorker):
    """Can be frozen and stuck.

    The tokens of its delta are the round whose training its inner state is of, and a loss is the version of the
    weights, so that an auditor sees both.
    """

    def __init__(self, source: Source, world: Surroundings) -> None:
        super().__init__(source, world)
        self.stuck = False
        self.cut = False
        """Its stream is broken."""
        self.frozen: list[Callable[[], None]] | None = None
        """While it is stopped: what it does as soon as it goes on."""
        self._sent: int | None = None
        """Round of the inner state that was sent to it."""
        self._inner: int | None = None

    def freeze(self) -> None:
        self.frozen = [] if self.frozen is None else self.frozen

    def thaw(self) -> None:
        missed, self.frozen = self.frozen or [], None
        for action in missed:
            action()
        self.go()

    def go(self) -> None:
        if self.frozen is None and not self.stuck:
            super().go()

    def _end_if_busy(self, token: object, then: Callable[[], None]) -> None:
        if self.frozen is not None:
            self.frozen.append(lambda: self._end_if_busy(token, then))
        elif not self.stuck:
            super()._end_if_busy(token, then)

    def _send(self, event: Event) -> None:
        if isinstance(event, Report):
            event = replace(event, loss_sum=3.0)  # As golden traces have it.
        if self.frozen is None or not isinstance(event, Alive):
            super()._send(event)

    def order(self, command: c.Order, inner: int | None = None) -> None:
        """Take an order; with that to restore an inner state comes the round that it is of."""
        if isinstance(command, c.RestoreInnerState):
            self._sent = inner
        super().order(command)

    def _restore(self) -> None:
        super()._restore()
        self._inner = self._sent

    def _evaluation(self, samples: int) -> Evaluated:
        sums = {"val_loss": (float(self._version * samples), float(samples))}
        return replace(super()._evaluation(samples), sums=sums)

    def _delta(self, plan: Plan) -> Delta:
        tokens = -1 if self._inner is None else self._inner
        self._inner = self.round
        return replace(super()._delta(plan), tokens=tokens, payload_bytes=8, train_s=1.0)
