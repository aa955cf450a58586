"""Report of an advice on an exchange: what was asked, simulated runs of candidates, and what figures don't cover."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import tomli_w

from hypha_ray.config import Job
from hypha_ray.config.resources import Resources, Worker
from hypha_ray.config.schema import Rounds, Sync
from hypha_ray.simulation import proposal as evidence
from hypha_ray.simulation.exchange import (
    MERGE_GB_S,
    Circumstances,
    ExchangeEstimate,
    ExchangeSettings,
    estimate,
    rate_text,
    whole_weights_s,
)
from hypha_ray.simulation.ladder import ExchangeChoice, Limits, choose, sufficient_scale
from hypha_ray.simulation.proposal import Proposal, percent
from hypha_ray.simulation.result import HEADLINE, SimulationResult, simulate
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
from hypha_ray.texts import counted, significant

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
WIDTH = 118
"""Longest line of a comment."""
SPEEDS = (0.1, 1.0, 10.0)
"""Factors of the assumed seconds of a batch that the advice is shown for."""


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
        even_model = replace(circumstances.model, parts={})
        circumstances = replace(circumstances, model=even_model)
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


def overlay_text(proposals: Sequence[Proposal], heading: Sequence[str]) -> str:
    """Write a job file with the proposed keys.

    Args:
        proposals: keys with values and reasons.
        heading: lines of the comment before them.

    """
    lines = [comment_line(line) for line in heading]
    tables: dict[str, list[Proposal]] = {}
    for proposal in proposals:
        table, _, _ = proposal.key.rpartition(".")
        tables.setdefault(table, []).append(proposal)
    for table, members in tables.items():
        lines += ["", f"[{table}]"]
        for proposal in members:
            lines += _entry(proposal)
    return "\n".join(lines) + "\n"


def comment_line(text: str) -> str:
    """Write a line of a comment."""
    return f"# {text}".rstrip()


def _entry(proposal: Proposal) -> Iterator[str]:
    """Lines of a key: its comments, and the key with its value."""
    for text in (proposal.reason, *proposal.evidence):
        if text:
            yield from textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="#   ")
    _, _, name = proposal.key.rpartition(".")
    yield tomli_w.dumps({name: proposal.value}).rstrip()


def report_lines(
    circumstances: Circumstances,
    limits: Limits,
    most_overhead: float,
    assumed_speed: bool,
    choice: ExchangeChoice,
    compared: Sequence[ComparedCandidate],
) -> list[str]:
    """Lines of the report; the first one is that of every simulation.

    Args:
        circumstances: model, fleet and links.
        limits: what the job allows.
        most_overhead: part of the time that workers should wait at most.
        assumed_speed: whether the seconds of a batch were assumed.
        choice: the proposed settings.
        compared: the proposed settings first, and those that they are held against.

    """
    lines = [HEADLINE, "", *_question(circumstances, most_overhead, assumed_speed), ""]
    lines += _table(_candidate_rows(compared))
    lines += ["", *_notes(circumstances, limits, most_overhead, choice)]
    if assumed_speed:
        lines += ["", "the same for other speeds:"]
        lines += _table(_speed_rows(circumstances, limits, most_overhead))
    return lines


def _question(circumstances: Circumstances, most_overhead: float, assumed_speed: bool) -> Iterator[str]:
    parameters = evidence.size_text(circumstances.model.parameters)
    link = circumstances.link
    workers_text = counted(circumstances.workers, "worker")
    yield f"{workers_text}, {parameters} trained parameters; {1000 * link.latency_s:g} ms one way"
    yield f"links: {link} of each worker, {circumstances.head} of the head, where the parameter servers are"
    yield f"aim: workers wait for at most {percent(most_overhead)} of the time"
    shortest = min(circumstances.batch_s)
    longest = max(circumstances.batch_s)
    speeds = f"{shortest:g} s" if shortest == longest else f"{shortest:g} to {longest:g} s"
    origin = ", which is assumed: give --batch-s, as batch_s in a run's metrics.jsonl" if assumed_speed else ""
    yield f"a batch takes {speeds}{origin}"


def _candidate_rows(entries: Sequence[ComparedCandidate]) -> Iterator[tuple[str, ...]]:
    yield "settings", "H", "up / down", "fragments", "delay", "waiting", "simulated", "MB a worker and 1000 steps"
    for entry in entries:
        settings = entry.candidate.settings
        simulated = "left out" if entry.waiting is None else percent(entry.waiting)
        megabytes = entry.estimate.worker_bytes / 1e6 * 1000 / settings.round_steps
        yield (
            entry.candidate.name,
            *_columns(settings),
            percent(entry.estimate.overhead),
            simulated,
            significant(megabytes, 4),
        )


def _columns(settings: ExchangeSettings) -> tuple[str, ...]:
    delay = str(settings.delay_steps)
    if settings.in_flight > 1:
        delay = f"{settings.in_flight - 1} round + {delay}"
    return str(settings.steps), f"{settings.codec} / {settings.downward_codec}", str(settings.fragments), delay


def _speed_rows(circumstances: Circumstances, limits: Limits, most_overhead: float) -> Iterator[tuple[str, ...]]:
    yield "s a batch", "H", "up / down", "fragments", "delay", "waiting"
    for factor in SPEEDS:
        batch_s = tuple(factor * seconds for seconds in circumstances.batch_s)
        choice = choose(replace(circumstances, batch_s=batch_s), limits, most_overhead)
        yield f"{min(batch_s):g}", *_columns(choice.settings), percent(choice.estimate.overhead)


def _notes(circumstances: Circumstances, limits: Limits, most_overhead: float, choice: ExchangeChoice) -> Iterator[str]:
    yield "waiting: estimated from sizes, rates and the coding times of docs/communication.md, in steady rounds"
    yield "simulated: by the scheduler on a virtual clock, with even fragments, without coding, samples and evaluations"
    if not choice.suffices:
        factor = sufficient_scale(circumstances, limits, most_overhead)
        problem = f"no measured setting has workers wait for {percent(most_overhead)} or less"
        if factor is None:
            coding_s = significant(choice.estimate.coding_s, 3)
            yield f"{problem}, on any link: coding takes {coding_s} s; let the batches be larger"
        else:
            link = rate_text(factor * circumstances.link.down_mbps)
            head = rate_text(factor * circumstances.head.down_mbps)
            yield f"{problem}: it takes {link} at workers and {head} at the head"
    if choice.settings.steps >= limits.total_steps // 10:
        yield f"the run has {limits.total_steps} inner steps a worker; H is held to a tenth of them"
    loss = evidence.loss_beside_data_parallelism(circumstances.model.parameters, circumstances.workers)
    yield loss or "the loss beside data parallelism isn't published for such a model and fleet"


def _table(rows: Iterator[tuple[str, ...]]) -> list[str]:
    """Rows in columns, as lines."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded_cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded_cells).rstrip())
    return lines
