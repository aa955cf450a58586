"""Calls of reward functions: in the worker's own process, or in others that are killed when they take too long."""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.rl.rewards.registry import Tasks, functions_of, reward_of
from hypha_ray.rl.rewards.response import Response, Reward

_PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that a process gets when its parent ends."""
_START_S = 120.0
"""Longest time that a process takes to load the functions."""


class Evaluator(Protocol):
    """Way to the rewards of responses."""

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return what each function gives for each response; NaN: absent, or not a function of the response's task.

        Raises:
            ConfigError: RWD001, a function failed; RWD003, RWD004, it can't be had.

        """
        ...


class InPlace:
    """Calls in this process, one after the other.

    Args:
        names: functions of the job.
        tasks: functions of single tasks.

    """

    def __init__(self, names: Sequence[str], tasks: Tasks | None = None) -> None:
        self._names, self._tasks = tuple(names), tasks or {}
        self._functions = {name: reward_of(name) for name in names}

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return rewards as `Evaluator` says."""
        return [tuple(self._rewards(response)) for response in responses]

    def _rewards(self, response: Response) -> Iterator[float]:
        own = functions_of(response, self._tasks, self._names)
        for name, function in self._functions.items():
            yield reward(name, function, response) if name in own else math.nan


class Processes:
    """Calls in other processes; one that takes too long, or dies, is replaced, and its response has no reward.

    Args:
        names: functions of the job.
        count: number of processes.
        deadline_s: limit for all functions of one response.
        tasks: functions of single tasks.

    """

    def __init__(self, names: Sequence[str], count: int, deadline_s: float, tasks: Tasks | None = None) -> None:
        self._names, self._count, self._deadline_s, self._tasks = tuple(names), count, deadline_s, dict(tasks or {})
        self._idle: list[_Process] = []

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return rewards as `Evaluator` says."""
        absent = (math.nan,) * len(self._names)
        found = [absent] * len(responses)
        waiting, busy = deque(enumerate(responses)), dict[_Process, tuple[int, float]]()
        while waiting or busy:
            while waiting and len(busy) < self._count:
                process = self._idle.pop() if self._idle else _Process(self._names, self._tasks)
                place, response = waiting.popleft()
                process.send(response)
                busy[process] = place, time.monotonic() + self._deadline_s
            limit_s = min(at for _, at in busy.values()) - time.monotonic()
            ready, *_ = select.select(list(busy), [], [], max(0.0, limit_s))
            for process in [one for one, (_, at) in busy.items() if one in ready or time.monotonic() >= at]:
                place, _ = busy.pop(process)
                answer = process.receive() if process in ready else None
                if answer is None:
                    process.kill()
                    continue
                self._idle.append(process)
                found[place] = answer
        return found


class Together:
    """Evaluators of some of the functions each.

    Args:
        parts: evaluators, with the places of their functions among all.

    """

    def __init__(self, parts: Sequence[tuple[Sequence[int], Evaluator]]) -> None:
        self._parts = parts

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return rewards as `Evaluator` says."""
        columns: dict[int, list[float]] = {}
        for places, evaluator in self._parts:
            found = evaluator.rewards(responses)
            columns |= {place: [row[number] for row in found] for number, place in enumerate(places)}
        return list(zip(*(columns[place] for place in sorted(columns)), strict=True))


class _Process:
    """Another process, which evaluates one response at a time.

    Args:
        names: functions that it loads.
        tasks: functions of single tasks.

    """

    def __init__(self, names: Sequence[str], tasks: Tasks) -> None:
        command = [sys.executable, "-P", "-c", f"from {__name__} import _serve; _serve()"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.send((tuple(names), tasks))
        if not select.select([self], [], [], _START_S)[0] or self.receive() is None:
            self.kill()
            raise ConfigError("RWD004", "a process for reward functions ended as it began", ", ".join(names))

    def fileno(self) -> int:
        """Return the descriptor that answers come from."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def send(self, message: Any) -> None:
        """Send what the process waits for; a dead process shows when it is asked for the answer."""
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def receive(self) -> tuple[float, ...] | None:
        """Return the answer; None if the process died instead.

        Raises:
            HyphaError: an error that the process answered with.

        """
        assert self._process.stdout is not None
        try:
            answer: Any = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):
            return None
        if isinstance(answer, HyphaError):
            self.kill()
            raise answer
        rewards: tuple[float, ...] = answer
        return rewards

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        with self._process:  # Closes its pipes, and waits.
            pass

    def __del__(self) -> None:
        if self._process.poll() is None:
            self.kill()


def reward(name: str, function: Reward, response: Response) -> float:
    """Call a function; return NaN if it gives no finite number.

    Raises:
        ConfigError: RWD001, it failed.

    """
    try:
        given = function(response)
        found = math.nan if given is None else float(given)
    except HyphaError:
        raise
    except (Exception, SystemExit) as error:  # A function of users may raise anything.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        fix = f"mend the function; the response was {response.text[:80]!r}"
        raise ConfigError("RWD001", f"reward function {name} failed", reason, "a number or None", fix) from error
    return found if math.isfinite(found) else math.nan


def _serve() -> None:
    """Answer requests from standard input until it ends; whatever functions print goes to standard error."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # A function that hangs doesn't outlive its worker.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        evaluator: InPlace | None = None
        while (message := _received()) is not None:
            answer: tuple[float, ...] | HyphaError = ()
            try:
                if evaluator is None:
                    evaluator = InPlace(*message)
                else:
                    (answer,) = evaluator.rewards([message])
            except HyphaError as error:
                answer = error
            pickle.dump(answer, answers)
            answers.flush()


def _received() -> Any:
    try:
        return pickle.load(sys.stdin.buffer)
    except EOFError:
        return None
