"""A scenario: the job, the model's size, and the machines, links and failures of a simulated run.

Every key of a scenario file is a field here; `scenario_file` reads such files. Times end in `_s`, rates in `_mbps` and
`_gbps` are powers of ten of bits, those in `_gb_s` and `_mb_s` of bytes.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from hypha_ray.config import Job
from hypha_ray.config.load import resolved
from hypha_ray.config.schema import rounds_for
from hypha_ray.config.value_types import Count, FleetSize, NotNegative, Positive, Table

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def _whole(value: Any) -> Any:
    """Turn a float without a fraction, such as 1.1e9, into an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeCount = Annotated[int, BeforeValidator(_whole), Field(ge=1)]


class ModelSize(Table):
    """Sizes of the model and of the data."""

    parameters: WholeCount = Field(description="trained parameters; bytes of deltas and weights follow from them")
    sample_bytes: WholeCount = Field(8192, description="bytes of a sample in a slice")
    slice_samples: WholeCount = Field(1024, description="samples of a slice")
    samples: WholeCount | None = Field(None, description="samples of the dataset; default: no sample is used twice")

    def slice_sizes(self, least: int) -> list[int]:
        """Samples of each slice: of `samples`, of which the last slice has the rest, or of whole ones for the least."""
        if self.samples is None:
            return [self.slice_samples] * max(1, least // self.slice_samples)
        whole, rest = divmod(self.samples, self.slice_samples)
        return [self.slice_samples] * whole + [rest] * bool(rest)


class BatchTimes(Table):
    """Times of a batch of `rounds.max_batch_size` samples on the machines of a group."""

    median: Positive = Field(description="seconds of a batch on the median machine")
    spread: NotNegative = Field(0.0, description="differences between machines: standard deviation of the logarithm")
    jitter: NotNegative = Field(0.0, description="differences between batches: standard deviation of the logarithm")
    drift: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="part by which a machine's speed swings")
    drift_period_s: Positive = Field(1800.0, description="seconds of a swing")


class Stragglers(Table):
    """Machines that are slow for a while."""

    share: Share = Field(0.0, description="part of the time that a machine is slow")
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(1.0, description="how much longer batches take")
    for_s: Positive = Field(60.0, description="seconds that a machine stays slow")


class StartTimes(Table):
    """Times from a lease to a worker that is ready, without the transfer of weights."""

    median: Positive = Field(10.0, description="seconds of the median start")
    spread: NotNegative = Field(0.0, description="differences between starts: standard deviation of the logarithm")


class FailureKinds(Table):
    """Weights of the kinds of failures."""

    kill: NotNegative = Field(0.0, description="weight of: the worker's process dies, the machine stays")
    hang: NotNegative = Field(0.0, description="weight of: the worker falls silent, until its lease ends")
    preempt: NotNegative = Field(0.0, description="weight of: the machine is taken away, after a notice")
    partition: NotNegative = Field(0.0, description="weight of: the machine's link is cut for a while")

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each kind, by its name."""
        return {name: getattr(self, name) for name in type(self).model_fields}


class Failures(Table):
    """Failures of machines: independent, at random times."""

    every_h: Positive | None = Field(None, description="mean hours between two failures of a machine; default: never")
    kinds: FailureKinds = Field(FailureKinds(kill=1.0), description="kinds of failures")
    notice_s: NotNegative = Field(30.0, description="seconds between the notice of a preemption and the machine's end")
    away_s: Positive = Field(600.0, description="mean seconds until a preempted machine is back")
    cut_s: Positive = Field(60.0, description="mean seconds of a partition")


class Diurnal(Table):
    """Day and night of a spot market: the part of the machines that can be had follows a cosine over 24 hours."""

    least: Share = Field(description="part of the machines that can be had at the worst hour")
    peak_hour: NotNegative = Field(0.0, description="hour after the beginning at which all machines can be had")


class MachineGroup(Table):
    """Machines of one kind at one site."""

    count: FleetSize = Field(description="number of machines")
    site: str | None = Field(None, description="name of a site; default: the head's")
    batch_s: BatchTimes = Field(description="times of a batch")
    stragglers: Stragglers = Field(Stragglers(), description="machines that are slow for a while")
    start_s: StartTimes = Field(StartTimes(), description="times of a start")
    up_mbps: Positive | None = Field(None, description="rate to the head; default: no limit of its own")
    down_mbps: Positive | None = Field(None, description="rate from the head; default: no limit of its own")
    failures: Failures = Field(Failures(), description="failures")
    available: str | None = Field(None, description="trace of joins and leaves, JSONL or CSV: at_s, machine, event")
    diurnal: Diurnal | None = Field(None, description="day and night of a spot market; default: always available")
    price: NotNegative = Field(0.0, description="price of a machine's hour")

    @property
    def is_firm(self) -> bool:
        """Whether its machines are on demand: they stay as long as they are leased."""
        is_preempted = self.failures.every_h is not None and self.failures.kinds.preempt > 0
        return self.available is None and self.diurnal is None and not is_preempted


class Site(Table):
    """A place whose machines share a link to all other places."""

    name: str = Field(description="name that machines and the head refer to")
    up_gbps: Positive | None = Field(None, description="rate of all its machines to other sites; default: no limit")
    down_gbps: Positive | None = Field(None, description="rate from other sites; default: no limit")
    latency_ms: NotNegative = Field(0.0, description="milliseconds of a message between its machines and the head")


class Head(Table):
    """The machine of scheduler, parameter servers, data and store."""

    site: str | None = Field(None, description="name of its site; default: a place of its own")
    up_gbps: Positive | None = Field(None, description="rate of what it sends; default: no limit")
    down_gbps: Positive | None = Field(None, description="rate of what it receives; default: no limit")
    reduce_gb_s: Positive | None = Field(
        None, description="GB of deltas, decoded to 4 bytes a parameter, that a parameter server merges in a second"
    )
    commit_mb_s: Positive | None = Field(None, description="MB of a snapshot written in a second; default: no time")


class Scenario(Table):
    """One simulated run. Equal scenarios give equal results."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

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
    def machine_count(self) -> int:
        """Number of machines of all groups."""
        return sum(group.count for group in self.machines)

    def settings(self) -> dict[str, Any]:
        """The whole scenario as plain values, with all keys of the job that it sets."""
        tables = self.model_dump(mode="json", exclude={"job"}, exclude_none=True)
        set_by_scenario = self.job.model_dump(mode="json", exclude_unset=True)
        job = resolved(self.job)
        keys = {name: {key: job.get(name, {}).get(key) for key in table} for name, table in set_by_scenario.items()}
        return {**tables, "workers": self.workers, "rounds": self.job_of_run.rounds.update_rounds, "job": keys}
