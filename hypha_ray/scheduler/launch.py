"""From a parsed command line to a finished run: check, connect, start, watch, export."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.load import Loaded, require_complete, resolved_toml
from hypha_ray.data.catalogue import load, locate
from hypha_ray.data.manifest import Manifest
from hypha_ray.errors import DataError
from hypha_ray.garbage import uncollected
from hypha_ray.market.allocator import cluster_nodes
from hypha_ray.market.requirements import workers_to_start
from hypha_ray.optim.schedules import check_schedule, inner_steps
from hypha_ray.scheduler.advice import advice
from hypha_ray.scheduler.attempts import records
from hypha_ray.scheduler.claim import committed, is_done, settle
from hypha_ray.scheduler.cluster import connected
from hypha_ray.scheduler.resume import no_run
from hypha_ray.store.directory import RunDirectory, runs
from hypha_ray.telemetry.aim import local as local_aim
from hypha_ray.telemetry.console import Console
from hypha_ray.worker.door import check as check_door

__all__ = ["finish", "launch", "records"]

log = logging.getLogger(__name__)


def launch(loaded: Loaded, kind: str) -> None:
    """Run a job, or with ``--dry-run`` only say what it would do; `kind` names runs that have no name.

    A run that has begun goes on from its last commit; one that has all its rounds is only exported.
    """
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    if loaded.dry_run:
        dry_run(loaded.job)
        return
    require_complete(loaded.job)
    job = named(loaded.job, kind)
    directory, dataset = RunDirectory(Path(str(job.run.dir), str(job.run.name))), locate(job.dataset)
    manifest, new = load(dataset), not directory.begun
    if loaded.resume and new:
        raise no_run(str(job.run.name), directory.path.parent)
    with ExitStack() as held:
        if not new:
            held.enter_context(directory.lock())
            settle(job, directory, manifest, loaded.resume)
        check_job(job)
        if new:
            check_fit(job, manifest)
            check_fragments(job)
        if new or not is_done(job, directory):
            with connected(str(job.run.name)):
                if new:
                    workers_to_start(job, cluster_nodes())
                    held.enter_context(directory.lock())
                    settle(job, directory, manifest, loaded.resume)
                stream = records(job, str(job.run.name), directory, dataset)
                watch(stream, Console(job.rounds.update_rounds), advice(job))
        finish(job, directory, dataset)
    print(f"run: {directory.path}")


def named(job: Job, kind: str) -> Job:
    """The job with name and folder of its run."""
    name = job.run.name or f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    return job.model_copy(update={"run": job.run.model_copy(update={"name": name, "dir": str(runs(job.run.dir))})})


def dry_run(job: Job) -> None:
    """Print the resolved job file, and hold it against itself, its model if it has one, and the cluster."""
    print(resolved_toml(job))
    check_job(job)
    if job.model.repository or job.model.config is not None:
        check_fragments(job)
    for note in advice(job):
        print(f"note: {note}", file=sys.stderr)
    with connected("dry-run"):
        nodes = cluster_nodes()
        workers = workers_to_start(job, nodes)
        print(f"resources: {workers} of {job.resources.num_workers} workers fit; nodes: {len(nodes)}")


def check_job(job: Job) -> None:
    """Refuse an optimizer, a schedule, a sink or an address that can't be had, before anything starts."""
    if "aim" in job.telemetry.sinks:
        local_aim(job.telemetry.aim_repository or "")
    check_schedule(job.inner_optimizer, inner_steps(job))
    check_door(job)
    if job.inner_optimizer.name not in ("adamw", "muon", "sgd"):
        from hypha_ray.optim.optimizers import optimizer_class

        optimizer_class(job.inner_optimizer.name)


def check_fit(job: Job, manifest: Manifest) -> None:
    """Refuse a model that the dataset doesn't fit before anything starts; one that goes on has been checked already."""
    with uncollected():
        from hypha_ray.model.build import facts  # Seconds go by until torch is loaded.
        from hypha_ray.model.hub import fetch

    known = facts(job.model)
    if job.model.repository and Path(job.model.repository).expanduser().is_dir():
        fetch(job.model.repository, None, None, weights=True)  # A hub's weights are left for the nodes to fetch.
    manifest.require(known.vocab_size, known.num_labels)
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    longest, *_ = shapes.get("input_ids", (0,))
    if known.positions is not None and longest > known.positions:
        what = f"the sequences of dataset {manifest.name!r} are too long for the model"
        fix = "prepare the dataset with a shorter --seq-len, or give the model more positions"
        raise DataError("DATA024", what, f"{longest} tokens", f"up to {known.positions}", fix)
    channels, *_ = shapes.get("images", (known.channels,))
    if known.channels not in (None, channels):
        what = f"the images of dataset {manifest.name!r} don't fit the model"
        fix = "set num_channels in model.config, or prepare the images for this model"
        raise DataError("DATA025", what, f"{channels} channels", f"{known.channels}", fix)


def check_fragments(job: Job) -> None:
    """Refuse more fragments than the model can be cut into, before anything starts."""
    if job.sync.fragments == 1:
        return
    with uncollected():
        from hypha_ray.model.build import skeleton
        from hypha_ray.model.layout import layout_of
    layout_of(skeleton(job.model), job.sync.fragments, job.sync.partition)


def watch(stream: Iterator[dict[str, Any]], console: Console, notes: Iterable[str] = ()) -> None:
    """Show a run while it goes on, and before it these notes, once it has begun."""
    summary, told = None, set()
    try:
        for record in stream:
            for note in notes:
                console.note(note)
            notes = ()
            if record["kind"] != "step":
                log.info("%s", record)
            match record["kind"]:
                case "status":
                    console.status(record["text"])
                case "step":
                    console.progress(record)
                case "round":
                    console.round(record)
                case "eval":
                    console.eval(record)
                case "problem" if record["text"] not in told:
                    told.add(record["text"])
                    console.note(record["text"])
                case "summary":
                    summary = record
    finally:
        console.close(summary)


def finish(job: Job, directory: RunDirectory, dataset: Path) -> None:
    """Save the trained model as transformers does, and draw the plots."""
    with uncollected():  # What comes last is loaded last: a run that goes on, goes on at once.
        from hypha_ray.model.export import export
        from hypha_ray.model.preprocess import load_preprocessor
        from hypha_ray.store.snapshots import load_snapshot
        from hypha_ray.telemetry.plots import draw

    preprocessor = load_preprocessor(job.preprocessor, dataset, job.model)
    snapshot = load_snapshot(directory.path, committed(directory) - 1)
    export(job.model, preprocessor, snapshot.tensors, directory.path / "model", job.run.seed)
    draw(directory.path)
