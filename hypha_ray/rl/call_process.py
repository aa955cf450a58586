"""Process of a user's code, which the process that asks it can kill."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from hypha_ray.errors import ConfigError, HyphaError

_PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that a process gets when its parent ends."""
NO_FILES: Final = f"[Errno {errno.EMFILE}]"
"""Text in the reason of a failure if a process has no file handles left; then another process has to go on."""
START_S = 120.0
"""Longest time that a process takes to load the code."""
_STARTS = 3
"""Number of times that a process is started if it is killed as it begins."""


class Code(NamedTuple):
    """Code of a user, as messages name it."""

    noun: str
    """Noun, such as ``reward functions``."""
    names: str
    """Names of its parts."""
    unloadable: str
    """Code of the error of code that can't be loaded."""
    serve: str
    """Function that the process runs, as ``module:function``; it calls `serve`."""


class CallProcess:
    """Child process that answers one request at a time.

    Args:
        code: the code.
        first_message: message by which the process loads it.
        start_s: longest time for that.

    Raises:
        ConfigError: the code can't be loaded, or not in time; the error's code is the one given.
        HyphaError: an error that the process answered with.

    """

    def __init__(self, code: Code, first_message: object, start_s: float = START_S) -> None:
        greeting = None
        for _ in range(_STARTS):
            self._begin(code)
            self.send(first_message)
            if not self._answers.poll(start_s):
                self.kill()
                fix = "see to what their modules do when they are imported"
                got = f"{code.names}: more than {start_s:g} s"
                raise ConfigError(code.unloadable, f"{code.noun} take too long to load", got, fix=fix)
            greeting = self.receive()
            if greeting is not None:
                break
            self.kill()
            if self._process.returncode != -signal.SIGKILL:  # Not by the kernel, for lack of memory.
                break
        if greeting is None:
            raise ConfigError(code.unloadable, f"a process for {code.noun} ended as it began", code.names)
        self.greeting: Any = greeting
        """Answer of the process to the first message."""

    def _begin(self, code: Code) -> None:
        module, _, function = code.serve.partition(":")
        command = [sys.executable, "-P", "-c", f"from {module} import {function}; {function}()"]
        python_path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": python_path}
        answers_end, child_output = os.pipe()
        child_input, requests_end = os.pipe()
        self._process = subprocess.Popen(
            command, env=environment, stdin=child_input, stdout=child_output, start_new_session=True
        )
        os.close(child_input)
        os.close(child_output)
        self._answers = Connection(answers_end, writable=False)
        self._requests = Connection(requests_end, readable=False)

    def fileno(self) -> int:
        """Return the descriptor that answers come from."""
        return self._answers.fileno()

    @property
    def alive(self) -> bool:
        """Whether the process hasn't ended."""
        return self._process.poll() is None

    def send(self, message: object) -> None:
        """Send a message; if the process is dead, `receive` returns None."""
        with suppress(BrokenPipeError):
            self._requests.send(message)

    def receive(self) -> Any:
        """Return the next answer; None if the process died instead.

        Raises:
            HyphaError: an error that the process answered with.

        """
        try:
            answer: Any = self._answers.recv()
        except (EOFError, OSError):
            return None
        if isinstance(answer, HyphaError):
            self.kill()
            raise answer
        return answer

    def kill(self) -> None:
        """End the process at once, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()
        self._requests.close()

    def __del__(self) -> None:
        if hasattr(self, "_process") and self.alive:
            self.kill()


class Service(NamedTuple):
    """Code that a process has loaded."""

    greeting: object
    """Answer to the first message."""
    answer: Callable[[Any, Callable[[object], None]], object]
    """Function of a message, and of a function that sends an answer before the last one."""


def serve(load: Callable[[Any], Service]) -> None:
    """Answer requests from standard input until it ends; whatever the code prints goes to standard error."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # Code that hangs doesn't outlive its worker.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # Without memory, the kernel ends it before its worker.
    requests = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    no_input = os.open(os.devnull, os.O_RDONLY)
    os.dup2(no_input, 0)
    os.dup2(2, 1)
    own_id = os.getpid()

    def send(answer: object) -> None:
        if os.getpid() != own_id:  # The code has forked, and this process has no request.
            os._exit(0)
        answers.send(answer)

    service: Service | None = None
    with suppress(EOFError):
        while True:
            message = requests.recv()
            try:
                if service is None:
                    service = load(message)
                    send(service.greeting)
                else:
                    send(service.answer(message, send))
            except HyphaError as error:
                send(error)
