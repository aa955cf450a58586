"""Advice on a job's exchange, from a command line to a job file that goes behind the job's own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypha_ray.config import Job
from hypha_ray.config.cli.output import Phases, print_notes, require_writable, write_result
from hypha_ray.config.keys import shown
from hypha_ray.config.load import load
from hypha_ray.errors import ConfigError
from hypha_ray.simulation.advice.exchange import ModelShape
from hypha_ray.simulation.advice.options import Advise, circumstances_of, parse_advise, split_arguments
from hypha_ray.simulation.advice.overlay import overlay_text
from hypha_ray.simulation.advice.proposal import Proposal, check_advisable, limits_of, proposals, with_proposals
from hypha_ray.simulation.result import write_rows

if TYPE_CHECKING:
    from hypha_ray.simulation.advice.comparison import ComparedCandidate


def advise(arguments: Sequence[str], doc: str | None) -> None:
    """Print the report and the proposed settings of a command line with ``--advise``.

    Args:
        arguments: the command line, with job files and flags of the job.
        doc: description of the job script, for ``--help``.

    Raises:
        HyphaError: the command line, the job or its model is wrong.

    """
    of_advice, of_job = split_arguments(arguments)
    options = parse_advise(of_advice, doc)
    require_writable("--json", options.json)
    require_writable("--out", options.out)
    loaded = load(of_job)
    job = loaded.job
    print_notes(loaded.notes)
    check_advisable(job)
    from hypha_ray.simulation.advice.comparison import Candidate, compare, settings_of
    from hypha_ray.simulation.advice.ladder import choose
    from hypha_ray.simulation.advice.report import report_lines

    circumstances_of(options, job, ModelShape(1))  # What is wrong with a link is said before libraries are loaded.
    phases = Phases()
    phases.begin("counting the model's parameters")
    circumstances = circumstances_of(options, job, _model_shape(options, job))
    limits = limits_of(job)
    choice = choose(circumstances, limits, options.overhead)
    proposed = proposals(job, circumstances, choice)
    advised = _verified(of_job, proposed)
    candidates = [
        Candidate("proposed", choice.settings, with_proposals(job, proposed)),
        Candidate("the job as it is", settings_of(job), job),
    ]
    compared = [compare(candidate, circumstances, options.seed, phases.begin) for candidate in candidates]
    phases.end()
    report = report_lines(circumstances, limits, options.overhead, not options.batch_s, choice, compared)
    print_notes(_overridden(advised, proposed))
    if options.json is not None:
        write_rows(_json_rows(compared, proposed), options.json)
    if options.out is None:
        print(overlay_text(proposed, report), end="")
        return
    write_result("--out", options.out, overlay_text(proposed, report))
    print(*report, sep="\n")
    print(f"\nproposed settings: {options.out}")


def _model_shape(options: Advise, job: Job) -> ModelShape:
    if options.parameters is not None:
        return ModelShape(round(options.parameters))
    from hypha_ray.driver.preflight.model_shape import model_shape

    return model_shape(job)


def _verified(of_job: Sequence[str], proposed: Sequence[Proposal]) -> Job:
    """Load the job with the proposed settings behind its files, by the parser of every job."""
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder) / "overlay.toml"
        overlay.write_text(overlay_text(proposed, ()), encoding="utf-8")
        return load([*of_job, "@", str(overlay)]).job


def _overridden(advised: Job, proposed: Iterable[Proposal]) -> Iterator[str]:
    """Notes on flags of the job that win over proposed settings, as they do over any file."""
    for proposal in proposed:
        table, _, name = proposal.key.partition(".")
        value = getattr(getattr(advised, table), name)
        if value != proposal.value:
            flag = f"--{proposal.key} {shown(value)}"
            yield f"{flag} wins over the proposed {shown(proposal.value)}: leave the flag out"


def _json_rows(compared: Sequence[ComparedCandidate], proposed: Sequence[Proposal]) -> list[dict[str, Any]]:
    """Results of the simulated runs; the first of them has the proposals with their reasons."""
    rows: list[dict[str, Any]] = [entry.as_json() for entry in compared if entry.result is not None]
    if not rows:
        problem = "the simulated runs were left out, since they would take minutes, so there are no figures for --json"
        raise ConfigError("CFG003", problem, fix="ask for fewer workers, or leave --json out")
    rows[0]["advice"] = [proposal.as_json() for proposal in proposed]
    return rows
