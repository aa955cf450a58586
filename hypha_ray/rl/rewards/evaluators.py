"""Ways to the rewards of responses: in the worker's own process, or in others that are killed if they take too long."""

from __future__ import annotations

import logging
import math
import select
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from hypha_ray.errors import ConfigError
from hypha_ray.plugins import is_built_in
from hypha_ray.rl.call_process import NO_FILES, START_S
from hypha_ray.rl.rewards.calls import (
    Calls,
    Failures,
    Row,
    Signatures,
    Tasks,
    Unit,
    require_known,
    take_groups,
    units_of,
)
from hypha_ray.rl.rewards.response import Response
from hypha_ray.rl.rewards.reward_process import RewardProcess
from hypha_ray.types.current_work import working

_MOST_LOST = 8
"""Number of lost calls after which the rest of a batch isn't tried, if no response has got a reward."""

log = logging.getLogger(__name__)


class Evaluator(Protocol):
    """Way to the rewards of responses."""

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return the reward of each response by each function; NaN: absent, or not a function of its task.

        Raises:
            ConfigError: RWD001, a function failed for all responses; RWD003, RWD004, it can't be had.

        """
        ...


class InPlace:
    """Calls in this process, one after the other.

    Args:
        names: functions of the job.
        tasks: functions of single tasks.

    """

    def __init__(self, names: Sequence[str], tasks: Tasks | None = None) -> None:
        self._names = tuple(names)
        self._calls = Calls(names, tasks or {})
        self._failures = Failures()

    @property
    def takes_groups(self) -> bool:
        """Whether a function takes all responses to a prompt at once."""
        return take_groups(self._calls.signatures)

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return rewards as `Evaluator` says."""
        table = _Table(len(responses), len(self._names))
        for unit in units_of(self._calls.signatures, responses):
            table.fill(unit, self._rows(unit, responses))
        return self._failures.settle(self._names, table.rows(), responses)

    def _rows(self, unit: Unit, responses: Sequence[Response]) -> list[Row]:
        of_unit = [responses[row] for row in unit.rows]
        with working() as now_at:
            return self._calls.rows(unit.columns, of_unit, lambda name: now_at(_work_text(name, of_unit[0])))


class _Table:
    """Results of all functions for all responses; NaN until they are filled in."""

    def __init__(self, responses: int, functions: int) -> None:
        self._cells: list[list[float | ConfigError | None]] = [[math.nan] * functions for _ in range(responses)]

    def fill(self, unit: Unit, rows: Sequence[Row]) -> None:
        """Fill in the rows of a unit."""
        for number, row in zip(unit.rows, rows, strict=True):
            for column, cell in zip(unit.columns, row, strict=True):
                self._cells[number][column] = cell

    def rows(self) -> list[Row]:
        """Return the rows of all responses."""
        return [tuple(cells) for cells in self._cells]


class Processes:
    """Calls in other processes. A process that takes too long or dies is replaced, and its response has no reward.

    Args:
        names: functions of the job.
        count: number of processes.
        deadline_s: limit for all functions of one response, or of the responses to a prompt if functions take these.
        tasks: functions of single tasks.
        start_s: limit for loading the functions.

    """

    def __init__(
        self,
        names: Sequence[str],
        count: int,
        deadline_s: float,
        tasks: Tasks | None = None,
        start_s: float = START_S,
    ) -> None:
        require_known(names)
        self._names = tuple(names)
        self._count = count
        self._deadline_s = deadline_s
        self._tasks = dict(tasks or {})
        self._start_s = start_s
        self._failures = Failures()
        self._idle: list[RewardProcess] = []
        self._signatures: Signatures | None = None
        """Signatures of the functions; None until a process has loaded them."""
        self._warned: set[str] = set()
        """Functions whose first lost reward has been logged."""

    @property
    def takes_groups(self) -> bool:
        """Whether a function takes all responses to a prompt at once; not known before the first call."""
        return take_groups(self._signatures or {})

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return rewards as `Evaluator` says."""
        with working(f"reward functions {', '.join(self._names)}", limited=True):
            return self._failures.settle(self._names, self._rows(responses), responses)

    def _rows(self, responses: Sequence[Response]) -> list[Row]:
        table = _Table(len(responses), len(self._names))
        if self._signatures is None:
            process = self._process()
            self._signatures = process.signatures
            self._idle.append(process)
        units = units_of(self._signatures, responses)
        waiting = deque(units)
        busy: dict[RewardProcess, tuple[Unit, float]] = {}  # Unit and deadline of each process.
        lost = 0
        while waiting or busy:
            while waiting and len(busy) < self._count:
                process = self._process()
                unit = waiting.popleft()
                process.ask(unit, responses)
                busy[process] = unit, time.monotonic() + self._deadline_s
            next_deadline = min(deadline for _, deadline in busy.values())
            limit_s = next_deadline - time.monotonic()
            ready, *_ = select.select(list(busy), [], [], max(0.0, limit_s))
            for process, (unit, deadline) in list(busy.items()):
                answer = process.receive() if process in ready else ""
                if isinstance(answer, list):
                    table.fill(unit, answer)
                    if _lacks_files(answer):
                        process.kill()
                    else:
                        self._idle.append(process)
                elif answer is None or time.monotonic() >= deadline:
                    process.kill()
                    lost += 1
                    self._warn_once(process.called, responses[unit.rows[0]], died=answer is None)
                else:
                    continue
                del busy[process]
            if lost >= _MOST_LOST and lost == len(units) - len(waiting) - len(busy):
                waiting.clear()
        return table.rows()

    def _process(self) -> RewardProcess:
        """Return an idle process that still lives, or another one."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
        return RewardProcess(self._names, self._tasks, self._start_s)

    def _warn_once(self, function: str, response: Response, died: bool) -> None:
        """Log the first lost reward of a function."""
        if function in self._warned:
            return
        self._warned.add(function)
        reason = "its process died" if died else f"it took longer than {self._deadline_s:g} s"
        text = "reward function %s gave no reward, which is told once: %s; the prompt was %r"
        name = function or " and ".join(self._names)
        log.warning(text, name, reason, response.prompt[-80:])


def _lacks_files(rows: Sequence[Row]) -> bool:
    """Whether a function has failed because its process has no file handles left."""
    errors = [str(cell) for cell in chain.from_iterable(rows) if isinstance(cell, ConfigError)]
    return NO_FILES in " ".join(errors)


def check_functions(names: Sequence[str]) -> list[str]:
    """Load users' functions in another process, within a time limit, registered ones aside.

    Returns:
        Notes for the user on how they are called.

    Raises:
        ConfigError: RWD003, RWD004, one can't be had.

    """
    require_known(names)
    user_functions = [name for name in names if not is_built_in("rewards", name)]
    if not user_functions:
        return []
    process = RewardProcess(user_functions, {})
    process.kill()
    signatures = process.signatures
    return [f"reward function {name} is {signature.text}" for name, signature in signatures.items()]


def _work_text(function: str, response: Response) -> str:
    end_of_prompt = response.prompt[-80:]
    return f"reward function {function} on the prompt {end_of_prompt!r}"


class Together:
    """Several evaluators, each of some of the functions.

    Args:
        parts: evaluators, with the indices of their functions among all functions.

    """

    def __init__(self, parts: Sequence[tuple[Sequence[int], Evaluator]]) -> None:
        self._parts = parts

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return rewards as `Evaluator` says."""
        columns: dict[int, list[float]] = {}
        for indices, evaluator in self._parts:
            rows = evaluator.rewards(responses)
            for column, index in enumerate(indices):
                columns[index] = [row[column] for row in rows]
        in_order = [columns[index] for index in sorted(columns)]
        return list(zip(*in_order, strict=True))
