"""The error boundary of job scripts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ray.exceptions import RayTaskError

from hypha_ray.config.entry_point import run
from hypha_ray.errors import (
    AuthenticationError,
    CapacityError,
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    HubError,
    HyphaError,
)


def raising(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        (HyphaError, 1),
        (ConfigError, 2),
        (DataError, 3),
        (AuthenticationError, 4),
        (CheckpointError, 5),
        (CapacityError, 75),
        (ClusterError, 75),
        (HubError, 75),
    ],
)
def test_run_user_error_prints_one_line_and_exits_with_its_code(
    kind: type[HyphaError], exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(raising(kind("X001", "a file is broken", "3 bytes", "8 bytes", "get it again")))
    assert caught.value.code == exit_code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "error[X001]: a file is broken — got 3 bytes, allowed 8 bytes. Fix: get it again\n"


def test_run_error_out_of_a_ray_task_prints_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    cause = DataError("X001", "slice 3 is damaged")
    wrapped = RayTaskError("worker.run", "Traceback (most recent call last): …", cause).as_instanceof_cause()
    assert isinstance(wrapped, DataError)
    assert isinstance(wrapped, RayTaskError)
    with pytest.raises(SystemExit) as caught:
        run(raising(wrapped))
    assert caught.value.code == 3
    assert capsys.readouterr().err == "error[X001]: slice 3 is damaged.\n"


def test_run_error_without_a_remedy_prints_that_of_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(raising(ConfigError("CHAOS001", "--kills is out of range", "0", "1 and up")))
    problem = "error[CHAOS001]: --kills is out of range — got 0, allowed 1 and up. "
    assert capsys.readouterr().err == f"{problem}Fix: give an allowed value; python jobs/chaos.py --help lists them\n"


def test_run_interrupt_exits_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(raising(KeyboardInterrupt()))
    assert caught.value.code == 130
    assert capsys.readouterr().err == ""


def test_run_bug_propagates() -> None:
    with pytest.raises(ZeroDivisionError):
        run(raising(ZeroDivisionError()))


def test_run_success_returns() -> None:
    called = []
    run(lambda: called.append(True))
    assert called == [True]
