"""Process of reward functions, which the process that asks it can kill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypha_ray.rl.call_process import START_S, CallProcess, Code, Service, serve
from hypha_ray.rl.rewards import text
from hypha_ray.rl.rewards.calls import Calls, Row, Signatures, Tasks, Unit
from hypha_ray.rl.rewards.response import Response


class RewardProcess(CallProcess):
    """Child process that evaluates one response, or the responses to one prompt, at a time.

    Args:
        names: functions that it loads.
        tasks: functions of single tasks.
        start_s: longest time to load them.

    Raises:
        ConfigError: RWD003, RWD004, a function can't be had, or not in time.

    """

    def __init__(self, names: Sequence[str], tasks: Tasks, start_s: float = START_S) -> None:
        self.called = ""
        """Name of the function that was called last; empty before the first."""
        code = Code("reward functions", ", ".join(names), "RWD004", f"{__name__}:_serve")
        super().__init__(code, (tuple(names), dict(tasks)), start_s)
        self.signatures: Signatures = self.greeting
        """Signatures of the functions."""

    def ask(self, unit: Unit, responses: Sequence[Response]) -> None:
        """Send the responses of a unit among all; if the process is dead, `receive` returns None."""
        self.called = ""
        self.send((unit.columns, [responses[row] for row in unit.rows]))

    def receive(self) -> list[Row] | str | Any:
        """Return the rows of a unit, or the name of a function that is called now; None if the process died instead.

        Raises:
            HyphaError: an error that the process answered with.

        """
        answer = super().receive()
        if isinstance(answer, str):
            self.called = answer
        return answer


def _serve() -> None:
    """Answer requests from standard input."""
    serve(_load)


def _load(message: Any) -> Service:
    names, tasks = message
    calls = Calls(names, tasks)
    if "math" in names:
        text.warm_up()

    def answer(request: Any, begins: Callable[[object], None]) -> object:
        columns, responses = request
        return calls.rows(columns, responses, begins)

    return Service(calls.signatures, answer)
