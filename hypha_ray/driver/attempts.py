"""Attempts of a run: when a scheduler dies or falls silent, the next one resumes from the commit log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Generator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray._private.state import state
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util import list_named_actors

from hypha_ray.config import Job
from hypha_ray.config.load import with_absolute_folders
from hypha_ray.data.storage.files import Place
from hypha_ray.driver.datasets.data_source import DataSource
from hypha_ray.driver.ray_cluster import ControlService
from hypha_ray.driver.run_identity import committed
from hypha_ray.errors import ClusterError, DataError, HyphaError, LostError, OutbidError, QuarantinedError, first_line
from hypha_ray.market.cluster import on_this_node, reclaim
from hypha_ray.model.loading.tokenizer import pack, tokenizer_of
from hypha_ray.model.tasks.table import find_task
from hypha_ray.model.tasks.task import IGNORE_INDEX, SpecialTokens
from hypha_ray.scheduler.actor import Scheduler
from hypha_ray.scheduler.runtime.actor_owner import OWNER, ActorOwner
from hypha_ray.scheduler.runtime.run_actors import outliving
from hypha_ray.store.directory import RunDirectory
from hypha_ray.types import Arrays, Samples
from hypha_ray.worker.actor import FromDataset

log = logging.getLogger(__name__)

PATIENCE = 3
"""Attempts in a row without a step of any worker after which a run is given up."""
LONGEST_PATIENCE = 10
"""Attempts in a row without a new commit after which a run is given up, even with steps."""
SILENCE_S = 10
"""Seconds without an item and without a pulse after which a scheduler counts as dead."""


class SchedulerLost(Exception):
    """End of an attempt that another may follow: its scheduler died or fell silent, or an object was lost."""


def records(job: Job, run: str, directory: RunDirectory, source: DataSource) -> Generator[dict[str, Any], None, None]:
    """Run a job on this node's Ray, and yield what its schedulers stream until the run is over.

    To close it ends the scheduler and its actors, which takes a connection to Ray.

    Args:
        job: the job file.
        run: name of the run.
        directory: the run directory.
        source: the dataset.

    Raises:
        HyphaError: the error that ended the run.

    """
    job = with_absolute_folders(job)
    control = ControlService(ray.get_runtime_context().gcs_address)
    end_leftovers(run)
    owner = _here(ActorOwner, OWNER, run, max_restarts=-1).remote()
    try:
        from_dataset = specials_of(job, source), probe_samples(source) if job.worker.probe_batch_size else None
        yield from _attempts(job, run, directory, (source.places, from_dataset, owner), control)
    finally:
        ray.kill(owner)


def specials_of(job: Job, source: DataSource) -> SpecialTokens | None:
    """Return what workers need of the tokenizer, which may be only on this machine, beside the dataset.

    Masked language models need its special tokens, reinforcement learning all of it, other jobs nothing.
    """
    if job.rl.algorithm is not None:
        from hypha_ray.driver.datasets.job_tokenizer import job_preprocessor

        return pack(tokenizer_of(job_preprocessor(job, source)))
    if find_task(job.model.type).labels != "masked":
        return None
    from hypha_ray.model.loading.preprocess import load_special_tokens

    return load_special_tokens(job.preprocessor, source.folder, job.model)


def _attempts(
    job: Job,
    run: str,
    directory: RunDirectory,
    given: tuple[tuple[Place, ...], FromDataset, Any],
    control: ControlService,
) -> Iterator[dict[str, Any]]:
    """Run schedulers one after the other, with one owner for their workers and parameter servers."""
    idle = vain = 0
    while True:
        before = committed(directory)
        idle = idle + 1
        vain = vain + 1
        try:
            for record in _attempt(job, run, directory, given, control):
                idle = 0 if record["kind"] == "step" else idle
                yield record
            return
        except (QuarantinedError, OutbidError) as pause:
            idle = 0
            vain = 0
            text = pause.what
        except (SchedulerLost, LostError) as lost:
            what = lost.what if isinstance(lost, LostError) else "the scheduler died"
            text = f"{what}; going on from the last commit"
            log.warning("%s: %s", what, lost)
            control.wait()
            vain = 0 if committed(directory) > before else vain
            if idle >= PATIENCE or vain >= LONGEST_PATIENCE:
                count = f"{idle} times without a step" if idle >= PATIENCE else f"{vain} times without a commit"
                fix = "look for lack of memory in the dashboard, then run it again: it goes on from there"
                raise ClusterError("NET003", f"{what} {count}", got=str(lost), fix=fix) from None
        yield {"kind": "status", "text": text}
        end_leftovers(run, but={OWNER, *outliving(job)})


def _attempt(
    job: Job,
    run: str,
    directory: RunDirectory,
    given: tuple[tuple[Place, ...], FromDataset, Any],
    control: ControlService,
) -> Iterator[dict[str, Any]]:
    """Start a scheduler on this node, and yield what it streams.

    Raises:
        SchedulerLost: another attempt may succeed.
        HyphaError: the error that ended the run.

    """
    yield {"kind": "status", "text": "starting the scheduler"}
    places, from_dataset, owner = given
    arguments = (job, run, str(directory.path), places, directory.begin_attempt(), owner, from_dataset)
    scheduler = _here(Scheduler, "scheduler", run).remote(*arguments)
    try:
        yield from _stream(scheduler, job.resources.start_deadline_s, control)
    except RayTaskError as error:
        raise _meant(error) from None
    except RayError as error:
        raise SchedulerLost(_named(error)) from None
    finally:
        ray.kill(scheduler)


def _here(cls: type, name: str, run: str, **options: Any) -> Any:
    """Actor class with a name, placed on this node."""
    return ray.remote(cls).options(name=name, namespace=run, **on_this_node(), **options)


def _stream(scheduler: Any, start_s: float, control: ControlService) -> Iterator[dict[str, Any]]:
    """Yield the items of a scheduler; its pulse is checked while it is silent. It may take `start_s` to start.

    Seconds are counted by waits, so a pause of this process is no silence of the scheduler.
    """
    stream = scheduler.run.remote()
    pulse = None
    waits = 0
    limit = start_s
    while True:
        control.check()
        if ray.wait([stream], timeout=1)[0]:
            ref = next(stream, None)
            if ref is None:
                return
            yield from ray.get(ref)
        else:
            pulse = pulse or scheduler.ping.remote()
            waits = waits + 1
            if waits > limit:
                raise SchedulerLost(f"silent for {waits} s")
            if not ray.wait([pulse], timeout=0)[0]:
                continue
            try:
                ray.get(pulse)
            except ActorUnavailableError:
                pulse = None  # Lost on the way: neither a sign of death nor of life.
                continue
        pulse = None
        waits = 0
        limit = SILENCE_S


def _meant(error: RayTaskError) -> Exception:
    """Error that the driver raises for one of the scheduler's; an error of Ray isn't the job's fault."""
    cause = error.cause
    while isinstance(cause, RayTaskError) and not isinstance(cause, HyphaError):
        cause = cause.cause
    if isinstance(cause, HyphaError):
        return cause
    return SchedulerLost(_named(cause)) if isinstance(cause, RayError) else error


def _named(error: Exception) -> str:
    """Class name and first line of an error."""
    return f"{type(error).__name__}: {first_line(error)}"


FEW = 4
"""Number of samples that are sent to workers."""


def probe_samples(source: DataSource) -> Samples:
    """Return a few training samples with the most to train on: labels that are scored, or tokens.

    Raises:
        DataError: no slice can be read.

    """
    failed: DataError | None = None
    for info in source.manifest.of("train"):
        try:
            arrays = source.read(info)
        except DataError as error:
            failed = error
            continue
        rows = np.argsort(-_scored(arrays, info.samples), kind="stable")[:FEW]
        keys = np.stack([np.zeros_like(rows), np.full_like(rows, info.index), rows], axis=1)
        return Samples({name: array[rows] for name, array in arrays.items()}, keys)
    assert failed is not None  # A dataset has a training slice.
    raise failed


def _scored(arrays: Arrays, samples: int) -> npt.NDArray[np.int64]:
    """Number of scored labels, or of tokens, of each sample; zeros if it has neither."""
    marks = arrays["labels"] != IGNORE_INDEX if "labels" in arrays else arrays.get("attention_mask", np.zeros(samples))
    return np.asarray(marks.reshape(samples, -1).sum(axis=1), np.int64)


DEADLINE_S = 15.0
"""Longest wait for the cleanup, in seconds. Ray needs 5 s to end a stopped process."""
_POLL_S = 0.05


def end_leftovers(run: str, deadline_s: float = DEADLINE_S, but: Container[str] = ()) -> None:
    """End all actors and leases of a run, and wait for that, at most `deadline_s` seconds.

    Those named in `but` stay. Actors of a live driver stay, too, because it has a run of the same name in another
    directory.

    Raises:
        ClusterError: there is such a driver, or an actor doesn't end.

    """
    deadline = time.monotonic() + deadline_s
    if not _poll(lambda: not _foreign(run), deadline):
        fix = "choose another run.name, or wait until it has ended"
        raise ClusterError("NET006", f"another driver in this cluster has a run {run!r}", got=_foreign(run), fix=fix)
    reclaim(run, but)  # Leases first: the end of its lease ends a stopped process at once.
    if not _poll(lambda: _ended(run, but), deadline):
        left = ", ".join(name for name in _names(run) if name not in but) or "leases"
        raise ClusterError("NET007", f"what is left of run {run!r} doesn't end", got=left, fix="submit the job again")


def _poll(done: Callable[[], bool], deadline: float) -> bool:
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _ended(run: str, but: Container[str]) -> bool:
    """Whether nothing is left; ends what is, again if need be."""
    names = [name for name in _names(run) if name not in but]
    for name in names:
        actor = _actor(run, name)
        if actor is not None:
            ray.kill(actor)
    return not names and reclaim(run, but) == 0


def _foreign(run: str) -> str:
    """Address of another live driver that owns actors of the run; empty without one."""
    here = ray.get_runtime_context().get_job_id()
    drivers = {job["JobID"]: job for job in state.job_table() if not job["IsDead"] and job["JobID"] != here}
    actors = filter(None, (_actor(run, name) for name in _names(run)))
    owners = {actor._actor_id.job_id.hex() for actor in actors}
    return ", ".join(
        f"pid {drivers[job]['DriverPid']} on {drivers[job]['DriverIPAddress']}" for job in owners & set(drivers)
    )


def _names(run: str) -> list[str]:
    return [row["name"] for row in list_named_actors(all_namespaces=True) if row["namespace"] == run]


def _actor(run: str, name: str) -> ray.actor.ActorHandle | None:
    try:
        return ray.get_actor(name, namespace=run)
    except (ValueError, AssertionError):  # Ray asserts that it finds the class, which goes with a dead driver.
        return None  # It has ended, or is about to.
