"""Training from Python: its arguments, callbacks that are told of a run's records, and a handle for the background.

train ──thread──► run_job ──► run directory ──► new records, at least once a second ──► callbacks
"""

from __future__ import annotations

import html
import os
import re
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from hypha_ray.config.keys import choice_remedy
from hypha_ray.config.load import Loaded
from hypha_ray.driver.run_folders import name_run
from hypha_ray.errors import CheckpointError, ConfigError, HyphaError, reason_of
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, NewRecords

if TYPE_CHECKING:
    from hypha_ray.driver.run import Run

_FLAG = re.compile(r"--([a-z][\w.-]*)")
_COMMAND = re.compile(r"jobs/|hypha-ray ")
"""A command in a message, whose flags stay."""
_ROUND = re.compile(r"\bround ([1-9]\d*)")
"""A round in a message, counted from 1."""
_CALLS = ("on_round", "on_eval", "on_event")
"""Functions that each callback has."""
_LONGEST = 80
"""Most letters of a value in an error."""
ArgumentKind: TypeAlias = tuple[str, tuple[type, ...]]
"""Kind of values that an argument may have: its description, and the types."""
FLAG: Final[ArgumentKind] = ("True or False", (bool,))
JOB: Final[ArgumentKind] = ("a job, its tables, or the path of a job file", (str, os.PathLike))
"""Forms of a job besides `Job` and nested tables."""
NUMBER: Final[ArgumentKind] = ("a number", (Real,))
PATH: Final[ArgumentKind] = ("a path", (str, os.PathLike))
TEXT: Final[ArgumentKind] = ("a text", (str,))
TEXTS: Final[ArgumentKind] = ("a list of texts", (list, tuple))
WHOLE: Final[ArgumentKind] = ("a whole number", (Integral,))
_is_training = threading.Lock()
"""Held while this process trains: it has one connection to Ray."""


class StopTraining(Exception):
    """Raised by a callback to stop the run after its last commit, as `Training.stop` does."""


class Callback:
    """Functions that this process calls while a run trains; a subclass overrides those that it needs.

    A record is a dict as in the run's files, with rounds counted from 0. A round that is trained again after a crash is
    told again. A callback that raises an error isn't called any more: the error is a warning, and the run goes on.
    `StopTraining` stops the run.
    """

    def on_round(self, record: dict[str, Any]) -> None:
        """Take the record of a round, which comes after the evaluation of its weights."""

    def on_eval(self, record: dict[str, Any]) -> None:
        """Take the figures of an evaluation."""

    def on_event(self, record: dict[str, Any]) -> None:
        """Take an event, such as ``join``, ``loss`` or ``commit``."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of a run that `train` has begun."""

    state: Literal["running", "finished", "stopped", "failed"]
    rounds: int
    """Number of committed rounds."""
    total_rounds: int | None
    """Number of rounds of the job; None if only the dataset tells it, before the first round."""
    last_round: dict[str, Any] = field(default_factory=dict)
    """Record of the last round; empty before the first."""


class Training:
    """A run that trains in the background, on a thread of this process.

    `train(job, wait=False)` returns one. It ends with this process; the run then goes on when its job is trained again.
    """

    def __init__(self, loaded_job: Loaded, kind: str, callbacks: Sequence[Callback]) -> None:
        if not _is_training.acquire(blocking=False):
            fix = "wait for it by result(), or stop it by stop()"
            raise ConfigError("API001", "this process trains another run", fix=fix)
        try:
            job, directory = name_run(loaded_job.job, kind)
            self._follower = _Follower(directory.path, callbacks)
        except BaseException:
            _is_training.release()
            raise
        self._job = job
        self._loaded = replace(loaded_job, job=job)
        self._kind = kind
        self._folder = directory.path
        self._error: BaseException | None = None
        self._is_stopped = False
        """Whether a stop has ended it, before its last round."""
        # A `join` that Ctrl-C interrupts lets Python take a living thread for a dead one.
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._train, name=f"training-{directory.path.name}", daemon=True)

    @property
    def run(self) -> Run:
        """The run.

        Raises:
            CheckpointError: CKPT001, it hasn't begun yet.

        """
        from hypha_ray.driver.run import Run

        if not RunDirectory(self._folder).begun:
            problem = f"run {self._folder.name} has not begun"
            raise CheckpointError("CKPT001", problem, fix="ask again once its progress has a round")
        return Run(self._folder)

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._ended.is_set()

    @property
    def progress(self) -> TrainingProgress:
        """Progress so far."""
        from hypha_ray.history.overview import committed_rounds

        last_round = self._follower.last_round
        total = self._job.rounds.update_rounds if self._job.rounds.counted else None
        return TrainingProgress(
            self._state, committed_rounds(self._folder), last_round.get("rounds", total), last_round
        )

    def stop(self, wait: bool = True) -> None:
        """Stop the run: what isn't committed is lost, and the same job goes on from there.

        Args:
            wait: whether to return only when it has ended; in a callback there is no wait.

        """
        if self.done:
            return
        self._follower.stop()
        if wait and threading.current_thread() is not self._thread:  # Callbacks are called on that thread.
            self._ended.wait()

    def result(self, timeout_s: float | None = None) -> Run:
        """Wait for the end, and return the run; a run that was stopped is returned, too.

        Args:
            timeout_s: longest wait in seconds; None: as long as it takes.

        Raises:
            HyphaError: the error that ended the run; CKPT001, it was stopped before it began.
            TimeoutError: it hasn't ended by then; it trains on.

        """
        require_kind(or_none(NUMBER), timeout_s=timeout_s)
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"run {self._folder.name} has not ended after {timeout_s:g} s; it trains on")
        if self._error is not None:
            raise self._error
        return self.run

    def __repr__(self) -> str:
        progress = self.progress
        total = "?" if progress.total_rounds is None else progress.total_rounds
        return f"Training({self._folder.name!r}, {progress.state}, round {progress.rounds} of {total})"

    def _repr_html_(self) -> str:
        progress = self.progress
        total_rounds = progress.total_rounds or 1
        bar = f'<progress value="{progress.rounds}" max="{total_rounds}"></progress>'
        return f"<p>{html.escape(repr(self))} {bar}</p>"

    @property
    def _state(self) -> Literal["running", "finished", "stopped", "failed"]:
        if not self.done:
            return "running"
        if self._error is not None:
            return "failed"
        return "stopped" if self._is_stopped else "finished"

    def begin(self) -> Training:
        """Begin to train on another thread."""
        self._thread.start()
        return self

    def train_here(self) -> Run:
        """Train on this thread until the end.

        Raises:
            HyphaError: the error that ended the run.

        """
        self._train()
        if self._error is not None:
            raise self._error
        return self.run

    def _train(self) -> None:
        """Train, and keep the error that ended the run."""
        try:
            self._run()
        except BaseException as error:
            self._error = error
        finally:
            _is_training.release()
            self._ended.set()

    def _run(self) -> None:
        """Train, and tell the callbacks of the last records; a stop is no error."""
        from hypha_ray.driver.launch import run_job

        try:
            with flagless():
                run_job(self._loaded, job_name=self._kind, check=self._follower.check)
        except KeyboardInterrupt:
            if not self._follower.is_stopped:
                raise
            self._is_stopped = True
        finally:
            self._follower.tell()


class _Follower:
    """Tells callbacks of new records, and stops the run if it is asked to.

    Args:
        folder: the run directory, which may not exist yet.
        callbacks: what to call.

    """

    def __init__(self, folder: Path, callbacks: Sequence[Callback]) -> None:
        self._metrics = NewRecords(folder / METRICS)
        self._events = NewRecords(folder / EVENTS)
        self._callbacks = list(callbacks)
        self.last_round: dict[str, Any] = {}
        """Record of the last round; empty before the first."""
        self.is_stopped = False
        """Whether the run was asked to stop."""

    def stop(self) -> None:
        """Let the next `check` stop the run."""
        self.is_stopped = True

    def check(self) -> None:
        """Tell the callbacks of new records.

        Raises:
            KeyboardInterrupt: the run is to stop, as if a user had interrupted it.

        """
        self.tell()
        if self.is_stopped:
            raise KeyboardInterrupt

    def tell(self) -> None:
        """Tell the callbacks of new records."""
        for record in self._metrics.read():
            match record.get("kind"):
                case "round":
                    self.last_round = record
                    self._call("on_round", record)
                case "eval":
                    self._call("on_eval", record)
        for record in self._events.read():
            self._call("on_event", record)

    def _call(self, function: str, record: dict[str, Any]) -> None:
        """Call a function of each callback; one that raises an error is left out from then on."""
        for callback in list(self._callbacks):
            try:
                getattr(callback, function)(record)
            except StopTraining:
                self.stop()
            except Exception as error:  # A user's function may raise anything.
                self._callbacks.remove(callback)
                name = type(callback).__name__
                text = f"callback {name} is left out, because it raised {reason_of(error)}; the run goes on"
                warnings.warn(text, RuntimeWarning, stacklevel=2)


@contextmanager
def flagless() -> Iterator[None]:
    """Raise errors of the block with names of arguments and keys in place of flags, and rounds as Python counts."""
    try:
        yield
    except HyphaError as error:
        texts = [in_python(text) for text in (error.what, error.got, error.allowed, error.fix)]
        round_named = isinstance(error, CheckpointError) and _ROUND.search(f"{error.fix} {error.what}")
        if round_named:
            round_number = int(round_named[1])
            texts[-1] += f"; Python counts rounds from 0, so round {round_number} is round={round_number - 1}"
        if texts == [error.what, error.got, error.allowed, error.fix]:
            raise
        raise type(error)(error.code, *texts) from error


def in_python(text: str) -> str:
    """Write ``--resume`` as ``resume=True``, and other flags as the argument or key of the same name."""
    if _COMMAND.search(text):
        return text
    text = text.replace("see --help", "see docs/configuration.md").replace("--resume", "resume=True")
    return _FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)


def or_none(argument_kind: ArgumentKind) -> ArgumentKind:
    """Return a kind with None."""
    text, types = argument_kind
    return f"{text} or None", (*types, type(None))


def require_kind(kind: ArgumentKind, /, **arguments: object) -> None:
    """Refuse arguments that are of another kind; True and False are no numbers.

    Raises:
        ConfigError: CFG002, an argument is of another kind.

    """
    text, types = kind
    for name, value in arguments.items():
        is_stray_flag = isinstance(value, bool) and bool not in types
        if is_stray_flag or not isinstance(value, types):
            raise _wrong_type(name, value, text, f"give {text}")


def require_choice(choices: Sequence[Any], /, **arguments: object) -> None:
    """Refuse arguments that are none of the choices.

    Raises:
        ConfigError: CFG003, one of them is none.

    """
    for name, value in arguments.items():
        if value not in choices:
            allowed = " | ".join(map(str, choices))
            problem = f"{name} is out of range"
            raise ConfigError("CFG003", problem, repr(value)[:_LONGEST], allowed, choice_remedy(value, allowed))


def require_settings(function: str, given_names: Iterable[str], known_names: Collection[str]) -> None:
    """Refuse settings that a function doesn't have, in the words in which Python refuses arguments.

    Raises:
        TypeError: the function lacks one of them.

    """
    for name in given_names:
        if name not in known_names:
            hint = f"its settings are {', '.join(known_names)}"
            for match in get_close_matches(name, known_names, n=1):
                hint = f"did you mean {match!r}?"
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {hint}")


def require_callbacks(callbacks: object) -> None:
    """Refuse callbacks without the methods of `Callback`.

    Raises:
        ConfigError: CFG002, they are no list, or one of them lacks a function.

    """
    allowed = "a list of objects of hypha_ray.Callback"
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str):
        raise _wrong_type("callbacks", callbacks, allowed, "put them in a list")
    for number, callback in enumerate(callbacks):
        name = f"callbacks[{number}]"
        if isinstance(callback, type):
            raise _wrong_type(name, callback, allowed, f"write {callback.__name__}(), an object of the class")
        missing = [call for call in _CALLS if not callable(getattr(callback, call, None))]
        if missing:
            fix = f"derive its class from hypha_ray.Callback, since it has no {missing[0]}"
            raise _wrong_type(name, callback, allowed, fix)


def _wrong_type(name: str, value: object, allowed: str, fix: str) -> ConfigError:
    return ConfigError("CFG002", f"{name} has the wrong type", repr(value)[:_LONGEST], allowed, fix)
