"""A simulated worker whose figures are those of its machine, and the traffic between machines and the head.

Batches up to the next report or the end of the plan are one action on the clock. An order that changes the plan first
counts those that have ended, so that results are as if each batch were an action.

Traffic is slices and weights to workers, and payloads of deltas to the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from hypha_ray.scheduler import messages as c
from hypha_ray.simulation.links import Links
from hypha_ray.simulation.scenario import Machine, Scenario
from hypha_ray.simulation.worker import SimulatedWorker, Surroundings
from hypha_ray.simulation.world import PULSES, Action, VirtualClock
from hypha_ray.types import Alive, Event, Left, Merged, Plan, Source

SPARED_PULSES = PULSES - 2
"""Signs of life after one that are counted together with the next one, before the end of the lease."""
LATENESS = 0.125
"""Part of the time between two signs of life after which one is counted."""


Batch: TypeAlias = tuple[float, int, float]
"""A batch that will have been trained on: time of its end, samples and seconds."""
DeltaKey: TypeAlias = tuple[int, int, int]
"""Number and incarnation of a worker, and the round of its delta."""


class Accounts(Surroundings, Protocol):
    """World that counts a worker's time, and knows the sizes of payloads."""

    clock: VirtualClock
    """Clock of all actions."""

    def payload_bytes(self, round: int) -> int:
        """Bytes of a worker's delta of a round."""

    def renew_lease(self, worker: FleetWorker, sent_at: float) -> bool:
        """Renew a worker's lease, which is all that a sign of life does; False if its machine's link was cut then."""


class FleetWorker(SimulatedWorker):
    """Counts its time in batches and at the barrier, in seconds.

    Args:
        source: number and incarnation.
        world: gives times and takes events.
        machine: its machine.

    """

    __slots__ = (
        "_accounts",
        "_batch_began_at",
        "_batches",
        "_clock",
        "_delta_s",
        "_idle_since",
        "_pulse_at",
        "_unreported_s",
        "batches_s",
        "began_at",
        "machine",
        "sign_of_life",
        "waited_s",
    )

    def __init__(self, source: Source, world: Accounts, machine: Machine) -> None:
        super().__init__(source, world)
        self._accounts = world
        self._clock = world.clock
        self.machine = machine
        self.sign_of_life = Alive(source)
        self.began_at = world.clock.now
        self.batches_s = 0.0
        """Time of batches that have ended."""
        self.waited_s = 0.0
        """Time at the barrier."""
        self._batch_began_at: float | None = None
        """Beginning of the batches that are one action; None between them."""
        self._batches: list[Batch] = []
        """Batches that are one action, or the one that is under way."""
        self._idle_since: float | None = None
        """Time at which it began to wait for new weights; None while it doesn't."""
        self._unreported_s = 0.0
        """Time of batches since the last report."""
        self._delta_s = 0.0
        """Time of batches since the last delta."""
        self._pulse_at = self.began_at
        """Time of the next sign of life that the scheduler hasn't got."""

    def time_in_batches(self) -> float:
        """Time of all batches, with the part of the present one that has passed."""
        if self._batch_began_at is None:
            return self.batches_s
        return self.batches_s + self._clock.now - self._batch_began_at

    def stop(self) -> None:
        """End at once, in the middle of a batch if there is one."""
        if self.alive:
            self.catch_up_pulses()
        self.batches_s = self.time_in_batches()
        self._batch_began_at = None
        self.alive = False

    def go(self) -> None:
        """Do all that takes no time; from now on it waits unless it is busy."""
        was_alive = self.alive
        super().go()
        if was_alive and not self.alive:
            self.catch_up_pulses()
        is_waiting = self._busy is None and not self._merged and self.alive
        if not is_waiting:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._clock.now

    def order(self, command: c.Order) -> None:
        """Accept an order."""
        if isinstance(command, c.Assign | c.Drain):
            self._count_ended_batches()
        super().order(command)

    def leave(self, reason: str) -> None:
        """End the batch, deliver what is done, and leave."""
        self._count_ended_batches()
        super().leave(reason)

    def _train(self, plan: Plan) -> None:
        """Train until a report is due or the plan is done."""
        assert self._longest is not None
        target = plan.samples
        if target > self._longest.samples:
            self._longest = plan
        now = ends_at = self._clock.now
        samples = self._samples
        seconds = self._seconds
        self._batches = []
        is_report_due = False
        while samples < target and not is_report_due:
            batch_samples = min(plan.batch_size, target - samples)
            batch_s = self.machine.batch_s(ends_at)
            ends_at += batch_s
            samples += batch_samples
            seconds += batch_s
            self._batches.append((ends_at, batch_samples, batch_s))
            batches = (samples - self._reported) / batch_samples
            is_report_due = self._accounts.report_due(seconds, batches, (target - samples) / batch_samples)
        self._spend_batch(ends_at - now, self._end_batches)

    def _end_batches(self) -> None:
        _, samples, seconds = self._batches.pop()
        self._count(self._batches)
        self._batches = []
        self._trained(samples, seconds)

    def _count_ended_batches(self) -> None:
        """Count the batches that have ended by now; the one under way becomes an action of its own."""
        if len(self._batches) < 2 or not self.alive:
            return
        now = self._clock.now
        ended_batches = [batch for batch in self._batches if batch[0] <= now]
        if len(ended_batches) == len(self._batches):
            return
        under_way = self._batches[len(ended_batches)]
        self._batches = [under_way]
        if ended_batches:
            self._count(ended_batches)
            self._count_time(ended_batches[-1][0])
        self._spend(under_way[0] - now, self._end_batches)

    def _count(self, batches: list[Batch]) -> None:
        for _, samples, seconds in batches:
            self._samples += samples
            self._seconds += seconds

    def _count_time(self, now: float) -> None:
        """Count the time in batches until now, where another one begins."""
        assert self._batch_began_at is not None
        seconds = now - self._batch_began_at
        self.batches_s += seconds
        self._unreported_s += seconds
        self._delta_s += seconds
        self._batch_began_at = now

    def _pulse(self) -> None:
        """Give the signs of life that are due; they are no actions of their own as long as the lease surely lasts."""
        if self.alive:
            spared_pulses = SPARED_PULSES if self.catch_up_pulses() else 0
            next_s = (spared_pulses + LATENESS) * self._accounts.pulse_s()
            self._accounts.later(self._pulse_at - self._clock.now + next_s, self._pulse)

    def catch_up_pulses(self) -> bool:
        """Have the scheduler get all signs of life up to now; False if the last one was lost."""
        now = self._clock.now
        last_at: float | None = None
        while self._pulse_at <= now:
            last_at = self._pulse_at
            self._pulse_at += self._accounts.pulse_s()
        return last_at is not None and self._accounts.renew_lease(self, last_at)

    def _spend_batch(self, seconds: float, on_end: Callable[[], None]) -> None:
        self._batch_began_at = self._clock.now
        super()._spend_batch(seconds, on_end)

    def _end_if_busy(self, token: object, on_end: Callable[[], None]) -> None:
        if self._busy is token and self.alive and self._batch_began_at is not None:
            self._count_time(self._clock.now)
            self._batch_began_at = None
        super()._end_if_busy(token, on_end)

    def _send(self, event: Event) -> None:
        match event:
            case Left():
                self.stop()
            case Merged() if self._idle_since is not None:
                waited_s = self._clock.now - self._idle_since
                self._idle_since = self._clock.now
                if event.theta_sha256 is None:  # The first weights are waited for at no barrier.
                    self.waited_s += waited_s
                    event = Merged(event.source, event.version, event.theta_sha256, waited_s)
        super()._send(event)

    def _reported_s(self, batches: int) -> float:
        """Seconds of all batches since the last report, as measured."""
        self.machine.skip_batch(self._clock.now)
        seconds = self._unreported_s
        self._unreported_s = 0.0
        return seconds

    def _delivered_s(self, batches: int) -> float:
        """Seconds of all batches since the last delta, as measured."""
        self.machine.skip_batch(self._clock.now)
        seconds = self._delta_s
        self._delta_s = 0.0
        return seconds

    def _payload_bytes(self) -> int:
        """Bytes of a delta of the round."""
        return self._accounts.payload_bytes(self.round)


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
        on_settled: called with worker and round of payloads that have arrived or are lost.

    """

    def __init__(
        self, scenario: Scenario, clock: VirtualClock, on_settled: Callable[[Sequence[DeltaKey]], None]
    ) -> None:
        self.links = Links(scenario, clock)
        self._clock = clock
        self._settled = on_settled
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

    def send_slice(self, worker: int, machine: Machine, size_bytes: int) -> None:
        """Send a slice of so many bytes."""
        self._slices_on_way[worker] += 1
        self.links.send(machine.number, "down", size_bytes, partial(self._slice_arrived, worker, size_bytes))

    def after_slices(self, worker: int, action: Action) -> None:
        """Do something once all slices that were sent to a worker are there."""
        if self._slices_on_way.get(worker):
            self._after_slices.setdefault(worker, []).append(action)
        else:
            action()

    def _slice_arrived(self, worker: int, size_bytes: int) -> None:
        self.bytes_slices += size_bytes
        self._slices_on_way[worker] -= 1
        if not self._slices_on_way[worker]:
            for action in self._after_slices.pop(worker, []):
                action()

    def send_weights(self, machine: Machine, size_bytes: int, on_arrival: Action) -> None:
        """Send weights of so many bytes."""
        self.links.send(machine.number, "down", size_bytes, partial(self._weights_arrived, size_bytes, on_arrival))

    def _weights_arrived(self, size_bytes: int, on_arrival: Action) -> None:
        self.bytes_down += size_bytes
        on_arrival()

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
        lost_payloads = self._payloads_of.pop(machine.number, {})
        for key in lost_payloads:
            del self._on_way[key]
            self._lost.add(key)
        if lost_payloads:
            self._settled(list(lost_payloads))


def _latencies(scenario: Scenario) -> list[float]:
    """Seconds of a message between each machine and the head."""
    by_site = {site.name: site.latency_ms / 1000 for site in scenario.sites}
    latencies: list[float] = []
    for group in scenario.machines:
        site = group.site or scenario.head.site
        latency_s = 0.0 if site is None else by_site[site]
        latencies += [latency_s] * group.count
    return latencies
