"""Largest batch that fits into a worker's lease, found by trials in processes of their own, and kept on disk.

A size fits if two steps of it fit. It is searched by bisection, `rounds.max_batch_size` first. Bounds are kept after
each trial, so that the next start of the same model with an equal lease needs none.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

import torch

from hypha_ray.config import Job
from hypha_ray.config.tables.resources import WorkerGroup
from hypha_ray.errors import CapacityError, ConfigError, HyphaError
from hypha_ray.model.environment import device_of
from hypha_ray.model.identity import folder_hash
from hypha_ray.model.tasks.masking import SpecialTokens
from hypha_ray.store.directory import home
from hypha_ray.store.disk import make_folder, publish, write_file
from hypha_ray.types import Samples
from hypha_ray.worker.training.batch_trial import NO_MEMORY, TOO_LARGE, Trial, resident_bytes

POLL_S = 0.02
GPU_PART = 0.95
"""Part of a lease's GPU memory that a trial may take; the rest is for other sequences of allocations."""
FOLDER = "batch_sizes"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest size that fitted, 0 before any, and smallest one that didn't; None: all fitted."""

    fits: int = 0
    fails: int | None = None

    def next(self, most: int) -> int | None:
        """Size to try next; None: the largest one up to `most` is known."""
        if self.fits >= most:
            return None
        if self.fails is None or self.fails > most:
            return most
        return (self.fits + self.fails) // 2 if self.fails - self.fits > 1 else None


class Outcome(IntEnum):
    """Result of a trial."""

    INTERRUPTED = 0
    """It ended for want of memory that others have, such as by the kernel; it says nothing of the size."""
    FITS = 1
    TOO_LARGE = 2
    """It exceeded the worker's own limit."""


def largest_batch(
    job: Job, worker: int, specials: SpecialTokens | None, samples: Samples, check: Callable[[], None]
) -> int:
    """Find the largest batch of a worker, `rounds.max_batch_size` at most.

    Only what a trial says of the worker's own limit is kept. A trial that others' memory has ended bounds this start
    alone, and the next one tries again.

    Args:
        job: the job file.
        worker: number of the worker.
        specials: special tokens, as `SupervisedTrainer` takes them.
        samples: some samples of the dataset.
        check: raises when the worker is to end.

    Raises:
        ConfigError: TRN003, not even one sample fits, or a step fails for another reason.
        CapacityError: TRN004, others have the memory that one sample needs.

    """
    group, most = job.group_of(worker), job.rounds.max_batch_size
    kind, lease_bytes = _device(job, group)
    file = home() / FOLDER / f"{_key(job, samples, kind, lease_bytes)}.json"
    kept = bounds = _read(file)
    while (size := bounds.next(most)) is not None:
        own = resident_bytes() + job.worker.prefetch_mb * 1_000_000
        part = GPU_PART * min(1.0, group.gpu) if kind != "cpu" else 1.0
        limits = (lease_bytes - own, part, max(1, int(group.cpu)))
        trial = Trial(_on(job, kind), specials, samples, size, *limits)
        outcome = _fits(trial, lease_bytes if kind == "cpu" else None, check)
        if outcome == Outcome.FITS:
            bounds, kept = Bounds(size, bounds.fails), Bounds(size, kept.fails)
        else:
            bounds = Bounds(bounds.fits, size)
            kept = bounds if outcome == Outcome.TOO_LARGE else kept
        _write(file, kept)
    if not bounds.fits:
        raise _no_room(f"{lease_bytes / 1e9:g} GB on {kind}", file, known=kept.fails == 1)
    return min(most, bounds.fits)


def _no_room(lease: str, file: Path, known: bool) -> HyphaError:
    """Error that not even one sample fits; unless it is `known` to exceed the lease, others have the memory."""
    if not known:
        what = "a batch of one sample finds no memory: other processes have it, or the kernel ended each trial"
        return CapacityError("TRN004", what, lease, fix="end what else runs on that machine, then submit again")
    what = "a batch of one sample doesn't fit into a worker's lease"
    fix = f"give workers more memory, or train a smaller model; to try this again, delete {file}"
    return ConfigError("TRN003", what, lease, fix=fix)


def _on(job: Job, kind: str) -> Job:
    """The job with the device of this process as that of a trial, which has no lease of its own."""
    device = "cpu" if kind == "cpu" else "cuda"
    return job.model_copy(update={"worker": job.worker.model_copy(update={"device": device})})


def _device(job: Job, group: WorkerGroup) -> tuple[str, float]:
    """Kind of device that a worker computes on, and the bytes of it that are in its lease."""
    if device_of(job.worker.device).type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return properties.name, properties.total_memory * min(1.0, group.gpu)
    return "cpu", group.memory_gb * 1e9


def _key(job: Job, samples: Samples, kind: str, lease_bytes: float) -> str:
    """Hash of all that the memory of a step depends on, besides the size of the batch."""
    model = job.model.model_dump(mode="json", exclude={"token"})
    if job.model.repository and (folder := Path(job.model.repository).expanduser()).is_dir():
        model["repository"] = folder_hash(folder)  # Another model may lie under the same path later.
    shapes = {name: [*array.shape[1:], str(array.dtype)] for name, array in sorted(samples.arrays.items())}
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    training = [job.worker.model_dump(mode="json"), job.rounds.accumulation, job.inner_optimizer.name]
    told = json.dumps([model, training, shapes, versions, kind, lease_bytes], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _fits(trial: Trial, most_bytes: float | None, check: Callable[[], None]) -> int:
    """Run a trial; a process with more than `most_bytes` is ended. Return its `Outcome`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "hypha_ray.worker.training.batch_trial"]
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
        told.write(pickle.dumps(trial))
        told.seek(0)
        process = subprocess.Popen(
            command, env=environment, stdin=told, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            code = _watch(process, most_bytes, check)
        finally:
            process.kill()
            process.wait()
        outcomes = {0: Outcome.FITS, TOO_LARGE: Outcome.TOO_LARGE}
        outcomes |= dict.fromkeys((NO_MEMORY, -signal.SIGKILL), Outcome.INTERRUPTED)
        if code not in outcomes:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            fix = "set worker.probe_batch_size = false, and a fitting rounds.max_batch_size"
            raise ConfigError("TRN003", f"the trial of a batch of {trial.size} samples failed", last, fix=fix)
    return outcomes[code]


def _watch(process: subprocess.Popen[bytes], most_bytes: float | None, check: Callable[[], None]) -> int:
    """Wait for a process; return its exit code, or `TOO_LARGE` if it had to be ended for its memory."""
    while True:
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            check()
        if most_bytes is not None and resident_bytes(process=process.pid) > most_bytes:
            process.kill()
            process.wait()
            return TOO_LARGE


def _read(file: Path) -> Bounds:
    """Bounds kept by earlier trials; none if they can't be read."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return Bounds(int(known["fits"]), None if known["fails"] is None else int(known["fails"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Bounds()


def _write(file: Path, bounds: Bounds) -> None:
    """Keep bounds, if the disk takes them: otherwise the next start tries again."""
    temporary = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        make_folder(file.parent)
        write_file(temporary, json.dumps(asdict(bounds)).encode())
        publish(temporary, file)
