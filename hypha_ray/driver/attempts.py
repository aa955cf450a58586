"""Attempts of a run: when a scheduler dies or falls silent, the next one resumes from the commit log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Generator, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import ray
from ray._private.state import state
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util import list_named_actors

from hypha_ray.config import Job
from hypha_ray.config.load import with_absolute_folders
from hypha_ray.data.storage import Place
from hypha_ray.driver.data_source import DataSource, samples_at
from hypha_ray.driver.earlier_runs import committed
from hypha_ray.driver.ray_cluster import ControlService
from hypha_ray.errors import ClusterError, DataError, HyphaError, LostError, OutbidError, QuarantinedError, first_line
from hypha_ray.market.cluster import on_this_node, reclaim
from hypha_ray.model.task import IGNORE_INDEX, SpecialTokens
from hypha_ray.model.tasks import find_task
from hypha_ray.model.tokenizers import pack, tokenizer_of
from hypha_ray.scheduler.runtime.actor import Scheduler
from hypha_ray.scheduler.runtime.run_actors import OWNER, ActorOwner, outliving
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

SchedulerInputs: TypeAlias = tuple[tuple[Place, ...], FromDataset, Any]
"""Places of the dataset, facts that workers need of it, and the actor that owns workers and parameter servers."""
FEW = 4
"""Number of samples that are sent to workers."""
DEADLINE_S = 15.0
"""Longest wait for the cleanup, in seconds. Ray needs 5 s to end a stopped process."""
_POLL_S = 0.05


class SchedulerLost(Exception):
    """End of an attempt that another may follow: its scheduler died or fell silent, or an object was lost."""


class CallLost(SchedulerLost):
    """End of an attempt by a call that was lost on its way. The scheduler may live, so this is no sign of its death."""


def records(
    job: Job, run: str, directory: RunDirectory, source: DataSource, check: Callable[[], None] | None = None
) -> Generator[dict[str, Any], None, None]:
    """Run a job on this node's Ray, and yield the records that its schedulers stream, until the run is over.

    Closing the generator ends the scheduler, its actors and their leases, which takes a connection to Ray. Ray itself
    would keep the leases until this process disconnects.

    Args:
        job: the job file.
        run: name of the run.
        directory: the run directory.
        source: the dataset.
        check: called at least once a second; an exception of it ends the run.

    Raises:
        HyphaError: the error that ended the run.

    """
    job = with_absolute_folders(job)
    control = ControlService(ray.get_runtime_context().gcs_address, check)
    end_leftovers(run)
    owner = _actor_on_this_node(ActorOwner, OWNER, run, max_restarts=-1).remote()
    try:
        specials = specials_of(job, source)
        probes = None
        if job.worker.probe_batch_size:
            probes = probe_samples(source)
        yield from _attempts(job, run, directory, (source.places, (specials, probes), owner), control)
    finally:
        ray.kill(owner)
        if control.answers():  # Without it, Ray would be asked for a minute.
            _poll(lambda: reclaim(run) == 0, time.monotonic() + DEADLINE_S)


def specials_of(job: Job, source: DataSource) -> SpecialTokens | None:
    """Return the tokens that workers need of a tokenizer, which may be only on this machine, beside the dataset.

    Masked language models need special tokens, reinforcement learning the whole tokenizer, and other jobs nothing.
    """
    if job.rl.algorithm is not None:
        from hypha_ray.driver.data_source import job_preprocessor

        return pack(tokenizer_of(job_preprocessor(job, source)))
    if find_task(job.model.type).labels != "masked":
        return None
    from hypha_ray.model.tokenizers import load_special_tokens

    return load_special_tokens(job.preprocessor, source.folder, job.model)


def _attempts(
    job: Job, run: str, directory: RunDirectory, inputs: SchedulerInputs, control: ControlService
) -> Iterator[dict[str, Any]]:
    """Run schedulers one after the other, with one owner for their workers and parameter servers."""
    without_step = 0
    without_commit = 0
    while True:
        rounds = committed(directory)
        without_step += 1
        without_commit += 1
        try:
            for record in _attempt(job, run, directory, inputs, control):
                if record["kind"] == "step":
                    without_step = 0
                yield record
            return
        except (QuarantinedError, OutbidError) as pause:
            without_step = 0
            without_commit = 0
            text = pause.what
        except (SchedulerLost, LostError) as lost:
            cause = lost.what if isinstance(lost, LostError) else "the scheduler died"
            if isinstance(lost, CallLost):
                cause = "a call was lost"
                without_step -= 1
            text = f"{cause}; going on from the last commit"
            log.warning("%s: %s", cause, lost)
            control.wait()
            if committed(directory) > rounds:
                without_commit = 0
            if without_step >= PATIENCE:
                raise _given_up(f"{cause} {without_step} times without a step", lost) from None
            if without_commit >= LONGEST_PATIENCE:
                raise _given_up(f"{cause} {without_commit} times without a commit", lost) from None
        yield {"kind": "status", "text": text}
        end_leftovers(run, spared_names={OWNER, *outliving(job)})


def _given_up(problem: str, loss: Exception) -> ClusterError:
    fix = "look for lack of memory in the dashboard, then run it again: it goes on from there"
    return ClusterError("NET003", problem, got=str(loss), fix=fix)


def _attempt(
    job: Job, run: str, directory: RunDirectory, inputs: SchedulerInputs, control: ControlService
) -> Iterator[dict[str, Any]]:
    """Start a scheduler on this node, and yield the records that it streams.

    Raises:
        SchedulerLost: another attempt may succeed.
        HyphaError: the error that ended the run.

    """
    yield {"kind": "status", "text": "starting the scheduler"}
    places, from_dataset, owner = inputs
    arguments = (job, run, str(directory.path), places, directory.begin_attempt(), owner, from_dataset)
    scheduler = _actor_on_this_node(Scheduler, "scheduler", run).remote(*arguments)
    try:
        yield from _stream(scheduler, job.resources.start_deadline_s, control)
    except RayTaskError as error:
        raise _driver_error(error) from None
    except RayError as error:
        raise _lost(error) from None
    finally:
        ray.kill(scheduler)


def _actor_on_this_node(cls: type, name: str, run: str, **options: Any) -> Any:
    """Actor class with a name, placed on this node."""
    return ray.remote(cls).options(name=name, namespace=run, **on_this_node(), **options)


def _stream(scheduler: Any, start_s: float, control: ControlService) -> Iterator[dict[str, Any]]:
    """Yield the items of a scheduler; its pulse is checked while it is silent. It may take `start_s` to start.

    Seconds are counted by waits, so a pause of this process is no silence of the scheduler.
    """
    stream = scheduler.run.remote()
    ping_ref = None
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
            ping_ref = ping_ref or scheduler.ping.remote()
            waits += 1
            if waits > limit:
                raise SchedulerLost(f"silent for {waits} s")
            if not ray.wait([ping_ref], timeout=0)[0]:
                continue
            try:
                ray.get(ping_ref)
            except ActorUnavailableError:
                ping_ref = None  # The call was lost: that is a sign neither of death nor of life.
                continue
        ping_ref = None
        waits = 0
        limit = SILENCE_S


def _driver_error(error: RayTaskError) -> Exception:
    """Error that the driver raises for one of the scheduler's; an error of Ray isn't the job's fault."""
    cause = error.cause
    while isinstance(cause, RayTaskError) and not isinstance(cause, HyphaError):
        cause = cause.cause
    if isinstance(cause, HyphaError):
        return cause
    return _lost(cause) if isinstance(cause, RayError) else error


def _lost(error: RayError) -> SchedulerLost:
    """End of an attempt for an error of Ray."""
    kind = CallLost if isinstance(error, ActorUnavailableError) else SchedulerLost
    return kind(_error_text(error))


def _error_text(error: Exception) -> str:
    """Class name and first line of an error."""
    return f"{type(error).__name__}: {first_line(error)}"


def probe_samples(source: DataSource) -> Samples:
    """Return a few training samples with the most scored labels or tokens, on which workers try sizes of batches.

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
        return samples_at(rows, arrays, info.index)
    assert failed is not None  # A dataset has a training slice.
    raise failed


def _scored(arrays: Arrays, samples: int) -> npt.NDArray[np.int64]:
    """Number of scored labels, or of tokens, of each sample; zeros if it has neither."""
    counted_positions = arrays.get("attention_mask", np.zeros(samples))
    if "labels" in arrays:
        counted_positions = arrays["labels"] != IGNORE_INDEX
    return np.asarray(counted_positions.reshape(samples, -1).sum(axis=1), np.int64)


def end_leftovers(run: str, deadline_s: float = DEADLINE_S, spared_names: Container[str] = ()) -> None:
    """End all actors and leases of a run that an earlier driver or scheduler has left, and wait for their end.

    Actors and leases in `spared_names` stay. Actors of a live driver stay, too, because it has a run of the same name
    in another directory. The wait takes at most `deadline_s` seconds.

    Raises:
        ClusterError: there is such a driver, or an actor doesn't end.

    """
    deadline = time.monotonic() + deadline_s
    if not _poll(lambda: not _other_drivers(run), deadline):
        problem = f"another driver in this cluster has a run {run!r}"
        fix = "choose another run.name, or wait until it has ended"
        raise ClusterError("NET006", problem, got=_other_drivers(run), fix=fix)
    reclaim(run, spared_names)  # Leases first: the end of its lease ends a stopped process at once.
    if not _poll(lambda: _kill_leftovers(run, spared_names), deadline):
        names = ", ".join(_leftover_names(run, spared_names)) or "leases"
        raise ClusterError("NET007", f"what is left of run {run!r} doesn't end", got=names, fix="submit the job again")


def _poll(is_done: Callable[[], bool], deadline: float) -> bool:
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _kill_leftovers(run: str, spared_names: Container[str]) -> bool:
    """Kill remaining actors and leases, and return whether none was left."""
    names = _leftover_names(run, spared_names)
    for name in names:
        actor = _find_actor(run, name)
        if actor is not None:
            ray.kill(actor)
    return not names and reclaim(run, spared_names) == 0


def _other_drivers(run: str) -> str:
    """Addresses of other live drivers that own actors of the run; empty without any."""
    own_id = ray.get_runtime_context().get_job_id()
    drivers = {}
    for driver in state.job_table():
        if not driver["IsDead"] and driver["JobID"] != own_id:
            drivers[driver["JobID"]] = driver
    owners: set[str] = set()
    for name in _actor_names(run):
        actor = _find_actor(run, name)
        if actor is not None:
            owners.add(actor._actor_id.job_id.hex())
    addresses = []
    for owner in owners & set(drivers):
        driver = drivers[owner]
        addresses.append(f"pid {driver['DriverPid']} on {driver['DriverIPAddress']}")
    return ", ".join(addresses)


def _leftover_names(run: str, spared_names: Container[str]) -> list[str]:
    return [name for name in _actor_names(run) if name not in spared_names]


def _actor_names(run: str) -> list[str]:
    return [row["name"] for row in list_named_actors(all_namespaces=True) if row["namespace"] == run]


def _find_actor(run: str, name: str) -> ray.actor.ActorHandle | None:
    try:
        return ray.get_actor(name, namespace=run)
    except (ValueError, AssertionError):  # Ray asserts that it finds the class, which vanishes with a dead driver.
        return None  # The actor has ended, or is about to.
