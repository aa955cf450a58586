"""Largest batch that fits into a worker's lease, found by trials in processes of their own, and saved on disk.

A size fits if two steps of it fit. It is searched by bisection, `rounds.max_batch_size` first. Bounds are saved after
each trial, so that the next start of the same model with an equal lease needs none.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

import torch

from hypha_ray.config import Job
from hypha_ray.config.resources import WorkerGroup
from hypha_ray.errors import CapacityError, ConfigError, HyphaError
from hypha_ray.model.environment import device_of
from hypha_ray.model.sources import folder_hash
from hypha_ray.model.task import SpecialTokens
from hypha_ray.store.directory import home
from hypha_ray.store.disk import make_folder, publish, write_file
from hypha_ray.texts import counted
from hypha_ray.types import Samples

POLL_S = 0.02
USABLE_GPU_PART = 0.95
"""Part of a lease's GPU memory that a trial may take; the rest is for other sequences of allocations."""
FOLDER = "batch_sizes"
TOO_LARGE = 3
NO_MEMORY = 4
"""Exit codes: memory beyond the worker's own limit, and memory that other processes have."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Size of a batch to try, and the memory that it may take.

    Attributes:
        samples: some samples of the dataset; they are repeated.
        size: number of samples of the batch.
        limit_bytes: memory for model, optimizer and step on a CPU.
        gpu_part: part of a GPU's memory that is the worker's.
        threads: number of CPU threads.

    """

    job: Job
    specials: SpecialTokens | None
    samples: Samples
    size: int
    limit_bytes: float
    gpu_part: float
    threads: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest size that fitted, 0 before any, and smallest one that didn't; None: all fitted."""

    fits: int = 0
    fails: int | None = None

    def next_trial(self, limit: int) -> int | None:
        """Size to try next; None: the largest one up to `limit` is known."""
        if self.fits >= limit:
            return None
        if self.fails is None or self.fails > limit:
            return limit
        if self.fails - self.fits == 1:
            return None
        return (self.fits + self.fails) // 2


class TrialOutcome(IntEnum):
    """Result of a trial."""

    INTERRUPTED = 0
    """Other processes had the memory that it lacked, or the kernel ended it: the size is neither too large nor fits."""
    FITS = 1
    TOO_LARGE = 2
    """It exceeded the worker's own limit."""


class TrialProcesses:
    """Runs trials, each in a process of its own. All are forked from a server process, which loads the libraries.

    Args:
        most_bytes: physical memory of a trial beyond which it is ended; None: memory isn't watched.
        check: raises when the worker is to end.

    """

    def __init__(self, most_bytes: float | None, check: Callable[[], None]) -> None:
        self._most_bytes = most_bytes
        self._check = check
        self._server: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 # It is closed with the processes.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._errors.close()

    def outcome(self, trial: Trial) -> TrialOutcome:
        """Run a trial.

        Raises:
            ConfigError: TRN003, it failed for another reason than memory.

        """
        code = self._exit_code(trial)
        if code is None or code in (NO_MEMORY, -signal.SIGKILL):
            return TrialOutcome.INTERRUPTED
        if code == 0:
            return TrialOutcome.FITS
        if code == TOO_LARGE:
            return TrialOutcome.TOO_LARGE
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")
        last_line = errors.strip().rpartition("\n")[2]
        fix = "set worker.probe_batch_size = false, and a fitting rounds.max_batch_size"
        problem = f"the trial of a batch of {counted(trial.size, 'sample')} failed"
        raise ConfigError("TRN003", problem, last_line, fix=fix)

    def _exit_code(self, trial: Trial) -> int | None:
        """Exit code of a trial, `TOO_LARGE` if it was ended for its memory; None if the server has ended, too."""
        if self._server is None:
            self._server = self._start_server()
        assert self._server.stdin is not None
        with suppress(BrokenPipeError):  # The process's answers end then, too.
            self._server.stdin.write(pickle.dumps(trial))
            self._server.stdin.flush()
        process = self._read_number(None)
        code = None
        if process is not None:
            code = self._read_number(process)
        if code is None:
            self._end()
        return code

    def _start_server(self) -> subprocess.Popen[bytes]:
        python_path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": python_path}
        command = [sys.executable, "-m", "hypha_ray.members.batch_trial"]
        pipe = subprocess.PIPE
        server = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=self._errors, start_new_session=True
        )
        # A trial that ends at once has both of its lines in one reading, and `select` sees none that lies in a buffer.
        server.stdout = server.stdout.detach()  # type: ignore[union-attr]
        return server

    def _read_number(self, process: int | None) -> int | None:
        """Read the number in the server's next line; None at its end. Watches the memory of a trial meanwhile."""
        assert self._server is not None and self._server.stdout is not None
        is_too_large = False
        while not select.select([self._server.stdout], [], [], POLL_S)[0]:
            self._check()
            if process is not None and self._most_bytes is not None and not is_too_large:
                is_too_large = _resident_bytes_of(process) > self._most_bytes
                if is_too_large:
                    os.kill(process, signal.SIGKILL)
        line = self._server.stdout.readline()
        if not line:
            return None
        if is_too_large:
            return TOO_LARGE
        return int(line)

    def _end(self) -> None:
        """End all processes."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None


def resident_bytes(name: str = "VmRSS", process: int | str = "self") -> int:
    """Physical memory of a process; with ``VmHWM``, the most that it has had. 0 after its end."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    match = re.search(rf"{name}:\s+(\d+) kB", status)
    return 0 if match is None else int(match[1]) * 1024


def _resident_bytes_of(process: int) -> int:
    """Physical memory of a process; 0 if it has ended."""
    try:
        return resident_bytes(process=process)
    except FileNotFoundError:
        return 0


def largest_batch(
    job: Job, worker: int, specials: SpecialTokens | None, samples: Samples, check: Callable[[], None]
) -> int:
    """Find the largest batch of a worker, `rounds.max_batch_size` at most; `check` raises when the worker is to end.

    A trial that lacked memory because of other processes bounds this start alone. It isn't saved, so the next start
    tries that size again.

    Raises:
        ConfigError: TRN003, not even one sample fits, or a step fails for another reason.
        CapacityError: TRN004, others have the memory that one sample needs.

    """
    group = job.group_of(worker)
    limit = job.rounds.max_batch_size
    device_type, lease_bytes = _device(job, group)
    file = home() / FOLDER / f"{_key(job, samples, device_type, lease_bytes)}.json"
    saved_bounds = bounds = _read(file)
    if device_type == "cpu":
        process_limit_bytes = lease_bytes
        gpu_part = 1.0
    else:
        process_limit_bytes = None
        gpu_part = USABLE_GPU_PART * min(1.0, group.gpu)
    threads = max(1, int(group.cpu))
    with TrialProcesses(process_limit_bytes, check) as trials:
        while (trial_size := bounds.next_trial(limit)) is not None:
            worker_bytes = resident_bytes() + job.worker.prefetch_mb * 1_000_000
            trial_job = _job_on_device(job, device_type)
            trial = Trial(trial_job, specials, samples, trial_size, lease_bytes - worker_bytes, gpu_part, threads)
            outcome = trials.outcome(trial)
            if outcome == TrialOutcome.FITS:
                bounds = Bounds(trial_size, bounds.fails)
                saved_bounds = Bounds(trial_size, saved_bounds.fails)
            else:
                bounds = Bounds(bounds.fits, trial_size)
                if outcome == TrialOutcome.TOO_LARGE:
                    saved_bounds = bounds
            _write(file, saved_bounds)
    if not bounds.fits:
        raise _batch_too_large(
            f"{lease_bytes / 1e9:g} GB on {device_type}", file, exceeds_lease=saved_bounds.fails == 1
        )
    return min(limit, bounds.fits)


def _batch_too_large(lease: str, file: Path, exceeds_lease: bool) -> HyphaError:
    """Error that not even one sample fits: it exceeds the lease, or other processes have the memory."""
    if not exceeds_lease:
        problem = "a batch of one sample finds no memory: other processes have it, or the kernel ended each trial"
        return CapacityError("TRN004", problem, lease, fix="end what else runs on that machine, then submit again")
    problem = "a batch of one sample doesn't fit into a worker's lease"
    fix = f"give workers more memory, or train a smaller model; to try this again, delete {file}"
    return ConfigError("TRN003", problem, lease, fix=fix)


def _job_on_device(job: Job, device_type: str) -> Job:
    """The job with the device of this process as that of a trial, which has no lease of its own."""
    device = "cpu" if device_type == "cpu" else "cuda"
    worker = job.worker.model_copy(update={"device": device})
    return job.model_copy(update={"worker": worker})


def _device(job: Job, group: WorkerGroup) -> tuple[str, float]:
    """Kind of device that a worker computes on, and the bytes of it that are in its lease."""
    if device_of(job.worker.device).type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return properties.name, properties.total_memory * min(1.0, group.gpu)
    return "cpu", group.memory_gb * 1e9


def _key(job: Job, samples: Samples, device_type: str, lease_bytes: float) -> str:
    """Hash of all that the memory of a step depends on, besides the size of the batch."""
    model = job.model.model_dump(mode="json", exclude={"token"})
    if job.model.repository and (folder := Path(job.model.repository).expanduser()).is_dir():
        model["repository"] = folder_hash(folder)  # Another model may lie under the same path later.
    shapes = {}
    for name, array in sorted(samples.arrays.items()):
        shapes[name] = [*array.shape[1:], str(array.dtype)]
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    training = [job.worker.model_dump(mode="json"), job.rounds.accumulation, job.inner_optimizer.name]
    if job.preference.loss is not None:
        training.append(job.preference.model_dump(mode="json", include={"loss", "reference"}))
    text = json.dumps([model, training, shapes, versions, device_type, lease_bytes], sort_keys=True)
    sha256 = hashlib.sha256(text.encode())
    return sha256.hexdigest()[:16]


def _read(file: Path) -> Bounds:
    """Bounds saved by earlier trials; those before any trial if the file can't be read."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        largest_fitting = int(fields["fits"])
        fails = fields["fails"]
        return Bounds(largest_fitting, None if fails is None else int(fails))
    except (OSError, ValueError, KeyError, TypeError):
        return Bounds()


def _write(file: Path, bounds: Bounds) -> None:
    """Save bounds. If that fails, the next start makes its trials again."""
    temporary = file.with_suffix(f".{os.getpid()}")
    text = json.dumps(asdict(bounds))
    with suppress(OSError):
        make_folder(file.parent)
        write_file(temporary, text.encode())
        publish(temporary, file)
