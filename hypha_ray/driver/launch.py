"""Launch of a job: checks, connection to Ray, attempts, progress and export."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from hypha_ray.config import Job
from hypha_ray.config.entry_point import Phases, print_notes
from hypha_ray.config.load import Loaded, require_complete, require_secrets
from hypha_ray.data.catalogue import is_served
from hypha_ray.data.mixture import COPY
from hypha_ray.driver.attempts import records
from hypha_ray.driver.credentials import variables_in_use
from hypha_ray.driver.data_source import DataSource, opened, run_copy
from hypha_ray.driver.dataset_settings import length_note, with_classes, with_rounds, with_sample_tokens
from hypha_ray.driver.earlier_runs import compare, is_done, keep_identity, last_round, settle, with_identity
from hypha_ray.driver.forks import PlotService, draw_plots, load_libraries
from hypha_ray.driver.preflight.checks import (
    advice,
    case_of,
    check_case,
    check_end,
    check_fragments,
    check_job,
    check_plugins,
)
from hypha_ray.driver.preflight.run_costs import hourly_price, machine_lines
from hypha_ray.driver.preflight.summary import summary_of_new, summary_of_resumed
from hypha_ray.driver.ray_cluster import connected, connecting
from hypha_ray.driver.run_folders import name_run, no_run, require_free_mirror, with_run_name
from hypha_ray.driver.run_provenance import record_devices, record_start, recorded_error
from hypha_ray.driver.start import InterruptionReport, RayService
from hypha_ray.files import uncollected
from hypha_ray.market.auction import possible_nodes
from hypha_ray.market.buyer import workers_to_hire
from hypha_ray.market.cluster import own_node, speeds_of
from hypha_ray.market.requirements import NodeResources
from hypha_ray.market.selection import UNKNOWN
from hypha_ray.rl.dataflow.graph import step_text
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.console import Console

if TYPE_CHECKING:
    from hypha_ray.driver.preflight.compatibility import Case

__all__ = ["finish", "records", "run_in", "run_job"]

log = logging.getLogger(__name__)

AT_THE_END = (
    "huggingface_hub.repocard_data",
    "hypha_ray.driver.saved_models",
    "hypha_ray.history.report",
    "hypha_ray.model.tokenizers",
    "hypha_ray.model.saved_model",
    "hypha_ray.store.mirror_courier",
)
"""Modules that only the end of a run needs."""


def run_job(loaded_job: Loaded, job_name: str, check: Callable[[], None] | None = None) -> Path:
    """Run a job and return its run directory; a run with commits resumes, one with all its rounds is only exported.

    Args:
        loaded_job: the job.
        job_name: beginning of the names of runs that have none.
        check: called at least once a second while the run trains; an exception of it ends the run.

    """
    print_notes(loaded_job.notes)
    job, directory = name_run(loaded_job.job, job_name)
    interruption = InterruptionReport(job, directory)
    with interruption.reported(), Phases(began_s=time.monotonic()) as phases:
        run_in(loaded_job, (job, directory), phases, interruption, check=check)
    return directory.path


def run_in(
    loaded: Loaded,
    run: tuple[Job, RunDirectory],
    phases: Phases,
    interruption: InterruptionReport,
    command: Sequence[str] | None = None,
    service: RayService | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Run a job as `run_job`, in the run directory that `name_run` returns with it; `service` is our starting Ray."""
    job, directory = run
    phases.begin("checking the model and the data")
    with ExitStack() as stack:
        source = _open_source(job, directory, stack)
        is_new = not directory.begun
        job = with_sample_tokens(with_classes(job, source.manifest), source.manifest)
        if loaded.resume and is_new:
            raise no_run(str(job.run.name), directory.path.parent)
        if not is_new:
            stack.enter_context(directory.lock())
        job = with_rounds(job, source.manifest, directory)
        interruption.rounds = job.rounds.update_rounds
        if not is_new:
            settle(job, directory, source.manifest, loaded.resume)
        check_job(job)
        job_without_identity = job
        trains = is_new or not is_done(job, directory)
        plots = stack.enter_context(_plot_service(job, command is not None))
        if trains:
            _fork_workers(job, service, interruption)
            print_notes(filter(None, [*check_plugins(job), length_note(job, source.manifest)]))
            job = with_identity(job, directory, source, loaded.resume)
        case = _checked_case(job, source) if is_new else None
        if trains:
            require_secrets(job)
            _check_destinations(job)
            phases.begin(f"{connecting()} Ray")
            with connected(str(job.run.name), service=service), interruption.reported():
                if is_new:
                    workers_to_hire(job, possible_nodes(), own_node(), speeds_of(job, source.manifest.shapes))
                    _begin(job_without_identity, directory, source, stack)
                _record(job, directory, source, command, stack)
                phases.begin("estimating memory, time and cost")
                _print_summary(job, directory, source, case)
                stream = records(job, str(job.run.name), directory, source, check)
                _train(job, directory, phases, stream, _with_late_starts(service, plots, directory.path, stream))
        with recorded_error(directory):
            finish(with_rounds(job, source.manifest, directory), directory, source, phases.begin, plots)
    phases.end()
    print(f"run: {directory.path}")


def _begin(job: Job, directory: RunDirectory, source: DataSource, stack: ExitStack) -> None:
    """Make the directory of a new run, which other drivers are kept from until `stack` ends."""
    stack.enter_context(directory.lock())
    settle(job, directory, source.manifest, resume=False)


def _checked_case(job: Job, source: DataSource) -> Case:
    """Check the model of a new run, and return it."""
    case = case_of(job, source)
    print_notes(check_case(case))
    check_end(job, source.folder)
    return case


def _plot_service(job: Job, is_command: bool) -> AbstractContextManager[PlotService | None]:
    """Process that draws beside the run; None if the job wants no plots."""
    if not job.telemetry.plots:
        return nullcontext()
    return closing(PlotService(is_command))


def _fork_workers(job: Job, service: RayService | None, interruption: InterruptionReport) -> None:
    """Load libraries, once for this process and for the workers of our own Ray, before there are threads."""
    if service is not None and service.can_fork:
        with interruption.ending_at_once():
            load_libraries(job)
        service.fork_workers()


def _train(
    job: Job,
    directory: RunDirectory,
    phases: Phases,
    stream: Generator[dict[str, Any], None, None],
    with_late_starts: Iterator[dict[str, Any]],
) -> None:
    """Train, and show it on the console; `with_late_starts` has the records of the stream."""
    print(f"run: {directory.path}", flush=True)
    phases.end()
    has_console = "console" in job.telemetry.sinks
    console = Console(job.rounds.update_rounds, rounds=has_console, began_s=phases.began_s)
    with recorded_error(directory), closing(stream):
        watch(with_late_starts, console, advice(job, gpus_of(possible_nodes())))
    phases.begin("disconnecting from Ray")


def _with_late_starts(
    service: RayService | None, plots: PlotService | None, run_directory: Path, stream: Iterator[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The records of a run; modules and processes that its start didn't wait for are started after the first round.

    After the last record the plots are begun.
    """
    is_first_round = True
    for record in stream:
        if record["kind"] == "round" and is_first_round:
            is_first_round = False
            _load_end()
            if plots is not None:
                plots.load()
            if service is not None:
                service.start_rest()
        yield record
    if plots is not None:
        plots.draw(run_directory)


def _load_end() -> None:
    """Load the modules that a run needs after its last round, while workers train; the end reports missing ones."""
    with uncollected():
        for name in AT_THE_END:
            with suppress(ImportError):
                import_module(name)


def _open_source(job: Job, directory: RunDirectory, stack: ExitStack) -> DataSource:
    """The job's dataset; a run with all its rounds needs only its copy of a dataset from another machine."""
    if directory.begun and (directory.path / COPY).is_dir():
        source = run_copy(job.dataset, directory)
        if is_done(with_rounds(job, source.manifest, directory), directory):
            return source
    if is_served(job.dataset):
        stack.enter_context(connected(str(job.run.name)))
    return stack.enter_context(opened(job.dataset))


def _print_summary(job: Job, directory: RunDirectory, source: DataSource, case: Case | None) -> None:
    """Print the summary of a run, with `case` if it begins; its actors aren't started yet."""
    nodes = possible_nodes()
    price = hourly_price(job, nodes, own_node(), speeds_of(job, source.manifest.shapes))
    if case is None:
        summary = summary_of_resumed(job, source, directory, price)
    else:
        summary = summary_of_new(job, source, case, nodes, price)
    print(summary.text())
    print_notes(summary.warnings)


def dry_run(
    loaded_job: Loaded, phases: Phases, service: RayService | None = None, show: Callable[[str], None] = print
) -> None:
    """Run the checks of a start; a partial job file is checked as far as possible.

    `service` is a Ray of our own that is starting, and `show` prints the summary.
    """
    job = loaded_job.job
    phases.begin("checking the model and the data")
    check_job(job)
    print_notes(check_plugins(job))
    has_model = bool(job.model.repository or job.model.config or job.model.factory)
    has_data = job.dataset.given
    case = None
    source = None
    with ExitStack() as stack:
        if has_data and is_served(job.dataset):
            stack.enter_context(connected("dry-run"))
        if has_data:
            source = stack.enter_context(opened(job.dataset))
        if source is None and has_model:
            check_fragments(job)
        elif source is not None and has_model:
            require_complete(job)
            job = with_sample_tokens(with_classes(job, source.manifest), source.manifest)
            job = _with_rounds_of_run(job, source)
            _compare_with_run(job, loaded_job.resume, source)
            case = case_of(job, source)
            print_notes(check_case(case))
            check_end(job, source.folder)
        _check_destinations(job)
        print_notes(_missing_parts(loaded_job, has_model, has_data))
        phases.begin(f"{connecting()} Ray")
        stack.enter_context(connected("dry-run", service=service))
        nodes = possible_nodes()
        print_notes(advice(job, gpus_of(nodes)))
        speeds = UNKNOWN if source is None else speeds_of(job, source.manifest.shapes)
        price = hourly_price(job, nodes, own_node(), speeds)
        summary = summary_of_new(job, source, case, nodes, price)
        print_notes(summary.warnings)
        show(summary.text())
        if job.rl.algorithm is not None:
            print(step_text(job.rl))
        for line in machine_lines(job, nodes, own_node(), speeds):
            print(line)
        phases.end()


def _missing_parts(loaded_job: Loaded, has_model: bool, has_data: bool) -> Iterator[str]:
    """Notes about parts that a partial job file lacks."""
    origin = ", ".join(loaded_job.files) or "the command line"
    for part, is_there in (("model", has_model), ("dataset", has_data)):
        if not is_there:
            yield f"{origin}: the job has no {part}, so what depends on one isn't checked"


def _with_rounds_of_run(job: Job, source: DataSource) -> Job:
    """The job with the number of rounds that its epochs take, in a run that may have begun."""
    if job.run.name is None:
        return with_rounds(job, source.manifest, None)
    named_job = with_run_name(job, "")
    return with_rounds(job, source.manifest, RunDirectory(Path(str(named_job.run.dir), str(named_job.run.name))))


def _compare_with_run(job: Job, resume: bool, source: DataSource) -> None:
    """Refuse the name of another job's run."""
    if job.run.name is None:
        return
    job = with_run_name(job, "")
    directory = RunDirectory(Path(str(job.run.dir), str(job.run.name)))
    if directory.begun:
        compare(job, directory, source.manifest, resume)
        with_identity(job, directory, source, resume)


def gpus_of(nodes: Iterable[NodeResources]) -> float:
    """Number of GPUs that nodes have."""
    return sum(node.total.get("GPU", 0.0) for node in nodes)


def watch(stream: Iterator[dict[str, Any]], console: Console, notes: Iterable[str] = ()) -> None:
    """Show the progress of a run, after these notes."""
    summary = None
    try:
        for record in stream:
            for note in notes:
                console.note(note)
            notes = ()
            if record["kind"] != "step":
                log.info("%s", record.get("text", record))
            match record["kind"]:
                case "status":
                    console.status(record["text"])
                case "step":
                    console.progress(record)
                case "round":
                    console.round(record)
                case "eval":
                    console.eval(record)
                case "news":
                    console.note(record["text"])
                case "summary":
                    summary = record
    finally:
        console.close(summary)


def finish(
    job: Job,
    directory: RunDirectory,
    source: DataSource,
    begin: Callable[[str], None] = lambda phase: None,
    plots: PlotService | None = None,
) -> None:
    """Save the trained model by transformers; draw plots, write the report, upload and mirror if the job says so.

    `begin` is called with each phase as it begins; `plots` draws in another process; None: plots are drawn here.
    """
    begin("saving the model")
    if plots is not None:
        plots.draw(directory.path)
    with uncollected():  # Loaded last, so that a resumed run trains at once.
        from hypha_ray.history.report import notes_of_last_report
        from hypha_ray.store.mirror import Mirror
        from hypha_ray.store.mirror_courier import deliver

    export_round(job, directory, source, last_round(job, directory), directory.path / "model")
    if job.checkpoint.best:
        begin("saving the best model")
        _export_best(job, directory, source)
    if job.telemetry.plots:
        begin("drawing the plots")
        print_notes(draw_plots(directory.path) if plots is None else plots.notes(directory.path))
    if job.telemetry.report:
        print_notes(notes_of_last_report(directory.path))
    if job.checkpoint.push is not None:
        begin("uploading the model")
        _upload(job, directory)
    if job.checkpoint.mirror:
        begin("copying the run to its mirror")
        problem = deliver(Mirror(job.checkpoint.mirror, directory.path))
        if problem:
            print_notes([problem])


def _record(
    job: Job, directory: RunDirectory, source: DataSource, command: Sequence[str] | None, stack: ExitStack
) -> None:
    """Write the inputs of the run, its command and its nodes to the run directory; its devices when the stack ends."""
    keep_identity(job, directory)
    source.keep(directory)
    record_start(directory, source, command, ray.nodes(), variables_in_use(job))
    stack.callback(record_devices, directory)


def _check_destinations(job: Job) -> None:
    """Refuse an upload at the end that can't succeed, and a mirror that has another run of that name."""
    require_free_mirror(job)
    if job.checkpoint.push is not None:
        from hypha_ray.driver.saved_models import check_upload

        print_notes(check_upload(job.checkpoint.push))


def _upload(job: Job, directory: RunDirectory) -> None:
    """Upload the model, or the best one if the job keeps it, and print a note about the result."""
    from hypha_ray.driver.saved_models import upload

    folder = directory.path / "model-best"
    if not job.checkpoint.best or not folder.is_dir():
        folder = directory.path / "model"
    message = f"{folder.name} of run {job.run.name}"
    print_notes([upload(folder, str(job.checkpoint.push), message)])


def _export_best(job: Job, directory: RunDirectory, source: DataSource) -> None:
    """Save the model with the best evaluation, and print its round."""
    from hypha_ray.store.commit_writer import Evaluations
    from hypha_ray.store.snapshots import rounds

    evaluations = Evaluations(directory.path)
    best = evaluations.best
    if best is None:
        return
    objective = evaluations.objective.name
    description = f"after round {best['round'] + 1}, with {objective} {best[objective]:.4g}"
    if best["round"] in rounds(directory.path):
        export_round(job, directory, source, best["round"], directory.path / "model-best")
        print_notes([f"model-best is the model {description}"])
    else:
        print_notes([f"the best model was that {description}; its checkpoint isn't there, so there is no model-best"])


def export_round(
    job: Job, directory: RunDirectory, source: DataSource, round: int, folder: Path, compatible: int | None = None
) -> None:
    """Save the weights after a committed round in a folder, by transformers; `compatible` names an older release."""
    with uncollected():
        from hypha_ray.driver.data_source import job_preprocessor
        from hypha_ray.driver.saved_models import write_cards
        from hypha_ray.model.saved_model import export
        from hypha_ray.server.payloads import weights_to_save
        from hypha_ray.store.snapshots import load_snapshot

    preprocessor = job_preprocessor(job, source)
    snapshot = load_snapshot(directory.path, round)
    export(job, preprocessor, weights_to_save(job, snapshot), folder, compatible, round)
    try:
        write_cards(folder, job, source.manifest, directory, round)
    except OSError as error:  # The model itself is saved; its card only describes it.
        print_notes([f"the model's card was not written: {error.strerror or error}"])
