"""Processes of external trainers: work directory, socket, output and end; and endpoints for those that dial in."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from hypha_ray.bridge.access import UNIX, make_token, read_token, server_tls, split
from hypha_ray.bridge.channel import Channel, Listener
from hypha_ray.bridge.client import FOLDERS
from hypha_ray.bridge.paths import PREFIX, Scratch, WorkDirectory, handed_on, sweep
from hypha_ray.config import Job
from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.files import opener
from hypha_ray.model.sources import require_same
from hypha_ray.model.task import SpecialTokens
from hypha_ray.model.tokenizers import PackedTokenizer
from hypha_ray.texts import redacted_tree
from hypha_ray.worker.bridged.round_report import rl_definition

FOLDER = "bridge"
"""Folder of the run directory: token and address of each worker whose trainer dials in."""
MAX_BYTES = 16 << 20
"""Most output of one process. A longer log is renamed, and kept until the next one is as long, too."""
_READ_BYTES = 1 << 16
_CUT_NOTE = b"\n[what else it prints is left out]\n"
JOB_FILE = "job.json"
TOKEN_FILE = "token"
SOCKET_FILE = "socket"
END_S = 2.0
"""Time that a process has to end by itself once it is asked to."""
_POLL_S = 0.1


def address_of(job: Job, worker: int) -> str:
    """Address for a worker's trainer: that of the job for the first one, and the following ports for others."""
    host, port = split(job.bridge.listen, encrypted=job.bridge.certificate is not None)
    if ":" in host:
        host = f"[{host}]"
    if port:
        port += sum(job.group_of(earlier_worker).dials_in for earlier_worker in range(worker))
    return f"{host}:{port}"


def listen_for_trainer(job: Job, worker: int) -> Listener:
    """Listen for a worker's trainer, and write the address to a file.

    A port that was chosen freely is used again, for a trainer that reconnects.

    Raises:
        ConfigError: SEC001 or SEC005 trainers may not dial in like that.
        ClusterError: NET001 the address can't be had.

    """
    token = token_of(job, worker)
    path = _folder(job) / f"worker-{worker}.address"
    address = address_of(job, worker)
    host, _, port = address.rpartition(":")
    listener = None
    if port == "0" and path.exists():
        earlier_address = path.read_text(encoding="utf-8").strip()
        earlier_port = earlier_address.rpartition(":")[2]
        with contextlib.suppress(HyphaError):  # Another process has the port by now.
            listener = Listener(f"{host}:{earlier_port}", token, job.lease_s, tls(job))
    if listener is None:
        listener = Listener(address, token, job.lease_s, tls(job))
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(listener.address + "\n")
    return listener


def tls(job: Job) -> ssl.SSLContext | None:
    """TLS with the job's certificate, if it has one.

    Raises:
        ConfigError: CFG012 half of it is missing, SEC005 it can't be used.

    """
    certificate = job.bridge.certificate
    key = job.bridge.key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        problem = "the bridge has a certificate or a key, but not both"
        fix = "give bridge.certificate and bridge.key"
        raise ConfigError("CFG012", problem, fix=fix)
    return server_tls(Path(certificate), Path(key))


def token_of(job: Job, worker: int) -> bytes:
    """Token of a worker's trainer; a run makes it once."""
    path = _folder(job) / f"worker-{worker}.token"
    if path.exists():
        return read_token(path)
    return make_token(path)


def check(job: Job) -> None:
    """Refuse an address that can't be listened on, before anything starts.

    Raises:
        ConfigError: CFG020 not an address, SEC001 it needs a certificate, CFG012 or SEC005 that can't be used.

    """
    if not any(group.dials_in for group in job.worker_groups):
        return
    if job.bridge.listen.startswith(UNIX):
        raise ConfigError("CFG020", "bridge.listen is no address to dial", job.bridge.listen, "host:port")
    split(job.bridge.listen, encrypted=job.bridge.certificate is not None)
    tls(job)


def _folder(job: Job) -> Path:
    folder = Path(str(job.run.dir), str(job.run.name), FOLDER)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class TrainerOutput:
    """A pipe for the output of a trainer; its first bytes go to a file.

    Args:
        file: the file; None: this process's standard error.

    """

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file
        self._source, target = os.pipe()
        self.target = os.fdopen(target, "wb", buffering=0)
        """File that the trainer prints to; this process closes it after the start."""
        self._thread = threading.Thread(target=self._copy, name="bridge-printed", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Close this process's end of the pipe, and wait until all others have closed theirs."""
        self.target.close()
        self._thread.join(seconds)

    def _copy(self) -> None:
        free_bytes = MAX_BYTES
        with os.fdopen(self._source, "rb", buffering=0) as source, self._file or contextlib.nullcontext():
            while part := source.read(_READ_BYTES):
                if free_bytes <= 0:
                    continue
                if len(part) > free_bytes:
                    self._write(part[:free_bytes] + _CUT_NOTE)
                else:
                    self._write(part)
                free_bytes -= len(part)

    def _write(self, part: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # A full disk, or no standard error: it is only a log.
            file = self._file or sys.stderr.buffer
            file.write(part)
            file.flush()


def trainer_log(job: Job, worker: int) -> IO[bytes] | None:
    """The trainer's file among the run's logs, if this node has the run directory."""
    folder = Path(str(job.run.dir), str(job.run.name), "logs")
    if job.run.dir is None or not folder.is_dir():
        return None
    path = folder / f"worker-{worker}.log"
    if path.exists() and path.stat().st_size > MAX_BYTES:
        path.replace(path.with_suffix(".log.1"))
    return open(path, "ab", opener=opener)


class TrainerGone(Exception):
    """The trainer has ended, or broken the protocol: another one may do better."""


class TrainerProcess:
    """A work directory, a socket, and the process that is to connect to it: one that is started, or one that dials in.

    Args:
        job: the job file.
        worker: number of the worker that the process is.
        specials: tokens that a masked language model has to know.

    Raises:
        CheckpointError: CKPT007 the program is another one than the run began with.
        ConfigError: CFG009 there is no such program; SEC001 or SEC005 trainers may not dial in like that.
        ClusterError: NET001 the address can't be had.

    """

    def __init__(self, job: Job, worker: int, specials: SpecialTokens | None = None) -> None:
        sweep()
        self._scratch = Scratch(PREFIX)
        self.directory = self._scratch.path
        self.work = WorkDirectory(self.directory)
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: Listener | None = None
        self._output: TrainerOutput | None = None
        try:
            for folder in FOLDERS:
                (self.directory / folder).mkdir()
            (self.directory / JOB_FILE).write_text(
                json.dumps(job_definition(job, worker, specials), indent=2), encoding="utf-8"
            )
            if job.group_of(worker).dials_in:
                self._listener = listen_for_trainer(job, worker)
            else:
                token = make_token(self.directory / TOKEN_FILE)
                self._listener = Listener(self._socket_address(), token, job.lease_s)
                words = command_words(job, worker)
                require_same(job, job.begun_with)
                self._output = TrainerOutput(trainer_log(job, worker))
                self._process = _start_program(words, self._variables(), self._output.target, _command_key(job))
        except BaseException:
            self.close()
            raise

    def connect(self, check: Callable[[], None]) -> Channel:
        """Wait for the process to connect.

        Args:
            check: raises if it isn't to be waited for any more.

        Raises:
            TrainerGone: it has ended before.

        """
        assert self._listener is not None
        while (channel := self._listener.admit(_POLL_S)) is None:
            check()
            if self._process is not None and (code := self._process.poll()) is not None:
                raise TrainerGone(f"the trainer has ended with exit code {code} before it has connected")
        self._listener.close()  # One connection is enough.
        return channel

    def end(self) -> None:
        """Let the process end by itself; if it doesn't, end it and all that it has started."""
        if self._process is None:
            return
        for signal_number in (None, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if signal_number is not None:
                    os.killpg(self._process.pid, signal_number)
                self._process.wait(END_S)

    def close(self) -> None:
        """End the process at once, listen no more, and remove the directory."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._output is not None:
            self._output.wait(END_S)
        if self._listener is not None:
            self._listener.close()
        self.work.close()
        self._scratch.close()

    def _variables(self) -> dict[str, str]:
        job_file = self.directory / JOB_FILE
        token_file = self.directory / TOKEN_FILE
        return {
            "SOCKET": self._socket_address(),
            "WORK_DIR": str(self.directory),
            "JOB": str(job_file),
            "TOKEN_FILE": str(token_file),
        }

    def _socket_address(self) -> str:
        return f"{UNIX}{self.directory / SOCKET_FILE}"


def command_words(job: Job, worker: int) -> list[str]:
    """Words of an external trainer's command line, split as by a shell, which isn't used."""
    line = job.group_of(worker).command or ""
    key = _command_key(job)
    try:
        words = shlex.split(line)
    except ValueError as error:
        words = []
        why = str(error)
    else:
        why = "no words"
    if not words:
        raise ConfigError("CFG009", f"{key}: {line!r} is no command line", got=why)
    return words


def job_definition(job: Job, worker: int, specials: SpecialTokens | None = None) -> dict[str, Any]:
    """Definition of the job for a trainer; see docs/bridge.md."""
    kind_fields: dict[str, Any] = {}
    if isinstance(specials, PackedTokenizer):
        kind_fields = rl_definition(job.rl, specials)
    elif specials is not None:
        kind_fields = {"special_tokens": asdict(specials)}
    return {
        **kind_fields,
        "run": job.run.name,
        "worker": worker,
        "seed": job.run.seed,
        "strategy": job.sync.strategy,
        "model": redacted_tree(job.model.model_dump(mode="json", exclude={"token"})),
        "inner_optimizer": job.inner_optimizer.model_dump(mode="json"),
        "report_every_s": job.report_interval_s,
    }


def _command_key(job: Job) -> str:
    """Place of the trainers' command lines in the job file."""
    return "command of [[workers]]" if job.workers else "bridge.commands"


def _start_program(
    words: list[str], variables: Mapping[str, str], log: IO[bytes] | None, key: str
) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own; if the system can, it ends the program with this thread."""
    for name, value in variables.items():
        placeholder = f"{{{name}}}"
        words = [word.replace(placeholder, value) for word in words]
    program = shutil.which(words[0])
    if program is None:
        fix = f"mend {key}; the program has to be on every node that may get a worker"
        raise ConfigError("CFG009", f"{key}: there is no such program", got=words[0], fix=fix)
    environment = handed_on(os.environ)
    for name, value in variables.items():
        if name != "JOB":
            environment[f"HYPHA_BRIDGE_{name}"] = value
    guard = shutil.which("setpriv")
    guard_words = [guard, "--pdeathsig", "KILL", "--"] if guard else []
    try:
        return subprocess.Popen(
            [*guard_words, program, *words[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log or sys.stderr,
            stderr=subprocess.STDOUT if log else sys.stderr,
            start_new_session=True,
        )
    finally:
        if log is not None:
            log.close()
