"""A scenario: the job, the model's size, and the machines, links and failures of a simulated run.

Every key of a scenario file is a field here; `scenario_file` reads such files. Times end in `_s`, rates in `_mbps` and
`_gbps` are powers of ten of bits, those in `_gb_s` and `_mb_s` of bytes.

Its machines have speeds that drift and stray, and can be had or not. Each has random numbers of its own for each
purpose, so a change of one machine leaves all others as they are.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator, ConfigDict, Field

from hypha_ray.config import Job
from hypha_ray.config.load import resolved
from hypha_ray.config.schema import rounds_for, samples_of_rounds
from hypha_ray.config.value_types import Count, FleetSize, Table

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=10**12)]
"""Time, price or weight; limits keep sums and products finite."""
Duration = Annotated[float, Field(gt=0, le=10**12)]
Rate = Annotated[float, Field(gt=0, le=10**12)]
Throughput = Annotated[float, Field(ge=1e-6, le=10**12)]
Spread = Annotated[float, Field(ge=0, le=10)]
"""Standard deviation of a logarithm."""
DAY_S: Final = 86_400.0
LONGEST_ROUND_DAYS: Final = 100
"""Days after which a round is taken to have no end."""
FORGOTTEN_CYCLES: Final = 100
"""Mean cycles of slow and fast times after which the present one no longer depends on the first."""
Span = Annotated[float, Field(ge=1e-3, le=10**12)]
"""Mean time between events of a machine, of which there mustn't be too many."""


def _whole(value: Any) -> Any:
    """Turn a float without a fraction, such as 1.1e9, into an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeCount = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=10**15)]


class ModelSize(Table):
    """Sizes of the model and of the data."""

    parameters: WholeCount = Field(description="trained parameters; bytes of deltas and weights follow from them")
    sample_bytes: WholeCount = Field(8192, description="bytes of a sample in a slice")
    slice_samples: WholeCount = Field(1024, description="samples of a slice")
    samples: WholeCount | None = Field(None, description="samples of the dataset; default: no sample is used twice")

    def slice_count(self, least: int) -> int:
        """Number of slices: for `samples`, or for the least samples that are needed."""
        if self.samples is None:
            return max(1, least // self.slice_samples)
        return -(-self.samples // self.slice_samples)

    def slice_sizes(self, least: int) -> list[int]:
        """Samples of each slice: all have `slice_samples`, but the last one of `samples`, which has the rest."""
        sizes = [self.slice_samples] * self.slice_count(least)
        if self.samples is not None:
            sizes[-1] = self.samples - sum(sizes[:-1])
        return sizes


class BatchTimes(Table):
    """Times of a batch of `rounds.max_batch_size` samples on the machines of a group."""

    median: Duration = Field(description="seconds of a batch on the median machine")
    spread: Spread = Field(0.0, description="differences between machines: standard deviation of the logarithm")
    jitter: Spread = Field(0.0, description="differences between batches: standard deviation of the logarithm")
    drift: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="part by which a machine's speed swings")
    drift_period_s: Duration = Field(1800.0, description="seconds of a swing")


class Stragglers(Table):
    """Machines that are slow for a while."""

    share: Share = Field(0.0, description="part of the time that a machine is slow")
    factor: Annotated[float, Field(ge=1, le=10**6)] = Field(1.0, description="how much longer batches take")
    for_s: Span = Field(60.0, description="seconds that a machine stays slow")


class StartTimes(Table):
    """Times from a lease to a worker that is ready, without the transfer of weights."""

    median: Duration = Field(10.0, description="seconds of the median start")
    spread: Spread = Field(0.0, description="differences between starts: standard deviation of the logarithm")


class FailureKinds(Table):
    """Weights of the kinds of failures."""

    kill: Amount = Field(0.0, description="weight of: the worker's process dies, the machine stays")
    hang: Amount = Field(0.0, description="weight of: the worker falls silent, until its lease ends")
    preempt: Amount = Field(0.0, description="weight of: the machine is taken away, after a notice")
    partition: Amount = Field(0.0, description="weight of: the machine's link is cut for a while")

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each kind, by its name."""
        return {name: getattr(self, name) for name in type(self).model_fields}


class Failures(Table):
    """Failures of machines: independent, at random times."""

    every_h: Span | None = Field(None, description="mean hours between two failures of a machine; default: never")
    kinds: FailureKinds = Field(FailureKinds(kill=1.0), description="kinds of failures")
    notice_s: Amount = Field(30.0, description="seconds between the notice of a preemption and the machine's end")
    away_s: Duration = Field(600.0, description="mean seconds until a preempted machine is back")
    cut_s: Duration = Field(60.0, description="mean seconds of a partition")


class Diurnal(Table):
    """Day and night of a spot market: the part of the machines that can be had follows a cosine over 24 hours."""

    least: Share = Field(description="part of the machines that can be had at the worst hour")
    peak_hour: Amount = Field(0.0, description="hour after the beginning at which all machines can be had")


class MachineGroup(Table):
    """Machines of one kind at one site."""

    count: FleetSize = Field(description="number of machines")
    site: str | None = Field(None, description="name of a site; default: the head's")
    batch_s: BatchTimes = Field(description="times of a batch")
    stragglers: Stragglers = Field(Stragglers(), description="machines that are slow for a while")
    start_s: StartTimes = Field(StartTimes(), description="times of a start")
    up_mbps: Rate | None = Field(None, description="rate to the head; default: no limit of its own")
    down_mbps: Rate | None = Field(None, description="rate from the head; default: no limit of its own")
    failures: Failures = Field(Failures(), description="failures")
    available: str | None = Field(None, description="trace of joins and leaves, JSONL or CSV: at_s, machine, event")
    diurnal: Diurnal | None = Field(None, description="day and night of a spot market; default: always available")
    price: Amount = Field(0.0, description="price of a machine's hour")

    @property
    def is_firm(self) -> bool:
        """Whether its machines are on demand: they stay as long as they are leased."""
        is_preempted = self.failures.every_h is not None and self.failures.kinds.preempt > 0
        return self.available is None and self.diurnal is None and not is_preempted


class Site(Table):
    """A place whose machines share a link to all other places."""

    name: str = Field(description="name that machines and the head refer to")
    up_gbps: Rate | None = Field(None, description="rate of all its machines to other sites; default: no limit")
    down_gbps: Rate | None = Field(None, description="rate from other sites; default: no limit")
    latency_ms: Amount = Field(0.0, description="milliseconds of a message between its machines and the head")


class Head(Table):
    """The machine of scheduler, parameter servers, data and store."""

    site: str | None = Field(None, description="name of its site; default: a place of its own")
    up_gbps: Rate | None = Field(None, description="rate of what it sends; default: no limit")
    down_gbps: Rate | None = Field(None, description="rate of what it receives; default: no limit")
    reduce_gb_s: Throughput | None = Field(
        None, description="GB of deltas, decoded to 4 bytes a parameter, that a parameter server merges in a second"
    )
    commit_mb_s: Throughput | None = Field(None, description="MB of a snapshot written in a second; default: no time")


class Scenario(Table):
    """One simulated run. Equal scenarios give equal results."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    groups_workers: ClassVar[bool] = False
    """Whether the job may describe its workers in groups; otherwise the machines alone do."""

    name: str = Field(description="name of the scenario")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of speeds, times and failures")
    job: Job = Field(Job(), description="tables of a job file")
    samples_per_worker: Count | None = Field(
        None, description="samples of a round for each worker; sets rounds.samples_between_updates"
    )
    model: ModelSize = Field(description="sizes of model and data")
    machines: tuple[MachineGroup, ...] = Field(strict=False, min_length=1, description="groups of machines")
    sites: tuple[Site, ...] = Field((), strict=False, description="places whose machines share a link")
    head: Head = Field(Head(), description="machine of scheduler, parameter servers, data and store")
    varied: dict[str, Any] = Field({}, description="keys that a sweep or the caller has set, for tables of results")

    @property
    def workers(self) -> int:
        """Number of workers that the job wants."""
        return self.job.num_workers

    @property
    def job_of_run(self) -> Job:
        """The job on one dataset, with the number of rounds that its epochs take on the samples of `model`."""
        job = self.job
        if job.dataset.mix:
            job = job.model_copy(update={"dataset": job.dataset.model_copy(update={"mix": []})})
        epochs = job.rounds.epochs
        if epochs is None or self.model.samples is None:
            return job
        return job.lasting(rounds_for(job, epochs * self.model.samples))

    @property
    def needed_samples(self) -> int:
        """Samples of all rounds, and those of a slice of each worker in flight."""
        return samples_of_rounds(self.job_of_run) + self.workers * self.model.slice_samples

    @property
    def machine_count(self) -> int:
        """Number of machines of all groups."""
        return sum(group.count for group in self.machines)

    def settings(self) -> dict[str, Any]:
        """The whole scenario as plain values, with all keys of the job that it sets."""
        tables = self.model_dump(mode="json", exclude={"job"}, exclude_none=True)
        set_by_scenario = self.job.model_dump(mode="json", exclude_unset=True)
        job = resolved(self.job)
        keys: dict[str, Any] = {}
        for name, table in set_by_scenario.items():
            written = job.get(name, {})
            keys[name] = {key: written.get(key) for key in table} if isinstance(table, dict) else written
        return {**tables, "workers": self.workers, "rounds": self.job_of_run.rounds.update_rounds, "job": keys}


def dice_of(seed: int, *names: object) -> random.Random:
    """Random numbers for one purpose, independent of all others."""
    return random.Random("/".join(map(str, (seed, *names))))


class Machine:
    """One machine.

    Args:
        number: number among all machines.
        rank: number within its group.
        group: its group.
        seed: seed of the scenario.

    """

    __slots__ = (
        "_batch_dice",
        "_is_slow",
        "_phase",
        "_slow_until",
        "_start_dice",
        "_straggling_factor",
        "_strays",
        "_times",
        "absences",
        "began_at",
        "cut_until",
        "group",
        "leased_at",
        "leased_s",
        "nominal_batch_s",
        "number",
        "rank",
        "worker",
    )

    def __init__(self, number: int, rank: int, group: MachineGroup, seed: int) -> None:
        self.number = number
        self.rank = rank
        self.group = group
        self.absences: frozenset[str] = frozenset()
        """Reasons for which it can't be had now; it is there if there is none."""
        self.worker: int | None = None
        """Number of the worker that has leased it; None without a lease."""
        self.leased_at: float | None = None
        """Time at which the present lease began; None without one."""
        self.leased_s = 0.0
        """Seconds of all leases that have ended."""
        self.began_at: float | None = None
        """Time at which its first worker was ready; None before."""
        self.cut_until = 0.0
        """Time until which its link is cut."""
        speed_dice = dice_of(seed, number, "speed")
        times = self._times = group.batch_s
        self.nominal_batch_s = times.median * math.exp(times.spread * speed_dice.gauss(0.0, 1.0))
        """Seconds of a batch without jitter, drift and stragglers' times."""
        self._phase = speed_dice.uniform(0.0, 2 * math.pi)
        """Phase of its drift."""
        self._batch_dice = dice_of(seed, number, "batch")
        self._start_dice = dice_of(seed, number, "start")
        self._strays = group.stragglers.share > 0
        self._straggling_factor = group.stragglers.factor
        self._is_slow = True  # The first turn, which comes at once, makes it fast or slow.
        self._slow_until = 0.0
        """Time of the next turn from slow to fast, or back."""

    @property
    def available(self) -> bool:
        """Whether it is there."""
        return not self.absences

    @property
    def is_free(self) -> bool:
        """Whether it can be leased."""
        return self.available and self.leased_at is None

    def batch_s(self, now: float) -> float:
        """Seconds of a batch that begins now."""
        times = self._times
        seconds = self.nominal_batch_s
        if times.jitter:
            seconds *= math.exp(times.jitter * self._batch_dice.gauss(0.0, 1.0))
        if times.drift:
            angle = 2 * math.pi * now / times.drift_period_s + self._phase
            seconds *= 1.0 + times.drift * math.sin(angle)
        if not self._strays:
            return seconds
        if self._slow_until > now:
            return seconds * self._straggling_factor if self._is_slow else seconds
        return seconds * self._straggling(now)

    def skip_batch(self, now: float) -> None:
        """Throw the dice of a batch that begins now, without a batch: the times of later ones are told by them."""
        if self._times.jitter:
            self._batch_dice.gauss(0.0, 1.0)
        if self._strays and self._slow_until <= now:
            self._straggling(now)

    def start_s(self) -> float:
        """Seconds of a start that begins now."""
        times = self.group.start_s
        return times.median * math.exp(times.spread * self._start_dice.gauss(0.0, 1.0))

    def lease(self, worker: int, now: float) -> None:
        """Begin a lease, for the worker of that number."""
        self.worker = worker
        self.leased_at = now

    def release(self, now: float) -> None:
        """End the lease, if there is one."""
        if self.leased_at is not None:
            self.leased_s += now - self.leased_at
            self.leased_at = None
            self.worker = None

    def lease_s(self, now: float) -> float:
        """Seconds of all leases until now."""
        if self.leased_at is None:
            return self.leased_s
        return self.leased_s + now - self.leased_at

    def _straggling(self, now: float) -> float:
        """Factor of a batch that begins now; slow and fast times alternate, and are exponentially distributed."""
        stragglers = self.group.stragglers
        if self._slow_until == 0.0:
            self._begin_turn(0.0)
        if now - self._slow_until > FORGOTTEN_CYCLES * stragglers.for_s / stragglers.share:
            self._begin_turn(now)
        while self._slow_until <= now:
            self._is_slow = not self._is_slow
            self._slow_until += self._batch_dice.expovariate(1.0) * self._mean_turn_s()
        return stragglers.factor if self._is_slow else 1.0

    def _begin_turn(self, now: float) -> None:
        """Throw for a machine that is slow or fast without regard to earlier times, and for the rest of that time."""
        self._is_slow = self._batch_dice.random() < self.group.stragglers.share
        self._slow_until = now + self._batch_dice.expovariate(1.0) * self._mean_turn_s()

    def _mean_turn_s(self) -> float:
        """Mean seconds of a slow time or, while the machine is fast, of a fast one."""
        stragglers = self.group.stragglers
        if self._is_slow:
            return stragglers.for_s
        if stragglers.share >= 1.0:
            return 0.0
        return stragglers.for_s * (1.0 - stragglers.share) / stragglers.share


class MachinePool:
    """All machines, and those that are free.

    Args:
        machines: in the order of their numbers.

    """

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = machines
        self._free: list[int] = []
        """Heap of numbers of machines that were free when they were added."""

    def free_count(self) -> int:
        """Number of free machines."""
        return sum(machine.is_free for machine in self.machines)

    def lease(self, worker: int, now: float) -> Machine | None:
        """Lease the machine of the worker's own number if it is free, otherwise the first that is; None if none is."""
        own_machine = self.machines[worker]
        machine = own_machine if own_machine.is_free else self._first_free()
        if machine is not None:
            machine.lease(worker, now)
        return machine

    def lease_cheapest(self, worker: int, now: float, max_price: float, firm_only: bool) -> Machine | None:
        """Lease the cheapest free machine within the limits of a goal; None if there is none."""
        candidates = []
        for machine in self.machines:
            group = machine.group
            if machine.is_free and group.price <= max_price and (group.is_firm or not firm_only):
                candidates.append(machine)
        cheapest = min(candidates, key=lambda candidate: candidate.group.price, default=None)
        if cheapest is not None:
            cheapest.lease(worker, now)
        return cheapest

    def release(self, machine: Machine, now: float) -> None:
        """End a machine's lease, if there is one."""
        machine.release(now)
        self._note_if_free(machine)

    def take_away(self, machine: Machine, reason: str) -> None:
        """Let a machine no longer be leased, for a reason; its lease goes on until it is released."""
        machine.absences |= {reason}

    def give_back(self, machine: Machine, reason: str) -> None:
        """End the absence of a machine for a reason; it can be had if there is no other reason."""
        machine.absences -= {reason}
        self._note_if_free(machine)

    def add_all(self) -> None:
        """Count all machines that are free."""
        self._free = [machine.number for machine in self.machines if machine.is_free]

    def _note_if_free(self, machine: Machine) -> None:
        if machine.is_free:
            heapq.heappush(self._free, machine.number)

    def _first_free(self) -> Machine | None:
        while self._free:
            machine = self.machines[heapq.heappop(self._free)]
            if machine.is_free:
                return machine
        return None


def machines_of(scenario: Scenario) -> list[Machine]:
    """All machines of a scenario, in the order of its groups."""
    machines: list[Machine] = []
    for group in scenario.machines:
        for rank in range(group.count):
            machines.append(Machine(len(machines), rank, group, scenario.seed))
    return machines
