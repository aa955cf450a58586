"""World of a scenario: its machines, links, parameter servers and store, around the scheduler's core.

The payload of a delta is on its way while the core knows of the delta already; a reduction waits for all payloads. A
plan waits for its slices. A machine is leased from the order to hire until its worker ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypha_ray.exchange_schedule import fragments_of_round
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.barrier.round import LOST
from hypha_ray.scheduler.core import SchedulerCore, search_less_often
from hypha_ray.scheduler.planning.worker_plans import Sizes
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.simulation.fleet_worker import FleetWorker
from hypha_ray.simulation.links import Direction, Links
from hypha_ray.simulation.machines import Machine, MachinePool, machines_of
from hypha_ray.simulation.payload_sizes import WEIGHT_BYTES, encoded_bytes, fragment_sizes
from hypha_ray.simulation.scenario import Scenario
from hypha_ray.simulation.worker import SimulatedWorker
from hypha_ray.simulation.world import World
from hypha_ray.types import Contribution, Delta, Event, Left, Rejection, SliceInfo, Source, Verdict

SPARE_SLICES = 2
"""Slices for each worker beyond those of all samples: workers share no slice without need."""
NOISE_FIELDS = ("loss", "codec_error", "codec_cosine", "update_norm", "learning_rate", "tokens", "tokens_per_s")
"""Fields of a round's record that a simulation knows nothing of."""


class FleetWorld(World):
    """World of a scenario.

    Args:
        scenario: the scenario.

    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.job)
        self.scenario = scenario
        model = scenario.model
        self._fragments = fragment_sizes(model.parameters, self.job.sync.fragments)
        self.pool = MachinePool(machines_of(scenario))
        self.links = Links(scenario, self.clock)
        self._latency_s = _latencies(scenario)
        self._machine_of: dict[int, Machine] = {}
        """Machine that each worker's number has leased."""
        self._slices = _slices(scenario)
        self._uploading: Counter[tuple[Source, int]] = Counter()
        """Payloads on their way, by worker and round."""
        self._feeding: Counter[int] = Counter()
        """Slices on their way, by worker."""
        self._held_orders: dict[int, list[c.Order]] = {}
        """Plans that wait for slices, by worker."""
        self._reducing: c.Reduce | None = None
        """Reduction that waits for payloads; None without one."""
        self._lost_payloads: set[tuple[Source, int]] = set()
        self.bytes_up = self.bytes_down = self.bytes_slices = 0
        self.alive_s = self.batches_s = self.waited_s = 0.0
        """Times of workers that have ended."""
        self.committed_at: list[float] = []
        self.samples = 0
        """Committed samples."""
        self.events: Counter[str] = Counter()
        self.records: list[dict[str, Any]] = []
        self.on_round: Callable[[dict[str, Any]], None] | None = None
        """Called with the record of each round."""
        self.failure: Exception | None = None

    def open(self) -> None:
        """Start the run: the core hires a worker for each number, and the first weights are there."""
        search_less_often(self.job.num_workers)
        resume_point = ResumePoint()
        sizes = Sizes(max(1, self.job.worker.prefetch_mb * 1_000_000 // self.scenario.model.sample_bytes))
        core = SchedulerCore(self.job, self.scenario.name, self._slices, sizes, resume_point)
        parts = tuple(WEIGHT_BYTES * size for size in self._fragments)
        weights = c.Initialised(sum(parts), "theta", "layout", parts)
        free = sum(machine.is_free for machine in self.pool.machines)
        self.begin(core, resume_point, weights, 0.0, min(free, self.job.num_workers))

    def close(self) -> None:
        """End all workers and leases."""
        for number in list(self.workers):
            self.bury(number)
        for machine in self.pool.machines:
            machine.release(self.now)

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────

    def obey(self, command: c.Command) -> None:
        """Carry out a command; keep what results are made of."""
        match command:
            case c.Hire(source=source):
                self._hire_on_machine(source, command)
                return
            case c.LogEvent(fields=fields):
                self.events[fields["kind"]] += 1
            case c.LogMetric(fields=fields) if fields["kind"] == "round":
                record = {name: value for name, value in fields.items() if name not in NOISE_FIELDS}
                self.records.append(record)
                if self.on_round is not None:
                    self.on_round(record)
            case c.Finish(error=error):
                self.failure = error
            case _:
                pass
        super().obey(command)

    def _hire_on_machine(self, source: Source, command: c.Hire) -> None:
        machine = self.pool.lease(source.worker, self.now)
        if machine is None:
            self.answer(0.0, c.PlacementFailed(source, "no machine is free"))
            return
        self._machine_of[source.worker] = machine
        super().obey(command)

    def has_room(self, source: Source) -> bool:
        """Whether the machine that the worker was started on is still there."""
        return source.worker in self._machine_of

    def new_worker(self, source: Source) -> SimulatedWorker:
        """Make a worker on its machine."""
        machine = self._machine_of[source.worker]
        if machine.began_at is None:
            machine.began_at = self.now
        return FleetWorker(source, self, machine.number)

    def bury(self, number: int) -> None:
        """End a worker and its lease, and all transfers of its machine."""
        worker = self.workers.get(number)
        if isinstance(worker, FleetWorker):
            worker.stop()
            self.alive_s += self.now - worker.began_at
            self.batches_s += worker.batches_s
            self.waited_s += worker.waited_s
            self._forget_transfers(worker)
        super().bury(number)
        machine = self._machine_of.pop(number, None)
        if machine is not None:
            machine.release(self.now)

    def _forget_transfers(self, worker: FleetWorker) -> None:
        """Give up what is on its way from and to a worker; reductions go on without its payloads."""
        self.links.cancel(worker.machine)
        number = worker.source.worker
        self._feeding.pop(number, None)
        self._held_orders.pop(number, None)
        lost = [key for key in self._uploading if key[0] == worker.source]
        for key in lost:
            del self._uploading[key]
            self._lost_payloads.add(key)
        self._reduce_if_complete()

    # ── server and store ──────────────────────────────────────────────────────────────────────────────────────────

    def reduce(self, command: c.Reduce) -> None:
        """Merge deltas once all payloads have arrived."""
        self._reducing = command
        self._reduce_if_complete()

    def _reduce_if_complete(self) -> None:
        command = self._reducing
        if command is None or any(key in self._uploading for key in _deltas_of(command)):
            return
        self._reducing = None
        self.answer(self._reduce_s(command), c.Reduced(self.verdict(command)))

    def _reduce_s(self, command: c.Reduce) -> float:
        """Seconds of a reduction; fragments have servers of their own, which work at once."""
        rate = self.scenario.head.reduce_gb_s
        if rate is None:
            return 0.0
        largest = max(self._fragments[fragment] for fragment in fragments_of_round(self.job, command.round))
        return len(command.sources) * largest * WEIGHT_BYTES / (rate * 1e9)

    def verdict(self, command: c.Reduce) -> Verdict:
        """Accept all deltas whose payloads are there."""
        accepted: list[Contribution] = []
        rejected: list[Rejection] = []
        for key, weight in zip(_deltas_of(command), command.weights, strict=True):
            source, _ = key
            if key in self._lost_payloads:
                self._lost_payloads.discard(key)
                rejected.append(Rejection(source.worker, LOST, blamed=False))
            else:
                accepted.append(Contribution(source.worker, source.incarnation, weight, 1.0))
        coded_bytes = self._coded_bytes(command.round)
        return Verdict(command.round, tuple(accepted), tuple(rejected), 0.0, coded_bytes)

    def persist(self, command: c.Persist) -> None:
        """Count the committed samples, and write the round."""
        self.committed_at.append(self.now)
        for _, spans in command.spans:
            self.samples += sum(span.samples for span in spans)
        super().persist(command)

    def commit_s(self, round: int) -> float:
        """Seconds of a snapshot: 8 bytes a parameter, for weights and momentum."""
        rate = self.scenario.head.commit_mb_s
        rounds = self.job.rounds.update_rounds
        is_due = (round + 1) % self.job.checkpoint.every_rounds == 0 or round in (0, rounds - 1)
        if rate is None or not is_due:
            return 0.0
        return 2 * WEIGHT_BYTES * self.scenario.model.parameters / (rate * 1e6)

    # ── sizes ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def payload_bytes(self, round: int) -> int:
        """Bytes of a worker's delta of a round."""
        codec = self.job.sync.codec
        return sum(encoded_bytes(codec, self._fragments[part]) for part in fragments_of_round(self.job, round))

    def _coded_bytes(self, round: int) -> int:
        """Bytes of a round's new weights for a worker with those before; 0 if they are sent uncoded."""
        codec = self.job.sync.downward_codec
        if codec == "fp32":
            return 0
        return sum(encoded_bytes(codec, self._fragments[part]) for part in fragments_of_round(self.job, round))

    def _weights_bytes(self, command: c.Merge) -> int:
        if command.whole or command.version == 0 or not self.job.sync.traits.has_barrier:
            return WEIGHT_BYTES * self.scenario.model.parameters
        round_before = command.version - 1
        coded = self._coded_bytes(round_before)
        if coded:
            return coded
        return sum(WEIGHT_BYTES * self._fragments[part] for part in fragments_of_round(self.job, round_before))

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────

    def delay_s(self, number: int) -> float:
        """Seconds of a message to or from a worker, which waits for the end of a partition."""
        machine = self._machine_of.get(number)
        if machine is None:
            return 0.0
        latency_s = self._latency_s[machine.number]
        return max(0.0, machine.cut_until - self.now) + latency_s

    def send(self, command: c.Order) -> None:
        """Send an order; slices and weights go over the links, and a plan waits for its slices."""
        number = command.worker
        match command:
            case c.Feed(slice=index):
                self._feeding[number] += 1
                size = self._slices[index].samples * self.scenario.model.sample_bytes
                self._transfer(number, "down", size, lambda: self._fed(number, size))
            case c.Merge():
                size = self._weights_bytes(command)
                self._transfer(number, "down", size, lambda: self._deliver_weights(command, size))
            case c.Assign() if self._feeding[number]:
                self._held_orders.setdefault(number, []).append(command)
            case _:
                super().send(command)

    def _transfer(self, number: int, direction: Direction, size: int, then: Callable[[], None]) -> None:
        self.links.send(self._machine_of[number].number, direction, size, then)

    def _fed(self, number: int, size: int) -> None:
        """Count a slice that has arrived; the last one lets plans go on."""
        self.bytes_slices += size
        self._feeding[number] -= 1
        if not self._feeding[number]:
            for order in self._held_orders.pop(number, []):
                super().send(order)

    def _deliver_weights(self, command: c.Merge, size: int) -> None:
        self.bytes_down += size
        super().send(command)

    def say(self, worker: SimulatedWorker, event: Event) -> None:
        """Send a worker's event; a delta's payload follows it, and a leaving worker waits for its end."""
        if isinstance(event, Left):
            self._say_when_uploaded(worker, event)
            return
        super().say(worker, event)
        if isinstance(event, Delta):
            self._upload(worker.source, event)

    def _say_when_uploaded(self, worker: SimulatedWorker, event: Event) -> None:
        super().say(worker, event)

    def _upload(self, source: Source, delta: Delta) -> None:
        key = (source, delta.round)
        self._uploading[key] = 1
        size = delta.payload_bytes
        request_s = 2 * self.delay_s(source.worker)
        """The head asks for the payload once it knows of it."""

        def arrived() -> None:
            self.bytes_up += size
            if self._uploading.pop(key, 0):
                self._reduce_if_complete()

        def begin() -> None:
            if key in self._uploading and source.worker in self._machine_of:
                latency_s = self.delay_s(source.worker)
                self._transfer(source.worker, "up", size, lambda: self.later(latency_s, arrived))

        self.later(request_s, begin)

    # ── machines ──────────────────────────────────────────────────────────────────────────────────────────────────

    def batch_s(self, source: Source) -> float:
        """Seconds of a batch that begins now."""
        return self._machine_of[source.worker].batch_s(self.now)

    def evaluate_s(self, source: Source) -> float:
        """Seconds of an evaluation: there are no validation samples."""
        return 0.0

    def start_s(self, source: Source) -> float:
        """Seconds from a lease to a worker."""
        return self._machine_of[source.worker].start_s()


def _deltas_of(command: c.Reduce) -> list[tuple[Source, int]]:
    """Workers and rounds of the deltas of a reduction."""
    rounds = command.rounds or (command.round,) * len(command.sources)
    return list(zip(command.sources, rounds, strict=True))


def _latencies(scenario: Scenario) -> list[float]:
    """Seconds of a message between each machine and the head."""
    by_site = {site.name: site.latency_ms / 1000 for site in scenario.sites}
    latencies: list[float] = []
    for group in scenario.machines:
        site = group.site or scenario.head.site
        latency_s = by_site[site] if site is not None else 0.0
        latencies += [latency_s] * group.count
    return latencies


def _slices(scenario: Scenario) -> list[SliceInfo]:
    """Slices of the dataset."""
    model = scenario.model
    job = scenario.job
    trained = sum(job.samples(number) for number in range(job.rounds.update_rounds))
    samples = model.samples or trained + SPARE_SLICES * job.num_workers * model.slice_samples
    number = max(1, samples // model.slice_samples)
    return [SliceInfo(index, "", "", model.slice_samples) for index in range(number)]
