"""Simulations of a recorded run with other settings, and advice on a job's exchange, from command line to result.

The sizes of a run's model and data come from its dataset's manifest, and from the model's skeleton.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypha_ray.config import Job
from hypha_ray.config.entry_point import Phases, print_notes, require_writable, write_result
from hypha_ray.config.keys import shown
from hypha_ray.config.load import PROVENANCE, load
from hypha_ray.config.schema import beside_largest
from hypha_ray.data.manifest import MANIFEST, Manifest, read_manifest
from hypha_ray.driver.run_folders import existing_run
from hypha_ray.errors import ConfigError, HubError, HyphaError
from hypha_ray.files import uncollected
from hypha_ray.simulation.advice_report import overlay_text, report_lines
from hypha_ray.simulation.calibration import Calibration, calibrate
from hypha_ray.simulation.exchange import ModelShape
from hypha_ray.simulation.options import (
    Advise,
    Trial,
    circumstances_of,
    parse_advise,
    parse_duration_s,
    parse_trials,
    require_fast,
    split_arguments,
)
from hypha_ray.simulation.predictions import as_json, lines, predict
from hypha_ray.simulation.proposal import (
    Proposal,
    check_advisable,
    global_batch,
    limits_of,
    long_samples,
    proposals,
    with_proposals,
)
from hypha_ray.simulation.result import write_rows
from hypha_ray.simulation.run_scenario import FLOAT32_BYTES, DataSize
from hypha_ray.telemetry.sinks.files import read_json
from hypha_ray.types.data import is_trained

if TYPE_CHECKING:
    from hypha_ray.simulation.advice_report import ComparedCandidate

FRAGMENTS = (2, 4, 8)
"""Numbers of fragments that may be proposed."""


class RunSizes:
    """Gives sizes under other settings of a run.

    Args:
        folder: the run directory.

    """

    def __init__(self, folder: Path) -> None:
        self._manifests = _manifests(folder)
        self._fragments: dict[tuple[int, str], tuple[int, ...]] = {}
        """Parameters of each fragment, by the number of fragments and the partition."""

    def __call__(self, job: Job) -> DataSize:
        """Sizes under a job.

        Raises:
            ConfigError: MODEL009, the model has fewer tensors or layers than fragments.

        """
        parameters: tuple[int, ...] = ()
        notes: tuple[str, ...] = ()
        if job.sync.fragments > 1:
            key = job.sync.fragments, job.sync.partition
            if key not in self._fragments:
                self._fragments[key] = _fragment_parameters(job)
            parameters = self._fragments[key]
            if not parameters:
                notes = ("the model can't be built here, so its fragments are taken to be of even size",)
        epoch_samples = _mixture_epoch(job, self._manifests)
        if job.rounds.epochs is not None and job.dataset.mix and epoch_samples is None:
            notes += ("datasets of the mixture aren't there, so an epoch is taken to have all samples once",)
        if not self._manifests:
            return DataSize(fragment_parameters=parameters, notes=notes)
        slice_samples = max(info.samples for manifest in self._manifests for info in manifest.of("train"))
        sample_bytes = max(manifest.sample_bytes for manifest in self._manifests)
        return DataSize(sample_bytes, slice_samples, epoch_samples, parameters, notes)


def _manifests(folder: Path) -> list[Manifest]:
    """Manifests of the run's dataset, or of those of its mixture, as far as they are on this machine."""
    dataset = read_json(folder / PROVENANCE).get("dataset") or {}
    manifests: list[Manifest] = []
    for folder_name in dataset.get("places") or ():
        path = Path(folder_name)
        if (path / MANIFEST).is_file():
            with suppress(HyphaError):
                manifests.append(read_manifest(path))
    return manifests


def _mixture_epoch(job: Job, manifests: Sequence[Manifest]) -> int | None:
    """Samples of a mixture in an epoch of its largest dataset; None without a mixture, or without all its datasets."""
    weights = [share.weight for share in job.dataset.mix]
    if not weights or len(manifests) != len(weights):
        return None
    sizes = [sum(info.samples for info in manifest.of("train")) for manifest in manifests]
    return max(sizes) + beside_largest(sizes, weights, epochs=1)


def _fragment_parameters(job: Job) -> tuple[int, ...]:
    """Parameters of each fragment, from the model on torch's meta device; empty if it can't be built here."""
    from hypha_ray.model.layout import layout_of
    from hypha_ray.model.lora import sketch_trained

    try:
        network = sketch_trained(job)
    except HyphaError:
        return ()
    layout = layout_of(network, job.sync.fragments, job.sync.partition)
    return tuple(layout.bytes(fragment) // FLOAT32_BYTES for fragment in range(job.sync.fragments))


def answers(
    run: str,
    tries: Sequence[str] = (),
    deadline: str | None = None,
    budget: float | None = None,
    file: Path | None = None,
) -> Iterator[str]:
    """Lines for a console; the JSON file is written before the first of them.

    Args:
        run: name or directory of the run.
        tries: settings as KEY=VALUE[,KEY=VALUE…], one text for each row.
        deadline: longest time, such as 6h; None without a limit.
        budget: highest cost; None without a limit.
        file: JSON file for the results; None: none is written.

    Raises:
        CheckpointError: CKPT001, there is no such run; SIM001, it is too short.
        ConfigError: a setting or a limit is wrong, or the run can't tell its effect.

    """
    trials = parse_trials(tries)
    deadline_s = None if deadline is None else parse_duration_s(deadline)
    folder = existing_run(run, None)
    fit = calibrate(folder)
    _check_budget(budget, fit, trials)
    with Phases() as phases:
        what_if = predict(fit, folder, trials, RunSizes(folder), lambda label: phases.begin(f"simulating: {label}"))
    if file is not None:
        write_rows(as_json(what_if), file)
    yield from lines(what_if, deadline_s, budget)


def _check_budget(budget: float | None, fit: Calibration, trials: Sequence[Trial]) -> None:
    """Refuse a budget that no cost can be held against.

    Raises:
        ConfigError: CFG003, it isn't above 0; CFG011, no machine has a price.

    """
    if budget is None:
        return
    if not budget > 0:
        raise ConfigError("CFG003", "--budget is out of range", str(budget), "a number above 0", "give a price")
    priced_keys = [key for trial in trials for key, _ in trial.scenario if key.endswith(".price")]
    if not priced_keys and not any(worker.price for worker in fit.workers):
        problem = "--budget needs prices, and no lease of the run has one"
        raise ConfigError("CFG011", problem, fix="give prices per hour, as --try machines.price=2.5, or leave it out")


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
    loaded_job = load(of_job)
    print_notes(loaded_job.notes)
    check_advisable(loaded_job.job)
    job, samples = _with_length(loaded_job.job)
    if options.from_ is not None:
        options = replace(options, batch_s=_batch_times_of(options.from_, job))
        print_notes([f"the times of a batch are those of run {options.from_}"])
    from hypha_ray.simulation.advice_report import Candidate, compare, settings_of
    from hypha_ray.simulation.ladder import choose

    circumstances_of(options, job, ModelShape(1))  # What is wrong with a link is said before libraries are loaded.
    with Phases() as phases:
        phases.begin("counting the model's parameters")
        circumstances = circumstances_of(options, job, _model_shape(options, job))
        require_fast(circumstances)
        limits = replace(limits_of(job), total_steps=max(1, samples // global_batch(job)))
        choice = choose(circumstances, limits, options.overhead)
        proposed = proposals(job, circumstances, choice)
        advised = _verified(of_job, proposed)
        candidates = [
            Candidate("proposed", choice.settings, with_proposals(job, proposed)),
            Candidate("the job as it is", settings_of(job), job),
        ]
        compared = [compare(candidate, circumstances, options.seed, phases.begin) for candidate in candidates]
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


def _with_length(job: Job) -> tuple[Job, int]:
    """The job with the number of rounds that its epochs take on its dataset, and the samples of its long rounds.

    Raises:
        HyphaError: the job has epochs, and its dataset isn't given or can't be read.

    """
    if job.rounds.epochs is None:
        return job, long_samples(job)
    if not job.dataset.given:
        fix = "give dataset.path, or rounds.update_rounds in place of epochs"
        raise ConfigError("CFG012", "rounds.epochs needs the size of the dataset", fix=fix)
    from hypha_ray.driver.data_source import opened
    from hypha_ray.driver.dataset_settings import samples_in_epochs, with_rounds

    with opened(job.dataset) as source:
        job = with_rounds(job, source.manifest, None)
        return job, samples_in_epochs(job, source.manifest) - job.rounds.warmup_rounds * job.samples(0)


def _batch_times_of(run: str, job: Job) -> list[float]:
    """Seconds of a batch of each worker of a run, or their mean if the job has another number of workers.

    Raises:
        CheckpointError: CKPT001, there is no such run; SIM001, it is too short.
        ConfigError: CFG011, a batch of the job is another one; SIM002, the run's records don't tell its parts.

    """
    fit = calibrate(existing_run(run, None))
    for table, key in (("rounds", "max_batch_size"), ("model", "repository"), ("model", "config")):
        of_run = getattr(getattr(fit.job, table), key)
        of_job = getattr(getattr(job, table), key)
        if of_run != of_job:
            problem = f"run {run} has another {table}.{key} than the job, so its batches take another time"
            raise ConfigError("CFG011", problem, shown(of_run), shown(of_job), "give the job's time by --batch-s")
    times_s = [worker.mean_s for worker in fit.workers]
    return times_s if len(times_s) == job.num_workers else [sum(times_s) / len(times_s)]


def _model_shape(options: Advise, job: Job) -> ModelShape:
    if options.parameters is not None:
        return ModelShape(round(options.parameters))
    return shape_of_model(job)


def shape_of_model(job: Job) -> ModelShape:
    """Measure what a job trains and exchanges, on torch's meta device.

    Raises:
        HyphaError: the model can't be built from its configuration, or that can't be had here.

    """
    if not job.model.repository and job.model.config is None and job.model.factory is None:
        fix = "give [model] in the job file, or --parameters 1.1e9"
        raise ConfigError("CFG012", "the job has no model, so its size isn't known", fix=fix)
    with uncollected():
        from hypha_ray.model.layout import layers_of, layout_of
        from hypha_ray.model.lora import sketch_trained

    try:
        network = sketch_trained(job)
    except HubError as error:
        fix = f"{error.fix or 'try again'}, or give the model's size by --parameters"
        raise HubError(error.code, error.what, error.got, error.allowed, fix) from None
    layout = layout_of(network)
    sizes = {entry.name: entry.size for entry in layout.entries if is_trained(entry.group)}
    layers = len(set(layers_of(sizes).values()))
    parts = {}
    for fragments in FRAGMENTS:
        if fragments <= layers:
            divided = layout_of(network, fragments, "strided")
            parts[fragments] = tuple(divided.parameters(fragment) for fragment in range(fragments))
    return ModelShape(layout.parameters(), layers, parts)


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
