"""Start of a training job's command: first line, libraries, a Ray of its own, job, and the report of an interruption.

Such a Ray is begun early, connected to later, and ended in the background. Job scripts import this to parse their
command line, so heavy modules are imported late.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hypha_ray.bridge.paths import LOCAL_RAY, Scratch, sweep
from hypha_ray.config import Job
from hypha_ray.config.entry_point import INTERRUPTED, Phases, print_notes
from hypha_ray.config.load import Loaded, require_secrets, resolved_toml
from hypha_ray.driver.forks import FIRST_JOB, fork_server
from hypha_ray.driver.ray_head import LATER
from hypha_ray.driver.ray_worker import SOCKET
from hypha_ray.driver.run_folders import check_places, name_run
from hypha_ray.errors import HyphaError
from hypha_ray.store.directory import RunDirectory, runs
from hypha_ray.texts import redacted

TERMINATED = 143
"""Exit status after SIGTERM."""
ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a job."""
_sigterm_came = threading.Event()
"""Whether SIGTERM is ending this process by an exception."""
END_S = 10.0
"""Longest wait for the end of Ray's processes, in seconds; then they are killed."""


def program() -> list[str]:
    """Return the words before the arguments with which this process was started."""
    script = sys.argv[0]
    words = sys.orig_argv
    if len(words) > 1 and Path(words[1]).name == "hypha-ray":
        return ["hypha-ray", Path(script).stem]
    if words[1:3] == ["-m", "hypha_ray"]:
        return [words[0], "-m", "hypha_ray", Path(script).stem]
    return [words[0], script]


def own_command() -> list[str]:
    """Return the command that started this job script, as a user types it, without the secrets of URLs."""
    return [*program(), *map(redacted, sys.argv[1:])]


class InterruptionReport:
    """Reports once that a job was interrupted, by Ctrl-C or SIGTERM.

    Args:
        job: the job, with `run.name` set.
        directory: the run directory, which may not exist yet.
        command: the command that starts the run again; empty without one.
        resume: the command that resumes the run once it has begun; default: `command`.

    """

    def __init__(
        self, job: Job, directory: RunDirectory, command: Sequence[str] = (), resume: Sequence[str] | None = None
    ) -> None:
        self.rounds = job.rounds.update_rounds if job.rounds.counted else None
        """Number of rounds of the run; None until the dataset tells it."""
        self._directory = directory
        self._command = command
        self._resume = command if resume is None else resume
        self._is_reported = False

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Report an interruption of the code inside, unless it was reported already."""
        try:
            yield
        except KeyboardInterrupt:
            self._report()
            raise
        except SystemExit as end:
            if end.code != TERMINATED and not _sigterm_came.is_set():
                raise
            self._report()
            raise SystemExit(TERMINATED) from None

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """Report a signal and end the process, while libraries are loaded.

        An exception could be lost there: libraries go on without modules that they fail to load.
        """
        early_signals: list[int] = []
        """Signals that came before the report could be made."""
        with _handled_by(lambda number, _: early_signals.append(number)):
            # The report needs these modules, so they are loaded before anything can be half loaded.
            import hypha_ray.store.commits
            import hypha_ray.store.restore_point  # noqa: F401

            with _handled_by(self._end):
                if early_signals:
                    self._end(early_signals[0], None)
                yield

    def _end(self, signal_number: int, _: object) -> None:
        """Report a signal and end the process."""
        self._report()
        os._exit(TERMINATED if signal_number == signal.SIGTERM else INTERRUPTED)

    def _report(self) -> None:
        if self._is_reported:
            return
        print(self.text(), file=sys.stderr, flush=True)
        print(f"run: {self._directory.path}", flush=True)
        self._is_reported = True  # Only now: a second Ctrl-C may have cut an earlier report off.

    def text(self) -> str:
        """Return the progress of the run, and the command that resumes it."""
        from hypha_ray.store.commits import CommitLog
        from hypha_ray.store.restore_point import usable_rounds

        committed_rounds = max(CommitLog(self._directory.path).rounds(), default=-1) + 1
        usable = usable_rounds(self._directory.path)
        if not committed_rounds:
            text = "stopped before the first commit: nothing is committed yet"
        else:
            text = f"stopped after round {committed_rounds}"
            if self.rounds is not None and committed_rounds <= self.rounds:
                text += f" of {self.rounds}"
            if usable != committed_rounds:
                text += f"; the newest checkpoint is that of round {usable}"
        command = self._resume if self._directory.begun else self._command
        if command:
            text += f"; go on with: {redacted(shlex.join(command))}"
        return text


@contextmanager
def _handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Let a function handle Ctrl-C and SIGTERM inside, and the handlers of before again afterwards."""
    old_handlers = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, old_handler in old_handlers.items():
            signal.signal(number, old_handler)


@contextmanager
def signals_held() -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM wait for the end of the code inside. A second one doesn't wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held_signals: list[int] = []
    with ExitStack() as stack:

        def hold(number: int, _: object) -> None:
            held_signals.append(number)
            stack.close()

        stack.enter_context(_handled_by(hold))
        yield
    for held_signal in held_signals:
        signal.raise_signal(held_signal)


@contextmanager
def sigterm_restored() -> Iterator[Callable[[], None]]:
    """Restore the handler of SIGTERM at the end, and when the yielded function is called: other code replaces it.

    In between, a process without a handler of its own ends by an exception, so that it cleans up. Ray's client raises
    another one if that comes inside of its calls, with exit status 1: the end of the context mends the status.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    own_handler = signal.getsignal(signal.SIGTERM)
    has_own = own_handler is not None and own_handler is not signal.SIG_DFL
    handler = own_handler if has_own else _end_by_exception

    def restore() -> None:
        signal.signal(signal.SIGTERM, handler)

    try:
        yield restore
    except SystemExit:
        if _sigterm_came.is_set():
            raise SystemExit(TERMINATED) from None
        raise
    finally:
        _sigterm_came.clear()
        signal.signal(signal.SIGTERM, signal.SIG_DFL if own_handler is None else own_handler)


def _end_by_exception(*_: object) -> None:
    _sigterm_came.set()
    sys.exit(TERMINATED)


def interruption_of_command(job: Job, directory: RunDirectory, has_name: bool) -> InterruptionReport:
    """Report for this process's command line; the name of a run without one was made at its start.

    From now on SIGTERM ends this process by an exception, as Ctrl-C does.
    """
    signal.signal(signal.SIGTERM, _end_by_exception)
    command = [*program(), *sys.argv[1:]]
    resume = command if has_name else [*program(), "--resume", str(directory.path)]
    return InterruptionReport(job, directory, command, resume)


def start(loaded_job: Loaded, kind: str) -> None:
    """Run the job of a command line, or with ``--dry-run`` only print what it would do.

    Args:
        loaded_job: the job of the command line.
        kind: beginning of the name of a run that has none.

    """
    phases = Phases()
    print_notes(loaded_job.notes)
    if loaded_job.dry_run:
        _dry_run(loaded_job, phases)
        return
    job, directory = name_run(loaded_job.job, kind)
    interruption = interruption_of_command(job, directory, has_name=loaded_job.job.run.name is not None)
    with ExitStack() as stack, interruption.reported():
        phases.begin("checking the settings")
        from hypha_ray.driver.preflight.checks import check_early

        check_early(job, directory, loaded_job.resume)
        phases.begin("loading libraries")
        service = None
        if _needs_own_ray(job, directory):
            service = stack.enter_context(closing(RayService()))
        with interruption.ending_at_once():
            from hypha_ray.driver.launch import run_in

        run_in(loaded_job, (job, directory), phases, interruption, own_command(), service)


def _dry_run(loaded_job: Loaded, phases: Phases) -> None:
    """Run the checks of a start, and print the summary and the resolved job file; that also if a check fails."""
    job = loaded_job.job
    job_file = _JobFile(resolved_toml(job))
    phases.begin("checking the settings")
    from hypha_ray.driver.preflight.checks import check_early

    with ExitStack() as stack:
        stack.enter_context(job_file)
        require_secrets(job)
        check_places(job)
        directory = None if job.run.name is None else RunDirectory(runs(job.run.dir) / job.run.name)
        check_early(job, directory, loaded_job.resume)
        service = None
        if _starts_ray():
            service = stack.enter_context(closing(RayService(forks=False)))
        phases.begin("loading libraries")
        from hypha_ray.driver.launch import dry_run

        dry_run(loaded_job, phases, service, job_file.print)


class _JobFile:
    """A resolved job file that is printed once: with its summary, or without one if an error comes first.

    Args:
        text: the job file.

    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._is_printed = False

    def __enter__(self) -> _JobFile:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, HyphaError):
            self.print("")

    def print(self, summary: str) -> None:
        """Print the summary, each line as a comment of the job file, and then the job file."""
        if self._is_printed:
            return
        self._is_printed = True
        for line in summary.splitlines():
            print(f"# {line}")
        if summary:
            print()
        print(self._text, flush=True)


def _needs_own_ray(job: Job, directory: RunDirectory) -> bool:
    """Whether a job is to start Ray on this machine, as far as is known without libraries."""
    if not _starts_ray():
        return False
    commits = sorted(directory.path.glob("commits/round_*.json"))
    if job.rounds.counted:
        return len(commits) < job.rounds.update_rounds
    return job.dataset.mix != [] or not commits or epoch_of(commits[-1]) < (job.rounds.epochs or 0)


def epoch_of(record: Path) -> int:
    """The oldest epoch that isn't complete after a commit; 0 if its record is damaged."""
    try:
        return int(json.loads(record.read_bytes())["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _starts_ray() -> bool:
    """Whether a command that needs Ray starts it, in processes that Linux ends with this one."""
    return not os.environ.get("RAY_ADDRESS") and sys.platform == "linux"


class NotStarted(Exception):
    """End of a Ray before it had an address; the text is Ray's."""


class RayService:
    """Ray on this machine, for this process alone. It begins to start at once; `close` ends it.

    Its processes end with this process, however that ends.

    Args:
        forks: whether workers are to be forked from this process, when it calls `fork_workers`.

    """

    def __init__(self, forks: bool = True) -> None:
        sweep()  # Drivers that were killed have left theirs behind.
        self._folder = Scratch(LOCAL_RAY)
        path = str(self._folder.path / "fork_server")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.can_fork = forks and "ray" not in sys.modules and _listens(self._listener, path)
        """Whether workers can be forked: not after Ray was loaded, because Ray reads some variables of workers then."""
        self._server: int | None = None
        """Process id of the fork server; None without one."""
        self._server_end, self._end = os.pipe()
        """Ends of a pipe: the fork server ends when this process, with the second one, has ended."""
        self._address = ""
        script = Path(__file__).with_name("ray_head.py")
        self._head = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, SOCKET: path},
            start_new_session=True,  # Ctrl-C is for the driver, which ends the head.
            text=True,
        )
        if self.can_fork:
            os.environ |= _read_by_ray(self._head.pid)
        else:
            self._listener.close()  # Workers start by themselves.

    def fork_workers(self) -> None:
        """Fork workers from this process as it is now; if that isn't safe, each worker loads its libraries."""
        assert self.can_fork
        self._server = fork_server(self._listener, self._server_end)
        for name in _read_by_ray(self._head.pid):
            del os.environ[name]
        self._listener.close()  # Without a server, workers that wait for it start by themselves.
        os.close(self._server_end)

    def address(self) -> str:
        """Address of Ray's control service, once that answers.

        Raises:
            NotStarted: Ray didn't start.

        """
        if not self._address:
            assert self._head.stdout is not None
            line = self._head.stdout.readline()
            answer = json.loads(line) if line else {"error": "RuntimeError", "text": "its process has ended"}
            if "address" not in answer:
                raise NotStarted(answer["text"] or answer["error"])
            self._address = answer["address"]
        return self._address

    def start_rest(self) -> None:
        """Let the processes of Ray start that training doesn't need. Idempotent."""
        assert self._head.stdin is not None
        with suppress(OSError, ValueError):  # Ray is being ended.
            self._head.stdin.write(f"{LATER}\n")
            self._head.stdin.flush()

    def end(self) -> None:
        """Begin to end all of Ray's processes, without a wait. Idempotent."""
        assert self._head.stdin is not None
        self._listener.close()
        with suppress(OSError):
            self._head.stdin.close()
        if self._end >= 0:
            os.close(self._end)
            self._end = -1

    def close(self) -> None:
        """End all of Ray's processes. Idempotent."""
        self.end()
        try:
            self._head.wait(END_S)
        except subprocess.TimeoutExpired:
            self._head.kill()  # The system ends the others with it.
            self._head.wait()
        if self._server is not None:
            with suppress(ChildProcessError):
                os.waitpid(self._server, 0)
            self._server = None
        self._folder.close()


def _listens(listener: socket.socket, path: str) -> bool:
    """Let a socket listen at a path, unless that is too long for one; returns whether it does."""
    try:
        listener.bind(path)
    except OSError:
        return False
    listener.listen(128)
    return True


def _read_by_ray(head: int) -> dict[str, str]:
    """Variables that Ray reads as it is loaded, and that the raylet gives to its workers, which are forked afterwards.

    A worker ends if the raylet's process has. The head stands in for that, because it ends with the raylet.
    """
    return {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(head)}
