"""World of a scenario: its machines, links, parameter servers and store, around the scheduler's core.

The payload of a delta is on its way while the core knows of the delta already; a reduction waits for all payloads. A
plan waits for its slices. A machine is leased from the order to hire until its worker ends.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Self

from hypha_ray.errors import ClusterError
from hypha_ray.exchange_schedule import fragments_of_round
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.barrier.round import LOST
from hypha_ray.scheduler.core import SchedulerCore
from hypha_ray.scheduler.messages import ResumePoint
from hypha_ray.scheduler.worker_plans import Sizes
from hypha_ray.simulation.exchange import WEIGHT_BYTES, PayloadSizes
from hypha_ray.simulation.failures import HOUR_S, FailureSchedule
from hypha_ray.simulation.fleet_worker import DeltaKey, FleetWorker, Payload, Traffic, delta_key
from hypha_ray.simulation.scenario import DAY_S, LONGEST_ROUND_DAYS, Machine, MachinePool, Scenario, machines_of
from hypha_ray.simulation.worker import SimulatedWorker
from hypha_ray.simulation.world import World
from hypha_ray.types import Contribution, Delta, Event, Left, Rejection, SliceInfo, Source, Verdict

NO_MACHINE = "no machine is free"
GONE = "its machine was taken away"
CUT = "its link is cut"
"""Reasons of losses and absences."""
SECURE_S = 60.0
"""Longest wait of a leaving worker for the end of its payloads' transfers, in seconds, as in production."""
POLL_S = 1.0
QUOTE_S = 60.0
"""Seconds between two looks at the market, for a goal."""
UNKNOWN_FIELDS = ("loss", "codec_error", "codec_cosine", "update_norm", "learning_rate", "tokens", "tokens_per_s")
"""Fields of a round's record that a simulation knows nothing of."""
UNKEPT_FIELDS = (*UNKNOWN_FIELDS, "batch_s")
"""Fields that are left out; a time for each worker of every round would take most of the memory."""


class FleetWorld(World):
    """World of a scenario.

    Args:
        scenario: the scenario.

    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.job_of_run)
        self.scenario = scenario
        self.sizes = PayloadSizes(self.job, scenario.model.parameters)
        self.pool = MachinePool(machines_of(scenario))
        self.traffic = Traffic(scenario, self.clock, self._payloads_settled)
        self._failures = FailureSchedule(scenario, self.pool.machines, self)
        self._machine_of: dict[int, Machine] = {}
        """Machine that each worker's number has leased."""
        self._slices = _slices(scenario)
        self._reductions: deque[c.Reduce] = deque()
        """Reductions in order; the first one is at work, or waits for payloads."""
        self._missing: set[DeltaKey] = set()
        """Payloads that the first reduction waits for."""
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
        self._lease_limits = c.LimitLeases(math.inf, firm_only=False)
        self._core_deadline = 0.0
        """Deadline of the core; only an event for the core changes it."""

    def open(self) -> None:
        """Start the run: the core hires a worker for each number, and the first weights are there."""
        resume_point = ResumePoint()
        held_samples = self.job.worker.prefetch_mb * 1_000_000 // self.scenario.model.sample_bytes
        sizes = Sizes(max(1, held_samples))
        core = SchedulerCore(self.job, self.scenario.name, self._slices, sizes, resume_point)
        parts = tuple(WEIGHT_BYTES * parameters for parameters in self.sizes.fragments)
        weights = c.Initialised(sum(parts), "theta", "layout", parts)
        self.core = core
        self._failures.start()
        self.pool.add_all()
        self.begin(core, resume_point, weights, 0.0, min(self.pool.free_count(), self.job.num_workers))
        self._core_deadline = core.deadline
        if self.job.goal.is_set:
            self._quote()

    def _quote(self) -> None:
        """Tell the core the terms of all machines, again and again."""
        workers = {}
        for worker, machine in self._machine_of.items():
            workers[worker] = c.Quote(machine.group.price, machine.group.is_firm)
        free_machines = filter(attrgetter("is_free"), self.pool.machines)
        offers = [c.Quote(machine.group.price, machine.group.is_firm) for machine in free_machines]
        self.tell(c.Quotes(workers, offers, self.cost()))
        self.later(QUOTE_S, self._quote)

    def cost(self) -> float:
        """Sum of price · hours of all leases up to now."""
        cost = 0.0
        for machine in self.pool.machines:
            cost += machine.group.price * machine.lease_s(self.now) / HOUR_S
        return cost

    def close(self) -> None:
        """End all workers and leases."""
        for worker in list(self.workers):
            self.bury(worker)
        for machine in self.pool.machines:
            machine.release(self.now)

    @property
    def deadline(self) -> float:
        """Time at which the core is told that nothing has happened."""
        now = self.clock.now
        return self._core_deadline if self._core_deadline > now else now

    def tell(self, event: c.Input) -> None:
        """Have the core handle an event, which renews the sender's lease, and carry out its commands."""
        if self.over:
            return
        core = self.core
        commands = core.handle(event, self.clock.now)
        deadline = core.deadline
        if deadline != self._core_deadline:
            self._core_deadline = deadline
            self.clock.halt()
        for command in commands:
            self.obey(command)

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────

    def obey(self, command: c.Command) -> None:
        """Carry out a command; keep what results are made of."""
        match command:
            case c.Assign() | c.Merge() | c.Feed() | c.RestoreInnerState() | c.Drain():
                self.send(command)
                return
            case c.Hire(source=source):
                self._hire_on_machine(source, command)
                return
            case c.LogEvent(fields=fields):
                has_no_machine = fields.get("reason") == NO_MACHINE
                self.events["no_machine" if has_no_machine else fields["kind"]] += 1
                return
            case c.LogMetric(fields=fields):
                if fields["kind"] == "round":
                    self._keep_record(fields)
                return
            case c.LimitLeases():
                self._lease_limits = command
                return
            case c.Finish(error=error):
                self.failure = error
                self.clock.halt()
            case _:
                pass
        super().obey(command)

    def _keep_record(self, fields: Mapping[str, Any]) -> None:
        """Keep the record of a round."""
        record = {name: value for name, value in fields.items() if name not in UNKEPT_FIELDS}
        self.records.append(record)
        if self.on_round is not None:
            self.on_round(record)

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _hire_on_machine(self, source: Source, command: c.Hire) -> None:
        if self.job.goal.is_set:
            limits = self._lease_limits
            machine = self.pool.lease_cheapest(source.worker, self.now, limits.max_price, limits.firm_only)
        else:
            machine = self.pool.lease(source.worker, self.now)
        if machine is None:
            self.answer(0.0, c.PlacementFailed(source, NO_MACHINE))
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
        return FleetWorker(source, self, machine)

    def bury(self, number: int) -> None:
        """End a worker and its lease; its payloads go on as long as its machine is there."""
        worker = self._worker(number)
        if worker is not None:
            worker.stop()
            self.alive_s += self.now - worker.began_at
            self.batches_s += worker.batches_s
            self.waited_s += worker.waited_s
            self.traffic.end_worker(number, worker.machine)
        super().bury(number)
        machine = self._machine_of.pop(number, None)
        if machine is not None:
            self.pool.release(machine, self.now)

    def _worker(self, number: int | None) -> FleetWorker | None:
        worker = None if number is None else self.workers.get(number)
        return worker if isinstance(worker, FleetWorker) else None

    def run(self) -> Self:
        """Run to the end."""
        while not self.over:
            if not self.clock.run(self._core_deadline):
                self.tell(c.Tick())
            self._limit_round()
        return self

    def _limit_round(self) -> None:
        """End a run whose round has no end."""
        began_at = self.committed_at[-1] if self.committed_at else 0.0
        if self.now > began_at + LONGEST_ROUND_DAYS * DAY_S and not self.over:
            problem = f"no round has ended for {LONGEST_ROUND_DAYS} days"
            self.obey(c.Finish(ClusterError("SIM004", problem, fix="see to its batches, links and failures")))

    def renew_lease(self, worker: FleetWorker, sent_at: float) -> bool:
        """Renew a worker's lease, which is all that a sign of life does; False if its machine's link was cut then."""
        is_heard = worker.machine.cut_until <= sent_at
        if is_heard and not self.over:
            self.core.arrived(worker.sign_of_life, sent_at)
        return is_heard

    def batch_s(self, source: Source) -> float:
        """Seconds of a batch that begins now."""
        return self._machine_of[source.worker].batch_s(self.clock.now)

    def evaluate_s(self, source: Source) -> float:
        """Seconds of an evaluation: there are no validation samples."""
        return 0.0

    def start_s(self, source: Source) -> float:
        """Seconds from a lease to a worker."""
        return self._machine_of[source.worker].start_s()

    # ── what happens to machines ──────────────────────────────────────────────────────────────────────────────────

    def kill(self, machine: Machine) -> None:
        """End the process of the machine's worker, if there is one."""
        self._end_process(machine, "killed")

    def hang(self, machine: Machine) -> None:
        """Let the machine's worker fall silent, if there is one."""
        worker = self._worker(machine.worker)
        if worker is not None and worker.alive:
            self.events["hang"] += 1
            worker.stop()

    def partition(self, machine: Machine, seconds: float) -> None:
        """Cut the machine's link for a while; it can't be leased meanwhile."""
        self.events["partition"] += 1
        worker = self._worker(machine.worker)
        if worker is not None and worker.alive:
            worker.catch_up_pulses()
        machine.cut_until = max(machine.cut_until, self.now + seconds)
        self.pool.take_away(machine, CUT)
        self.traffic.links.set_cut(machine.number, True)
        self.later(seconds, lambda: self._mend_link(machine))

    def _mend_link(self, machine: Machine) -> None:
        if machine.cut_until <= self.now:
            self.pool.give_back(machine, CUT)
            self.traffic.links.set_cut(machine.number, False)

    def preempt(self, machine: Machine, notice_s: float, reason: str) -> None:
        """Tell the machine's worker to leave, and take the machine away after the notice."""
        self.events["preempt"] += 1
        self.pool.take_away(machine, reason)
        worker = self._worker(machine.worker)
        if worker is not None:
            worker.leave("preempted")
        self.later(notice_s, lambda: self._take_away_unless_back(machine, reason))

    def _take_away_unless_back(self, machine: Machine, reason: str) -> None:
        if reason in machine.absences:
            self.leave(machine, reason)

    def leave(self, machine: Machine, reason: str) -> None:
        """Take the machine away at once, and end its worker; its payloads are lost."""
        self.pool.take_away(machine, reason)
        worker = machine.worker
        self._end_process(machine, GONE)
        self.traffic.end_machine(machine)
        if worker is not None:
            self._machine_of.pop(worker, None)
            self.pool.release(machine, self.now)

    def join(self, machine: Machine, reason: str) -> None:
        """End the absence of a machine for a reason."""
        self.pool.give_back(machine, reason)

    def _end_process(self, machine: Machine, reason: str) -> None:
        worker = self._worker(machine.worker)
        if worker is None or not worker.alive:
            return
        self.events["kill"] += reason != GONE
        worker.stop()
        source = worker.source
        self.later(self.traffic.delay_s(machine), lambda: self.tell(c.Lost(source, reason)))

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────

    def delay_s(self, worker: int) -> float:
        """Seconds of a message to or from a worker, which waits for the end of a partition."""
        machine = self._machine_of.get(worker)
        return 0.0 if machine is None else self.traffic.delay_s(machine)

    def send(self, command: c.Order) -> None:
        """Send an order; slices and weights go over the links, and a plan waits for its slices."""
        worker = command.worker
        machine = self._machine_of.get(worker)
        if machine is None or worker not in self.workers:
            return
        deliver = partial(self._deliver, command)
        match command:
            case c.Feed(slice=index):
                size_bytes = self._slices[index].samples * self.scenario.model.sample_bytes
                self.traffic.send_slice(worker, machine, size_bytes)
            case c.Merge():
                self.traffic.send_weights(machine, self.sizes.weights_bytes(command), deliver)
            case c.Assign():
                self.traffic.after_slices(worker, deliver)
            case _:
                deliver()

    def _deliver(self, command: c.Order) -> None:
        """Hand over an order that has left the head, unless its worker is gone."""
        worker = self.workers.get(command.worker)
        if worker is not None:
            self.clock.later(self.delay_s(command.worker), partial(worker.order, command))

    def say(self, worker: SimulatedWorker, event: Event) -> None:
        """Send a worker's event; a delta's payload follows it, and a leaving worker waits for the end of that."""
        assert isinstance(worker, FleetWorker)
        if isinstance(event, Left):
            self._say_left(worker, event, self.now + SECURE_S)
            return
        delay_s = self.traffic.delay_s(worker.machine)
        self.clock.later(delay_s, partial(self.tell, event))
        if isinstance(event, Delta):
            payload = Payload(delta_key(worker.source, event.round), event.payload_bytes)
            self.traffic.upload(payload, worker.machine)

    def _say_left(self, worker: FleetWorker, event: Left, deadline: float) -> None:
        if self.traffic.is_uploading(worker.source, worker.machine) and self.now < deadline:
            self.renew_lease(worker, self.now)
            self.later(POLL_S, lambda: self._say_left(worker, event, deadline))
        elif worker.machine.worker == worker.source.worker:
            self.later(self.traffic.delay_s(worker.machine), lambda: self.tell(event))

    # ── server and store ──────────────────────────────────────────────────────────────────────────────────────────

    def reduce(self, command: c.Reduce) -> None:
        """Merge deltas once all payloads have arrived."""
        self._reductions.append(command)
        if len(self._reductions) == 1:
            self._await_payloads()

    def _await_payloads(self) -> None:
        """Begin the first reduction as soon as all its payloads have arrived or are lost."""
        command = self._reductions[0]
        self._missing = set(filter(self.traffic.is_on_way, _deltas_of(command)))
        if not self._missing:
            self._merge_deltas()

    def _payloads_settled(self, keys: Sequence[DeltaKey]) -> None:
        if self._missing:
            self._missing.difference_update(keys)
            if not self._missing:
                self._merge_deltas()

    def _merge_deltas(self) -> None:
        command = self._reductions[0]
        self.later(self._reduce_s(command), self._end_reduction)

    def _end_reduction(self) -> None:
        self.tell(c.Reduced(self.verdict(self._reductions[0])))
        self._reductions.popleft()  # Only now: the core may have ordered the next one, which waits behind it.
        if self._reductions:
            self._await_payloads()

    def _reduce_s(self, command: c.Reduce) -> float:
        """Seconds of a reduction; fragments have servers of their own, which work at once."""
        rate = self.scenario.head.reduce_gb_s
        if rate is None:
            return 0.0
        largest = max(self.sizes.fragments[fragment] for fragment in fragments_of_round(self.job, command.round))
        return len(command.sources) * largest * WEIGHT_BYTES / (rate * 1e9)

    def verdict(self, command: c.Reduce) -> Verdict:
        """Accept all deltas whose payloads are there."""
        contributions: list[Contribution] = []
        rejected: list[Rejection] = []
        for source, key, weight in zip(command.sources, _deltas_of(command), command.weights, strict=True):
            if self.traffic.is_lost(key):
                rejected.append(Rejection(source.worker, LOST, blamed=False))
            else:
                contributions.append(Contribution(source.worker, source.incarnation, weight, 1.0))
        coded_bytes = self.sizes.coded_bytes(command.round)
        return Verdict(command.round, tuple(contributions), tuple(rejected), 0.0, coded_bytes)

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

    def payload_bytes(self, round: int) -> int:
        """Bytes of a worker's delta of a round."""
        return self.sizes.delta_bytes(round)


def _deltas_of(command: c.Reduce) -> list[DeltaKey]:
    """Keys of the deltas of a reduction."""
    rounds = command.rounds or (command.round,) * len(command.sources)
    return list(map(delta_key, command.sources, rounds))


def _slices(scenario: Scenario) -> list[SliceInfo]:
    """Slices of the dataset: by default with enough samples for the run, and a slice for each worker in flight."""
    sizes = scenario.model.slice_sizes(scenario.needed_samples)
    return [SliceInfo(index, "", "", samples) for index, samples in enumerate(sizes)]
