"""Process of reward functions, which the process that asks it can kill."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.rl.rewards import mathematics
from hypha_ray.rl.rewards.calls import Calls, Row, Tasks
from hypha_ray.rl.rewards.response import Response

_PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that a process gets when its parent ends."""
START_S = 120.0
"""Longest time that a process takes to load the functions."""


class RewardProcess:
    """Child process that evaluates one response at a time.

    Args:
        names: functions that it loads.
        tasks: functions of single tasks.
        start_s: longest time to load them.

    Raises:
        ConfigError: RWD003, RWD004, a function can't be had, or not in time.

    """

    def __init__(self, names: Sequence[str], tasks: Tasks, start_s: float = START_S) -> None:
        command = [sys.executable, "-P", "-c", f"from {__name__} import _serve; _serve()"]
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
        self.called = ""
        """Name of the function that was called last; empty before the first."""
        self._send((tuple(names), dict(tasks)))
        if not self._answers.poll(start_s):
            self.kill()
            functions = ", ".join(names)
            fix = "see to what their modules do when they are imported"
            raise ConfigError(
                "RWD004", "reward functions take too long to load", f"{functions}: more than {start_s:g} s", fix=fix
            )
        if self.receive() is None:
            self.kill()
            raise ConfigError("RWD004", "a process for reward functions ended as it began", ", ".join(names))

    def fileno(self) -> int:
        """Return the descriptor that answers come from."""
        return self._answers.fileno()

    @property
    def alive(self) -> bool:
        """Whether the process hasn't ended."""
        return self._process.poll() is None

    def ask(self, response: Response) -> None:
        """Send a response; if the process is dead, `receive` returns None."""
        self.called = ""
        self._send(response)

    def _send(self, message: Any) -> None:
        with suppress(BrokenPipeError):
            self._requests.send(message)

    def receive(self) -> Row | str | None:
        """Return the answer, or the name of a function that is called now; None if the process died instead.

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
        if isinstance(answer, str):
            self.called = answer
            return answer
        row: Row = answer
        return row

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


def _serve() -> None:
    """Answer requests from standard input until it ends; whatever functions print goes to standard error."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # A function that hangs doesn't outlive its worker.
    requests = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    no_input = os.open(os.devnull, os.O_RDONLY)
    os.dup2(no_input, 0)
    os.dup2(2, 1)
    calls: Calls | None = None
    with suppress(EOFError):
        while True:
            message = requests.recv()
            try:
                if calls is None:
                    calls = _load_calls(*message)
                    answers.send(())
                else:
                    answers.send(calls.row(message, answers.send))
            except HyphaError as error:
                answers.send(error)


def _load_calls(names: Sequence[str], tasks: Tasks) -> Calls:
    calls = Calls(names, tasks)
    if "math" in names:
        mathematics.warm_up()
    return calls
