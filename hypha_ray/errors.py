"""Everything that can go wrong for a user, as one tree.

    HyphaError                      exit code   a user would …
    ├─ ConfigError                  2           mend the job file or the command line
    ├─ DataError                    3           mend or prepare the dataset
    │  └─ QuarantinedError                      do nothing: the run goes on without a slice
    ├─ AuthenticationError          4           give a token, or trust the model's code
    │  └─ ExpiredError                          renew the credentials
    ├─ CheckpointError              5           choose another checkpoint
    └─ TryAgainError                75          wait, or bring more machines
       ├─ CapacityError                         the cluster lacks a resource
       │  └─ OutbidError                        do nothing: the run waits for its turn
       ├─ ClusterError                          Ray can't be reached, or an actor is gone
       │  └─ LostError                          do nothing: the run goes on from its last commit
       ├─ BridgeError                           the other side of a bridge is gone, or breaks the protocol
       └─ HubError                              a model or dataset hub can't be reached

Each error says what is wrong and where, what was got and what is allowed, and what to do about it. It travels
between actors, so its arguments are plain strings. Its text has no secrets of URLs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ClassVar, ParamSpec, TypeVar

from hypha_ray.texts import HIDDEN, redacted, secrets_of

P = ParamSpec("P")
T = TypeVar("T")

_PACKAGE = Path(__file__).parent
_PYTHON = Path(contextlib.__file__).parent
"""Folder of Python's own modules, in which those that are installed have one of theirs."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_LONGEST_REASON = 300
"""Longest reason of a library in a message, in characters."""


class HyphaError(Exception):
    """An error that a user can act on; printed as one line, without a traceback.

    Args:
        code: a stable name such as ``CFG001``.
        what: what is wrong and where.
        got: what was found, if that helps.
        allowed: what would have been right.
        fix: what to do.

    """

    exit_code: ClassVar[int] = 1

    def __init__(self, code: str, what: str, got: str = "", allowed: str = "", fix: str = "") -> None:
        super().__init__(code, what, got, allowed, fix)
        self.code = code
        self.what = what
        self.got = got
        self.allowed = allowed
        self.fix = fix

    def __str__(self) -> str:
        details = []
        if self.got:
            details.append(f"got {self.got}")
        if self.allowed:
            details.append(f"allowed {self.allowed}")
        text = f"error[{self.code}]: {self.what}"
        if details:
            text += f" — {', '.join(details)}"
        if not text.endswith((".", "?", "!")):
            text += "."
        if self.fix:
            text += f" Fix: {self.fix}"
        return redacted(text)


class ConfigError(HyphaError):
    """The command line or the job file is wrong."""

    exit_code = 2


class DataError(HyphaError):
    """A dataset or slice is missing, damaged or doesn't fit the model."""

    exit_code = 3


class QuarantinedError(DataError):
    """A slice is damaged and was set aside: the run goes on without it, from its last commit."""


class AuthenticationError(HyphaError):
    """A token is missing or wrong, or untrusted code would have to run."""

    exit_code = 4


class ExpiredError(AuthenticationError):
    """Credentials were valid once; a run waits for new ones."""


class CheckpointError(HyphaError):
    """A checkpoint or model folder can't be used."""

    exit_code = 5


class TryAgainError(HyphaError):
    """Nothing is wrong with the job; it may work later."""

    exit_code = 75


class CapacityError(TryAgainError):
    """The cluster lacks a resource, now or ever."""


class OutbidError(CapacityError):
    """Other runs of the auction have the machines of a run that has trained nothing yet: it waits for its turn."""


class ClusterError(TryAgainError):
    """Ray can't be reached, or an actor died."""


class LostError(ClusterError):
    """Objects in memory were lost with a node: the run continues from its last commit."""


class BridgeError(TryAgainError):
    """The other side of a bridge is gone, silent, or breaks the protocol."""


class HubError(TryAgainError):
    """A hub can't be reached and the local cache doesn't help."""


def first_line(error: BaseException) -> str:
    """First line of an error's text; the name of its class if there is no text."""
    line, _, _ = str(error).strip().partition("\n")
    return line or type(error).__name__


def reason_of(error: BaseException) -> str:
    """Class and text of an error of a library or of users' code, as one line of at most 300 characters."""
    try:
        text = str(error)
    except Exception as another:  # A class of users may have no text at all.
        text = f"its text can't be had ({type(another).__name__})"
    return " ".join(f"{type(error).__name__}: {text}".split())[:_LONGEST_REASON]


def place_of(error: BaseException) -> str:
    """File and line of users' code, or of a library, from which an error came: ``(mine.py, line 7)``; empty if ours.

    Python's own modules, such as contextlib, only pass it on. Libraries may call users' code, as torch does, which then
    counts.
    """
    trace = error.__traceback__
    place = ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        is_installed = bool(_INSTALLED & set(file.parts))
        is_of_python = file.name.startswith("<frozen") or (file.is_relative_to(_PYTHON) and not is_installed)
        if not file.is_relative_to(_PACKAGE) and not is_of_python:
            text = f"({file.name}, line {trace.tb_lineno})"
            if not is_installed:
                return text
            place = place or text
        trace = trace.tb_next
    return place


@contextmanager
def member_errors(member: str) -> Iterator[None]:
    """Context in which whatever a member of users raises in a run is an error of the job.

    Args:
        member: family and name of the member, for the message.

    Raises:
        ConfigError: PLG004.

    """
    try:
        yield
    except HyphaError:
        raise
    except (Exception, SystemExit) as error:  # A member of users may raise anything.
        got = f"{reason_of(error)} {place_of(error)}".strip()
        fix = "mend it, then --resume the run; where that makes it another training (CKPT007), begin a new one"
        raise ConfigError("PLG004", f"{member} fails in the run", got, fix=fix) from error


def guarded(member: str, function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose calls run in the context of `member_errors`."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with member_errors(member):
            return function(*args, **kwargs)

    return call


def line_of(error: BaseException, url: str) -> str:
    """One line of an error, without the secrets of a URL, which it may repeat."""
    text = redacted(first_line(error))
    for secret in secrets_of(url):
        text = text.replace(secret, HIDDEN)
    return f"{type(error).__name__}: {text}"
