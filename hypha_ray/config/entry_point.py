"""The error boundary of every job script: one line and an exit code for user errors, a traceback for bugs.

It also guards against libraries that end the process: Intel's MKL exits with code 2 if it can't load itself in a
moment. That code would say that the command line is wrong. Under load it happens once in some starts, and not the next
time. So the process begins anew, once, and ends with the code for "try again" the second time. Python sees nothing of
an exit from C, but the C library calls what `__cxa_atexit` has registered. Other C libraries than glibc have no guard.

Output of a command: standard streams that can't make it fail, and a line on standard error for each of its phases.

[   0.4s] loading libraries
[   3.1s] checking model and data
[  63.1s] still checking model and data

A job may run for days and print its result at the end. ``| head -1``, a closed stream or an ASCII locale must not make
it fail. Text that nothing reads is dropped, and a character that the encoding lacks becomes a question mark.

Cause and remedy of each error code are in `error_codes.toml`, which is read only for an error, and for docs/errors.md.
"""

from __future__ import annotations

import ctypes
import io
import os
import re
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hypha_ray.errors import ClusterError, ConfigError, DataError, HyphaError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STDOUT = Path("-")
"""Name of a file that stands for standard output."""
_results: list[TextIO] = []
"""Standard output, if it is kept for a result; the last one counts."""
SILENCE_S = 60.0
"""Longest silence of a command that is at work, in seconds, if its output isn't a terminal."""
SHORT_S = 0.8
"""Seconds that a phase has to last before its line is printed, so a quick command prints only its result or error."""
CODE = 2
"""Exit code of such a library."""
_TRIED = "_HYPHA_RAY_BEGUN_ANEW"
"""Environment variable of a process that has started itself anew; its children don't have the variable."""
INTERRUPTED = 130
_TABLE = Path(__file__).with_name("error_codes.toml")
_BEGIN = "<!-- codes: made by hypha_ray.config.entry_point -->"
_END = "<!-- end of codes -->"


def endure() -> None:
    """Replace standard output and standard error by such streams, once; streams set by other code stay."""
    _occupy()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _enduring(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _enduring(sys.stderr, 2)


def keep_stdout_for_result() -> None:
    """Keep standard output for a result: all else that is printed goes to standard error."""
    _results.append(sys.stdout)
    sys.stdout = sys.stderr


def print_notes(notes: Iterable[str]) -> None:
    """Print notes for the user on standard error."""
    for note in notes:
        print(f"note: {note}\n", end="", file=sys.stderr)


def write_result(option: str, file: Path, content: str | bytes) -> None:
    """Write a result to the file that an option names, or to standard output if that is ``-``.

    Raises:
        ConfigError: CFG008, the file can't be written.

    """
    if file == STDOUT and _results:
        stream = _results[-1]
        text = content if isinstance(content, str) else content.decode()
        stream.write(text)
        stream.flush()
        return
    try:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        got = f"{file} ({error.strerror or error})"
        raise ConfigError("CFG008", f"{option} can't be used", got, "a file that can be written", "name one") from None


def require_writable(option: str, file: Path | None) -> None:
    """Refuse a file that can't be written, before the result that it is for is computed; None: no file.

    Raises:
        ConfigError: CFG008, the file can't be written.

    """
    if file in (None, STDOUT):
        return
    try:
        is_writable = os.access(file if file.exists() else file.parent, os.W_OK) and not file.is_dir()
    except OSError:  # For instance, the name is too long.
        is_writable = False
    if not is_writable:
        raise ConfigError("CFG008", f"{option} can't be used", str(file), "a file that can be written", "name one")


def unwritten() -> str:
    """Reason that standard output could not be written; empty if it was, or if its reader went away."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    stdout = _results[-1] if _results else sys.stdout
    raw_stream = getattr(stdout, "buffer", None)
    raw_stream = getattr(raw_stream, "raw", raw_stream)
    if not isinstance(raw_stream, _Enduring):
        return ""
    return raw_stream.problem


class _Enduring(io.FileIO):
    """A descriptor that accepts everything; `problem` is the first failure other than a reader's departure."""

    problem = ""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            pass
        except BlockingIOError:
            raise
        except OSError as error:
            self.problem = self.problem or error.strerror or str(error)
        return len(memoryview(data))


def _enduring(stream: TextIO | None, descriptor: int) -> TextIO:
    raw_stream = _Enduring(descriptor, "wb", closefd=False)
    # With `python -u`, text goes straight to the descriptor; otherwise through a buffer, as in Python's own streams.
    is_unbuffered = isinstance(stream, io.TextIOWrapper) and stream.write_through
    return io.TextIOWrapper(
        raw_stream if is_unbuffered else io.BufferedWriter(raw_stream),
        encoding="utf-8" if stream is None else stream.encoding,
        errors="replace",
        line_buffering=raw_stream.isatty() or descriptor == 2,
        write_through=is_unbuffered,
    )


def _occupy() -> None:
    """Open the null device for every closed standard stream, so that no other file gets its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


class Heartbeat:
    """Calls a function after every silence of a given length, from a thread of its own.

    Args:
        speak: writes a line.
        silence_s: length of a silence in seconds.

    """

    def __init__(self, speak: Callable[[], None], silence_s: float = SILENCE_S) -> None:
        self._speak = speak
        self._silence_s = silence_s
        self._wait_s = silence_s
        """Length of the silence that lasts."""
        self._interrupted = threading.Event()
        """Set by a line of other code, and by the end."""
        self._stopped = False
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def restart(self, wait_s: float | None = None) -> None:
        """Begin the silence anew; this one may be of another length."""
        self._wait_s = self._silence_s if wait_s is None else wait_s
        self._interrupted.set()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopped = True
        self._interrupted.set()

    def _run(self) -> None:
        while not self._stopped:
            if self._interrupted.wait(self._wait_s):
                self._interrupted.clear()
            else:
                self._wait_s = self._silence_s
                self._speak()


class Phases(AbstractContextManager["Phases"]):
    """Says what a command does, unless that is done at once, and from time to time that it still does it.

    Args:
        stream: where to write; default: standard error.
        began_s: monotonic time at which the command began; default: when this process did.
        clock: monotonic seconds.
        silence_s: seconds after which the line of a phase that goes on is printed again.
        short_s: seconds after which a phase's line is printed; for the first line they count from the command's
            beginning.

    """

    def __init__(
        self,
        stream: TextIO | None = None,
        began_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        silence_s: float = SILENCE_S,
        short_s: float = SHORT_S,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._silence_s = silence_s
        self._short_s = short_s
        self.began_s = process_began_s() if began_s is None else began_s
        self._text = ""
        self._phase_s = self.began_s
        """Time at which the current phase began."""
        self._is_said = self._has_spoken = False
        self._heartbeat: Heartbeat | None = None

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, text: str) -> None:
        """Say that a phase begins, which ends the one before."""
        self._text = text
        self._is_said = False
        self._phase_s = self._clock()
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(self._speak, self._silence_s)
        silent_since_s = self._phase_s if self._has_spoken else self.began_s
        self._heartbeat.restart(max(0.0, silent_since_s + self._short_s - self._phase_s))

    def update(self, text: str) -> None:
        """Change the text about the present phase, which is printed after a silence."""
        self._text = text

    def end(self) -> None:
        """End the last phase, and print nothing."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        self._has_spoken = False

    def _speak(self) -> None:
        if self._is_said:
            text = line(self._clock() - self.began_s, f"still {self._text}")
        else:
            text = line(self._phase_s - self.began_s, self._text)
        self._is_said = self._has_spoken = True
        with suppress(OSError, ValueError):  # The reader of the output is gone, or the stream is closed.
            print(f"{text}\n", end="", file=self._stream or sys.stderr, flush=True)  # At once, beside other threads.


def line(seconds: float, text: str) -> str:
    """Write a phase with its time."""
    return f"[{seconds:6.1f}s] {text}"


def process_began_s() -> float:
    """Monotonic time at which this process began, as far as the system tells; otherwise the time of the call."""
    now = time.monotonic()
    with suppress(OSError, ValueError, IndexError, AttributeError):
        status = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        _, _, behind_name = status.rpartition(")")
        start_ticks = int(behind_name.split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
        return now - max(0.0, age_s)
    return now


@contextmanager
def begun_anew() -> Iterator[None]:
    """Begin this process anew, with the same command, if a library ends it meanwhile by an exit with `CODE`."""
    is_second_try = os.environ.pop(_TRIED, None) is not None
    library = ctypes.CDLL(None)
    process = os.getpid()
    if not hasattr(library, "__cxa_atexit") or not hasattr(library, "__cxa_finalize"):
        yield
        return
    armed = [True]

    def on_exit(_: Any, code: int) -> None:
        if armed and code == CODE and os.getpid() == process:
            if is_second_try:
                _end()
            else:
                _begin()

    handler_type: Callable[..., Any] = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
    callback = handler_type(on_exit)
    mark = ctypes.create_string_buffer(1)
    library.__cxa_atexit(callback, None, mark)
    try:
        yield
    finally:
        armed.clear()
        library.__cxa_finalize(mark)  # Calls it, and forgets it: it must not be called when Python has ended.


def _begin() -> None:
    """Replace this process by the same command."""
    print("note: a library couldn't be loaded and ended the process; it begins anew", file=sys.stderr, flush=True)
    os.environ[_TRIED] = "1"
    arguments = sys.orig_argv[1:]
    os.execv(sys.executable, [sys.executable, *arguments])


def _end() -> None:
    """End this process with the code that asks for another try."""
    problem = "a library couldn't be loaded, twice, and ended the process"
    fix = "see its message above; submit it again"
    error = ClusterError("ENV001", problem, f"exit code {CODE}", fix=fix)
    print(error, file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def run(main: Callable[[], None]) -> None:
    """Run a job script's `main`.

    An error from a Ray task has both its own class and Ray's, and a traceback as its text. The user sees its `cause`,
    the error that the task raised.

    Raises:
        SystemExit: with the error's exit code after a HyphaError, or with 130 after Ctrl-C.

    """
    endure()
    # What transformers would say of its own accord means nothing to users of a job. A value that is set already stays.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with begun_anew():
            main()
        if reason := unwritten():
            fix = "free some space, or redirect the output"
            raise DataError("OUT001", "the job is done, but standard output can't be written", reason, fix=fix)
    except HyphaError as error:
        cause: HyphaError = getattr(error, "cause", error)
        lines = _with_remedy(cause).splitlines()
        print(f"{' '.join(lines)}\n", end="", file=sys.stderr)  # At once: a phase may be said meanwhile.
        raise SystemExit(cause.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _with_remedy(error: HyphaError) -> str:
    """Text of an error; one that has no remedy of its own gets that of its code."""
    if error.fix or error.code not in explanations():
        return str(error)
    remedy = explanations()[error.code].remedy.removesuffix(".")
    return f"{error} Fix: {remedy[0].lower()}{remedy[1:]}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Meaning of an error code."""

    code: str
    subject: str
    """Subject of all codes with the same letters."""
    cause: str
    """Sentence about the usual cause."""
    remedy: str
    """Sentence about the remedy."""

    def lines(self) -> Iterator[str]:
        """Write the explanation as text."""
        yield f"{self.code}    {self.subject}"
        yield f"cause     {self.cause}"
        yield f"remedy    {self.remedy}"


@cache
def explanations() -> dict[str, Explanation]:
    """Explanations of all codes, in the order of the table."""
    all_codes: dict[str, Explanation] = {}
    for codes in tomllib.loads(_TABLE.read_text(encoding="utf-8")).values():
        subject = codes.pop("title")
        for code, sentences in codes.items():
            all_codes[code] = Explanation(code, subject, sentences["cause"], sentences["remedy"])
    return all_codes


def explanation_of(text: str) -> Explanation:
    """Return the explanation of a code, which may stand as ``error[CODE]`` and in small letters.

    Raises:
        ConfigError: CFG003, there is no such code; the nearest are named.

    """
    all_codes = explanations()
    code = text.strip().upper().removeprefix("ERROR").strip("[]: ")
    if code in all_codes:
        return all_codes[code]
    similar = get_close_matches(code, all_codes, n=3)
    fix = "see docs/errors.md, or give no code for the list"
    if similar:
        listed_codes = " or ".join(similar)
        fix = f"did you mean {listed_codes}?"
    raise ConfigError("CFG003", "there is no such error code", repr(text), "letters and three digits", fix)


def explanations_of(text: str) -> list[Explanation]:
    """Return the explanation of a code, or those of all codes with the given letters, such as CFG.

    Raises:
        ConfigError: CFG003, there is no such code; the nearest are named.

    """
    letters = text.strip().upper()
    family = [explanation for code, explanation in explanations().items() if code.rstrip("0123456789") == letters]
    return family or [explanation_of(text)]


def codes_markdown() -> str:
    """All codes as markdown: a heading and a table for each subject."""
    parts: list[str] = []
    subject = None
    for explanation in explanations().values():
        if explanation.subject != subject:
            subject = explanation.subject
            parts += ["", f"## {subject}", "", "| code | cause | remedy |", "|---|---|---|"]
        parts.append(f"| {explanation.code} | {explanation.cause} | {explanation.remedy} |")
    return "\n".join(parts).strip()


def renewed(document: str) -> str:
    """A markdown document with its list of codes regenerated between the two comments that mark it."""
    block = f"{_BEGIN}\n\n{codes_markdown()}\n\n{_END}"
    pattern = f"{re.escape(_BEGIN)}.*{re.escape(_END)}"
    return re.sub(pattern, lambda _: block, document, flags=re.DOTALL)
