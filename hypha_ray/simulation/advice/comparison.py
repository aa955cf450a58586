"""Simulated runs of candidates: the production scheduler on a virtual clock, with a fleet and links as described."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from hypha_ray.config import Job
from hypha_ray.config.schema import Rounds, Sync
from hypha_ray.config.tables.resources import Resources, Worker
from hypha_ray.simulation.advice.exchange import (
    MERGE_GB_S,
    Circumstances,
    ExchangeEstimate,
    ExchangeSettings,
    estimate,
    whole_weights_s,
)
from hypha_ray.simulation.result import SimulationResult
from hypha_ray.simulation.run import simulate
from hypha_ray.simulation.scenario import (
    BatchTimes,
    FailureKinds,
    Failures,
    Head,
    MachineGroup,
    ModelSize,
    Scenario,
    Site,
    StartTimes,
)

MOST_BATCHES: Final = 60_000
"""Batches of a simulated run beyond which it would take minutes."""
MOST_SIMULATED_S: Final = 8_000
"""Virtual seconds of a run beyond which it would take long, too: the scheduler looks at its clock each second."""
STEADY_ROUNDS: Final = 3
"""Rounds of a simulated run between its first and its last ones."""
REPORTS: Final = 8
"""Reports of a worker in a simulated round."""
_NEVER_S: Final = 1e9
"""Time after which a simulated worker counts as stalled: the first weights may take long on a slow link."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that are compared."""

    name: str
    settings: ExchangeSettings
    job: Job
    """The job with these settings."""


@dataclass(frozen=True, slots=True)
class ComparedCandidate:
    """A candidate with its figures."""

    candidate: Candidate
    estimate: ExchangeEstimate
    result: SimulationResult | None
    """Figures of a simulated run; None if it would take too long."""
    waiting: float | None
    """Part of the time that workers wait in its steady rounds; None without it."""

    def as_json(self) -> dict[str, Any]:
        """Figures of the simulated run, with the name and the estimate."""
        assert self.result is not None
        estimated = {"waiting": self.estimate.overhead, "exchange_s": self.estimate.exchange_s}
        return {**self.result.as_json(), "name": self.candidate.name, "waiting": self.waiting, "estimate": estimated}


def settings_of(job: Job) -> ExchangeSettings:
    """Settings of a job's exchange, in whole inner steps of the mean worker."""
    sync = job.sync
    batch = job.num_workers * job.rounds.max_batch_size
    round_steps = max(1, round(job.rounds.samples_between_updates / batch))
    fragments = sync.fragments if sync.staggered else 1
    return ExchangeSettings(
        codec=sync.codec,
        downward_codec=sync.downward_codec,
        steps=round_steps * fragments,
        fragments=fragments,
        delay_steps=min(sync.delay_steps, round_steps - 1),
        in_flight=sync.in_flight,
    )


def compare(
    candidate: Candidate, circumstances: Circumstances, seed: int, say: Callable[[str], None]
) -> ComparedCandidate:
    """Estimate and simulate a candidate; `say` is told what is simulated."""
    if candidate.job.sync.partition == "contiguous":
        even = replace(circumstances.model, parts={})
        circumstances = replace(circumstances, model=even)
    figures = estimate(candidate.settings, circumstances)
    scenario = scenario_of(candidate, circumstances, seed)
    rounds = scenario.job.rounds.update_rounds
    batches = rounds * candidate.settings.round_steps * circumstances.workers
    simulated_s = whole_weights_s(circumstances) + rounds * (figures.train_s + figures.wait_s)
    if batches > MOST_BATCHES or simulated_s > MOST_SIMULATED_S:
        return ComparedCandidate(candidate, figures, None, None)
    say(f"simulating {candidate.name}")
    result = simulate(scenario)
    return ComparedCandidate(candidate, figures, result, _waiting(result, candidate.settings, figures))


def scenario_of(candidate: Candidate, circumstances: Circumstances, seed: int) -> Scenario:
    """Describe a short run of a candidate; samples take no time on the link, and machines start at once."""
    settings = candidate.settings
    rounds = 2 * edge_of(settings) + STEADY_ROUNDS
    report_s = max(1.0, settings.round_steps * circumstances.step_s / REPORTS)
    lease_s = candidate.job.worker.lease_s
    if not circumstances.unreliable:
        lease_s = max(lease_s, 3 * report_s)  # No worker falls silent, so signs of life need no attention.
    sync = candidate.job.sync
    link = circumstances.link
    tables = Rounds(
        update_rounds=rounds,
        samples_between_updates=candidate.job.rounds.samples_between_updates,
        max_batch_size=candidate.job.rounds.max_batch_size,
        evaluate_every=0,
    )
    job = Job(
        rounds=tables,
        sync=Sync(
            strategy=sync.strategy,
            fragments=sync.fragments,
            stagger=sync.stagger,
            delay_steps=sync.delay_steps,
            in_flight=sync.in_flight,
            codec=sync.codec,
            downward_codec=sync.downward_codec,
            dynamic_local_steps=sync.dynamic_local_steps,
            quorum=sync.quorum,
            grace_s=sync.grace_s,
        ),
        resources=Resources(num_workers=circumstances.workers, min_workers=1),
        worker=Worker(report_every_s=report_s, lease_s=lease_s, stall_s=_NEVER_S),
    )
    return Scenario(
        name=candidate.name,
        seed=seed,
        job=job,
        model=ModelSize(parameters=circumstances.model.parameters, sample_bytes=1),
        machines=tuple(_machines(circumstances)),
        sites=(Site(name="machines", latency_ms=1000 * link.latency_s),),
        head=Head(
            up_gbps=circumstances.head.up_mbps / 1000,
            down_gbps=circumstances.head.down_mbps / 1000,
            reduce_gb_s=MERGE_GB_S,
        ),
    )


def edge_of(settings: ExchangeSettings) -> int:
    """Number of first and of last rounds that aren't like the others: exchanges begin, and all of them end."""
    return settings.in_flight + 1


def _machines(circumstances: Circumstances) -> Iterator[MachineGroup]:
    """Describe the machines of each speed."""
    link = circumstances.link
    failures = Failures(every_h=circumstances.fails_every_h, kinds=FailureKinds(kill=1.0, hang=1.0))
    for batch_s, count in Counter(circumstances.batch_s).items():
        yield MachineGroup(
            count=count,
            site="machines",
            batch_s=BatchTimes(median=batch_s),
            start_s=StartTimes(median=0.001),
            up_mbps=link.up_mbps,
            down_mbps=link.down_mbps,
            failures=failures,
        )


def _waiting(result: SimulationResult, settings: ExchangeSettings, figures: ExchangeEstimate) -> float | None:
    """Part of the time that steady rounds have beyond their batches; without the first and the last ones."""
    edge = edge_of(settings)
    steady_s = result.round_s[edge:-edge]
    if not steady_s:
        return None
    mean_s = sum(steady_s) / len(steady_s)
    return max(0.0, 1 - figures.train_s / mean_s)
