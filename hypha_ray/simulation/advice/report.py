"""Report of an advice: what was asked, the candidates side by side, other speeds, and what the figures don't cover.

The overlay of a job file is the proposals as TOML, with their reasons as comments.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

import tomli_w

from hypha_ray.simulation.advice import proposal as evidence
from hypha_ray.simulation.advice.comparison import ComparedCandidate
from hypha_ray.simulation.advice.exchange import Circumstances, ExchangeSettings, rate_text
from hypha_ray.simulation.advice.ladder import ExchangeChoice, Limits, choose, sufficient_scale
from hypha_ray.simulation.advice.proposal import Proposal, percent
from hypha_ray.simulation.result import HEADLINE
from hypha_ray.texts import counted

WIDTH = 118
"""Longest line of a comment."""
SPEEDS = (0.1, 1.0, 10.0)
"""Factors of the assumed seconds of a batch that the advice is shown for."""


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
    workers = counted(circumstances.workers, "worker")
    yield f"{workers}, {parameters} trained parameters; {1000 * link.latency_s:g} ms one way"
    yield f"links: {link} of each worker, {circumstances.head} of the head, where the parameter servers are"
    yield f"aim: workers wait for at most {percent(most_overhead)} of the time"
    shortest = min(circumstances.batch_s)
    longest = max(circumstances.batch_s)
    speeds = f"{shortest:g} s" if shortest == longest else f"{shortest:g} to {longest:g} s"
    origin = ", which is assumed: give --batch-s, as batch_s in a run's metrics.jsonl" if assumed_speed else ""
    yield f"a batch takes {speeds}{origin}"


def _candidate_rows(compared: Sequence[ComparedCandidate]) -> Iterator[tuple[str, ...]]:
    yield "settings", "H", "up / down", "fragments", "delay", "waiting", "simulated", "MB a worker and 1000 steps"
    for entry in compared:
        settings = entry.candidate.settings
        simulated = "left out" if entry.waiting is None else percent(entry.waiting)
        megabytes = entry.estimate.worker_bytes / 1e6 * 1000 / settings.round_steps
        yield (
            entry.candidate.name,
            *_columns(settings),
            percent(entry.estimate.overhead),
            simulated,
            f"{megabytes:.4g}",
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
            yield f"{problem}, on any link: coding takes {choice.estimate.coding_s:.3g} s; let the batches be larger"
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
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines
