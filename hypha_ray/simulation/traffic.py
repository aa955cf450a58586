"""Traffic of a run: slices and weights to workers, payloads of deltas to the head, and what each of them waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from hypha_ray.simulation.links import Links
from hypha_ray.simulation.machines import Machine
from hypha_ray.simulation.scenario import Scenario
from hypha_ray.simulation.world import Action, VirtualClock
from hypha_ray.types import Source

DeltaKey: TypeAlias = tuple[int, int, int]
"""Number and incarnation of a worker, and the round of its delta."""


def delta_key(source: Source, round: int) -> DeltaKey:
    """Key of a worker's delta of a round; numbers are hashed faster than a source is."""
    return source.worker, source.incarnation, round


@dataclass(frozen=True, slots=True)
class Payload:
    """Payload of a worker's delta of a round."""

    key: DeltaKey
    """Worker and round."""
    size: int
    """Bytes of all fragments."""


class Traffic:
    """Transfers between machines and the head.

    Args:
        scenario: gives machines, links and latencies.
        clock: clock of all actions.
        settled: called with worker and round of payloads that have arrived or are lost.

    """

    def __init__(self, scenario: Scenario, clock: VirtualClock, settled: Callable[[Sequence[DeltaKey]], None]) -> None:
        self.links = Links(scenario, clock)
        self._clock = clock
        self._settled = settled
        self._latency_s = _latencies(scenario)
        self._on_way: dict[DeltaKey, Machine] = {}
        """Machine of each payload that is on its way."""
        self._payloads_of: dict[int, dict[DeltaKey, None]] = {}
        """Payloads on their way from each machine, in order."""
        self._lost: set[DeltaKey] = set()
        self._slices_on_way: Counter[int] = Counter()
        """Slices on their way, by worker."""
        self._after_slices: dict[int, list[Action]] = {}
        """Actions that wait for slices, by worker."""
        self.bytes_up = self.bytes_down = self.bytes_slices = 0

    def delay_s(self, machine: Machine) -> float:
        """Seconds of a message to or from a machine, which waits for the end of a partition."""
        latency_s = self._latency_s[machine.number]
        cut_s = machine.cut_until - self._clock.now
        return cut_s + latency_s if cut_s > 0.0 else latency_s

    # ── to workers ────────────────────────────────────────────────────────────────────────────────────────────────

    def send_slice(self, worker: int, machine: Machine, size: int) -> None:
        """Send a slice of so many bytes."""
        self._slices_on_way[worker] += 1
        self.links.send(machine.number, "down", size, partial(self._slice_arrived, worker, size))

    def after_slices(self, worker: int, action: Action) -> None:
        """Do something once all slices that were sent to a worker are there."""
        if self._slices_on_way.get(worker):
            self._after_slices.setdefault(worker, []).append(action)
        else:
            action()

    def _slice_arrived(self, worker: int, size: int) -> None:
        self.bytes_slices += size
        self._slices_on_way[worker] -= 1
        if not self._slices_on_way[worker]:
            for action in self._after_slices.pop(worker, []):
                action()

    def send_weights(self, machine: Machine, size: int, then: Action) -> None:
        """Send weights of so many bytes."""
        self.links.send(machine.number, "down", size, partial(self._weights_arrived, size, then))

    def _weights_arrived(self, size: int, then: Action) -> None:
        self.bytes_down += size
        then()

    # ── to the head ───────────────────────────────────────────────────────────────────────────────────────────────

    def upload(self, payload: Payload, machine: Machine) -> None:
        """Send a payload, which the head asks for when it has heard of it."""
        self._on_way[payload.key] = machine
        self._payloads_of.setdefault(machine.number, {})[payload.key] = None
        request_s = 2 * self.delay_s(machine)
        self._clock.later(request_s, partial(self._begin_upload, payload, machine))

    def _begin_upload(self, payload: Payload, machine: Machine) -> None:
        if payload.key not in self._on_way:
            return
        latency_s = self._latency_s[machine.number]
        send_rest = partial(self._clock.later, latency_s, partial(self._payload_arrived, payload))
        self.links.send(machine.number, "up", payload.size, send_rest)

    def _payload_arrived(self, payload: Payload) -> None:
        self.bytes_up += payload.size
        machine = self._on_way.pop(payload.key, None)
        if machine is not None:
            self._payloads_of[machine.number].pop(payload.key)
            self._settled([payload.key])

    def is_on_way(self, key: DeltaKey) -> bool:
        """Whether a payload is on its way."""
        return key in self._on_way

    def is_uploading(self, source: Source, machine: Machine) -> bool:
        """Whether any payload of the machine's worker is on its way."""
        sender = (source.worker, source.incarnation)
        return any(key[:2] == sender for key in self._payloads_of.get(machine.number, ()))

    def is_lost(self, key: DeltaKey) -> bool:
        """Whether a payload was lost with its machine."""
        return key in self._lost

    # ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def end_worker(self, worker: int, machine: Machine) -> None:
        """Give up what is on its way to a worker."""
        self.links.cancel(machine.number, "down")
        self._slices_on_way.pop(worker, None)
        self._after_slices.pop(worker, None)

    def end_machine(self, machine: Machine) -> None:
        """Give up what is on its way from and to a machine; reductions go on without its payloads."""
        self.links.cancel(machine.number, "down")
        self.links.cancel(machine.number, "up")
        lost = self._payloads_of.pop(machine.number, {})
        for key in lost:
            del self._on_way[key]
            self._lost.add(key)
        if lost:
            self._settled(list(lost))


def _latencies(scenario: Scenario) -> list[float]:
    """Seconds of a message between each machine and the head."""
    by_site = {site.name: site.latency_ms / 1000 for site in scenario.sites}
    latencies: list[float] = []
    for group in scenario.machines:
        site = group.site or scenario.head.site
        latency_s = 0.0 if site is None else by_site[site]
        latencies += [latency_s] * group.count
    return latencies
