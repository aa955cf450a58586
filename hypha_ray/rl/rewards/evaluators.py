"""Ways to the rewards of responses: in the worker's own process, or in others that are killed if they take too long."""

from __future__ import annotations

import logging
import math
import select
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from hypha_ray.config.tables.rewards import Deadline
from hypha_ray.plugins import is_built_in
from hypha_ray.rl.rewards.calls import Calls, Failures, Row, Tasks, require_known
from hypha_ray.rl.rewards.response import Response
from hypha_ray.rl.rewards.reward_process import START_S, RewardProcess
from hypha_ray.types.current_work import working

_MOST_LOST = 8
"""Responses of a batch that get no reward for their time limit, and none does, before the others aren't tried."""

log = logging.getLogger(__name__)


class Evaluator(Protocol):
    """Way to the rewards of responses."""

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return what each function gives for each response; NaN: absent, or not a function of the response's task.

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

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return rewards as `Evaluator` says."""
        return self._failures.settle(self._names, [self._row(response) for response in responses], responses)

    def _row(self, response: Response) -> Row:
        with working() as now_at:
            return self._calls.row(response, lambda name: now_at(_named(name, response)))


class Processes:
    """Calls in other processes; one that takes too long, or dies, is replaced, and its response has no reward.

    Args:
        names: functions of the job.
        count: number of processes.
        deadline_s: limit for all functions of one response.
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
        self._told: set[str] = set()
        """Functions whose first loss of a reward has been told."""

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return rewards as `Evaluator` says."""
        with working(f"reward functions {', '.join(self._names)}", limited=True):
            return self._failures.settle(self._names, self._rows(responses), responses)

    def _rows(self, responses: Sequence[Response]) -> list[Row]:
        rows: list[Row] = [(math.nan,) * len(self._names)] * len(responses)
        waiting = deque(range(len(responses)))
        busy = dict[RewardProcess, tuple[int, float]]()
        lost = 0
        while waiting or busy:
            while waiting and len(busy) < self._count:
                process = self._process()
                number = waiting.popleft()
                process.ask(responses[number])
                busy[process] = number, time.monotonic() + self._deadline_s
            limit_s = min(at for _, at in busy.values()) - time.monotonic()
            ready, *_ = select.select(list(busy), [], [], max(0.0, limit_s))
            for process, (number, at) in list(busy.items()):
                answer = process.receive() if process in ready else ""
                if isinstance(answer, tuple):
                    rows[number] = answer
                    self._idle.append(process)
                elif answer is None or time.monotonic() >= at:
                    process.kill()
                    lost += 1
                    self._tell(process.running, responses[number], died=answer is None)
                else:
                    continue
                del busy[process]
            if lost >= _MOST_LOST and lost == len(responses) - len(waiting) - len(busy):
                waiting.clear()
        return rows

    def _process(self) -> RewardProcess:
        """Return an idle process that still lives, or another one."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
        return RewardProcess(self._names, self._tasks, self._start_s)

    def _tell(self, function: str, response: Response, died: bool) -> None:
        """Log the first lost reward of a function."""
        if function in self._told:
            return
        self._told.add(function)
        reason = "its process died" if died else f"it took longer than {self._deadline_s:g} s"
        text = "reward function %s gave no reward, which is told once: %s; the prompt was %r"
        log.warning(text, function or " and ".join(self._names), reason, response.prompt[-80:])


def check_functions(names: Sequence[str], deadline_s: Deadline) -> None:
    """Load users' functions as workers will, registered ones aside.

    Raises:
        ConfigError: RWD003, RWD004, one can't be had.

    """
    require_known(names)
    own = [name for name in names if not is_built_in("rewards", name)]
    if own and deadline_s == "none":
        Calls(own, {})
    elif own:
        RewardProcess(own, {}).kill()


def _named(function: str, response: Response) -> str:
    return f"reward function {function} on the prompt {response.prompt[-80:]!r}"


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
