"""From a parsed command line to a finished run: check, connect, start, watch, export."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.config import Job
from hypha_ray.config.load import Loaded, require_complete, resolved_toml
from hypha_ray.data.catalogue import load, locate
from hypha_ray.data.manifest import Manifest
from hypha_ray.errors import ClusterError, DataError, HyphaError
from hypha_ray.market.allocator import cluster_nodes
from hypha_ray.market.requirements import workers_to_start
from hypha_ray.model.build import facts
from hypha_ray.model.export import export
from hypha_ray.model.hub import fetch
from hypha_ray.model.preprocess import load_preprocessor
from hypha_ray.scheduler.actor import Scheduler
from hypha_ray.scheduler.cluster import connected, first_line
from hypha_ray.store.directory import RunDirectory, home
from hypha_ray.store.snapshots import load_snapshot
from hypha_ray.telemetry.aim import local as local_aim
from hypha_ray.telemetry.console import Console
from hypha_ray.telemetry.plots import draw
from hypha_ray.worker.schedules import check_schedule, inner_steps

log = logging.getLogger(__name__)


def launch(loaded: Loaded, kind: str) -> None:
    """Run a job, or with ``--dry-run`` only say what it would do; `kind` names runs that have no name."""
    job = loaded.job
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    if loaded.dry_run:
        dry_run(job)
        return
    require_complete(job)
    folder = locate(job.dataset)
    check_fit(job, load(folder))
    if "aim" in job.telemetry.sinks:
        local_aim(job.telemetry.aim_repository or "")
    run = job.run.name or f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    with connected(run):
        workers_to_start(job, cluster_nodes())
        parent = Path(job.run.dir) if job.run.dir else home()
        directory = RunDirectory.create(parent, run, resolved_toml(job))
        directory.log_to_file()
        watch(records(job, run, directory, folder), Console(job.rounds.update_rounds))
    finish(job, directory, folder)
    print(f"run: {directory.path}")


def dry_run(job: Job) -> None:
    """Print the resolved job file and hold it against the cluster."""
    print(resolved_toml(job))
    with connected("dry-run"):
        nodes = cluster_nodes()
        workers = workers_to_start(job, nodes)
        print(f"resources: {workers} of {job.resources.num_workers} workers fit; nodes: {len(nodes)}")


def check_fit(job: Job, manifest: Manifest) -> None:
    """Refuse a schedule that doesn't fit the run, or a model that the dataset doesn't fit, before anything starts."""
    check_schedule(job.inner_optimizer, inner_steps(job))
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


def records(job: Job, run: str, directory: RunDirectory, dataset: Path) -> Iterator[dict[str, Any]]:
    """Start the scheduler on this node, and hand on what it streams until the run is over.

    Raises:
        HyphaError: whatever ended the run.

    """
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": "scheduler", "namespace": run, "num_cpus": 0, "scheduling_strategy": node}
    scheduler = ray.remote(Scheduler).options(**options).remote(job, run, str(directory.path), str(dataset))
    try:
        for ref in scheduler.run.remote():
            yield ray.get(ref)
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        raise cause if isinstance(cause, HyphaError) else error from None
    except RayActorError as error:
        raise ClusterError("NET003", "the scheduler died", got=first_line(error), fix="submit the job again") from None
    finally:
        ray.kill(scheduler)


def watch(stream: Iterator[dict[str, Any]], console: Console) -> None:
    """Show a run while it goes on."""
    summary = None
    try:
        for record in stream:
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
                case "summary":
                    summary = record
    finally:
        console.close(summary)


def finish(job: Job, directory: RunDirectory, dataset: Path) -> None:
    """Save the trained model as transformers does, and draw the plots."""
    preprocessor = load_preprocessor(job.preprocessor, dataset, job.model)
    snapshot = load_snapshot(directory.path, job.rounds.update_rounds - 1)
    export(job.model, preprocessor, snapshot.tensors, directory.path / "model", job.run.seed)
    draw(directory.path)
