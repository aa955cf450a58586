"""Ways to the rewards of responses: in this process, in others that are killed if they take too long, or by a judge.

A judge is a language model behind an API like that of OpenAI, which answers with a score.
"""

from __future__ import annotations

import logging
import math
import os
import re
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, Protocol

import regex

from hypha_ray.config.rl import JUDGE, Judge
from hypha_ray.errors import AuthenticationError, ConfigError
from hypha_ray.plugins import is_built_in
from hypha_ray.rl.call_process import NO_FILES, START_S
from hypha_ray.rl.http import Pauses, Refused, TooLate, Unreachable, call
from hypha_ray.rl.rewards.calls import (
    Calls,
    Failures,
    RewardProcess,
    Row,
    Signatures,
    Tasks,
    Unit,
    failed_call,
    functions_of,
    require_known,
    take_groups,
    units_of,
)
from hypha_ray.rl.rewards.response import Response
from hypha_ray.texts import HIDDEN
from hypha_ray.types.events import working

_MOST_LOST = 8
"""Number of lost calls after which the rest of a batch isn't tried, if no response has got a reward."""

log = logging.getLogger(__name__)
_WRONG = frozenset({*range(300, 400), 401, 403, 404, 405})
"""Statuses that all requests would get, because key, address or model are wrong."""
_PATTERN_S = 5.0
"""Longest search for a score in a judge's text, in seconds."""
_PLACEHOLDERS = re.compile(r"\{(prompt|response|answer)\}")


class Evaluator(Protocol):
    """Object that computes rewards of responses."""

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
        self.refuses_losses = False
        """Whether a call without an answer is an error, as in a trial; else it costs its responses their rewards."""

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
        waiting_units = deque(units)
        unit_of_process: dict[RewardProcess, tuple[Unit, float]] = {}  # Unit and deadline of each process.
        lost_count = 0
        while waiting_units or unit_of_process:
            while waiting_units and len(unit_of_process) < self._count:
                process = self._process()
                unit = waiting_units.popleft()
                process.ask(unit, responses)
                unit_of_process[process] = unit, time.monotonic() + self._deadline_s
            next_deadline = min(deadline for _, deadline in unit_of_process.values())
            limit_s = next_deadline - time.monotonic()
            readable, *_ = select.select(list(unit_of_process), [], [], max(0.0, limit_s))
            for process, (unit, deadline) in list(unit_of_process.items()):
                answer = process.receive() if process in readable else ""
                if isinstance(answer, list):
                    table.fill(unit, answer)
                    if _lacks_files(answer):
                        process.kill()
                    else:
                        self._idle.append(process)
                elif answer is None or time.monotonic() >= deadline:
                    process.kill()
                    lost_count += 1
                    self._lose(process.called, responses[unit.rows[0]], died=answer is None)
                else:
                    continue
                del unit_of_process[process]
            if lost_count >= _MOST_LOST and lost_count == len(units) - len(waiting_units) - len(unit_of_process):
                waiting_units.clear()
        return table.rows()

    def _process(self) -> RewardProcess:
        """Return an idle process that still lives, or another one."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
        return RewardProcess(self._names, self._tasks, self._start_s)

    def _lose(self, function: str, response: Response, died: bool) -> None:
        """Log the first lost reward of a function.

        Raises:
            ConfigError: RWD001, no loss is to be borne.

        """
        reason = "its process died" if died else f"it took longer than {self._deadline_s:g} s"
        name = function or " and ".join(self._names)
        if self.refuses_losses:
            raise failed_call(name, reason, response, "mend the function, or raise rl.reward.deadline_s")
        if function not in self._warned:
            self._warned.add(function)
            text = "reward function %s gave no reward, which is told once: %s; the prompt was %r"
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


class JudgeCalls:
    """Calls of a judge, several at a time; a response without a score has no reward.

    Args:
        settings: table of the job file.
        tasks: functions of single tasks.

    Raises:
        ConfigError: RWD005, address or model isn't given.
        AuthenticationError: RWD006, the key isn't in the environment.

    """

    def __init__(self, settings: Judge, tasks: Tasks | None = None) -> None:
        self._settings = settings
        self._pattern = _compile(settings.pattern)
        self._tasks = tasks or {}
        if settings.url is None or settings.model is None:
            missing = "url" if settings.url is None else "model"
            raise ConfigError("RWD005", "the judge lacks an address or a model", fix=f"set rl.reward.judge.{missing}")
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        name = settings.key_variable
        self._key: str | None = None
        if name is not None:
            self._key = os.environ.get(name)
        if name is not None and not self._key:
            fix = f"set {name} where the job is submitted and on all nodes, or name another variable"
            raise AuthenticationError("RWD006", "the judge's key isn't in the environment", name, fix=fix)
        self.trouble = ""
        """Reason of the latest response without a score; empty before the first one."""

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return rewards as `Evaluator` says.

        Raises:
            ConfigError: RWD005, the judge refuses all requests.

        """
        judged_rows: list[int] = []
        for index, response in enumerate(responses):
            if JUDGE in functions_of(response, self._tasks, (JUDGE,)):
                judged_rows.append(index)
        rewards = [math.nan] * len(responses)
        absent = 0
        with ThreadPoolExecutor(min(self._settings.at_once, max(1, len(judged_rows)))) as pool:
            scores = pool.map(self._score, [responses[index] for index in judged_rows])
            for index, score in zip(judged_rows, scores, strict=True):
                rewards[index] = score
                absent += math.isnan(score)
        if absent:
            log.warning("the judge gave no score for %d of %d responses: %s", absent, len(judged_rows), self.trouble)
        return [(reward,) for reward in rewards]

    def _score(self, response: Response) -> float:
        settings = self._settings
        answer = response.data.get("answer", "")
        texts = {"prompt": response.prompt, "response": response.text, "answer": str(answer)}
        question = _PLACEHOLDERS.sub(lambda match: texts[match[1]], settings.template)
        messages = [{"role": "user", "content": question}]
        payload: dict[str, object] = {"model": settings.model, "messages": messages, "temperature": 0.0}
        if settings.max_tokens is not None:
            payload["max_tokens"] = settings.max_tokens
        verdict = self._ask(payload)
        if verdict is None:
            return math.nan
        score = self._score_in(verdict)
        if score is None:
            self.trouble = f"no score in {verdict[-100:]!r}"
            return math.nan
        full = settings.full_score
        if score > full:
            self.trouble = f"a score of {score:g}, where rl.reward.judge.full_score is {full:g}"
            return math.nan
        return score / full

    def _score_in(self, text: str) -> float | None:
        """Return the last score in a text; None without one, or if the search for the pattern takes too long."""
        try:
            # The interpreter is free meanwhile, so that signs of life go out.
            matches = self._pattern.findall(text, timeout=_PATTERN_S, concurrent=True)
        except TimeoutError:
            log.warning("rl.reward.judge.pattern takes longer than %g s for %r", _PATTERN_S, text[-100:])
            return None
        for match in reversed(matches):
            if _is_number(match):
                return float(match)
        return None

    def _ask(self, payload: Mapping[str, object]) -> str | None:
        """Return the judge's text; None after the last attempt failed."""
        headers: dict[str, str] = {}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        pauses = Pauses(self._settings.retries)
        pause_s: float | None = 0.0
        while pause_s is not None:
            time.sleep(pause_s)
            try:
                answer = call(self._url, payload, self._settings.deadline_s, headers)
                return self._text_of(answer)
            except (Unreachable, TooLate) as error:
                self.trouble = self._without_key(str(error))
                pause_s = pauses.after(error.retry_after_s if isinstance(error, Unreachable) else None)
            except Refused as error:
                trouble = self._without_key(str(error))
                self.trouble = trouble
                if error.status in _WRONG:
                    fix = "mend rl.reward.judge.url, model or key; it has to be the address itself, with no redirect"
                    raise ConfigError("RWD005", "the judge refuses requests", trouble, fix=fix) from None
                return None
        return None

    def _text_of(self, answer: Any) -> str | None:
        """Return the text of an answer; None if it has none."""
        try:
            text = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            self.trouble = "an answer without choices"
            return None
        if not isinstance(text, str):
            self.trouble = "an answer without a text"
            return None
        return text

    def _without_key(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, HIDDEN)


def _compile(pattern: str) -> Any:
    """Compile the user's pattern for the package regex, whose search can be limited in time.

    Raises:
        ConfigError: RWD005, the package can't read it.

    """
    try:
        return regex.compile(pattern)
    except regex.error as error:
        fix = "mend rl.reward.judge.pattern"
        raise ConfigError("RWD005", "the judge's pattern can't be read", str(error), fix=fix) from None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
