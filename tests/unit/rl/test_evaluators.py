"""Reward functions in processes of their own: one that hangs or dies costs its response the reward, nothing else."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypha_ray.errors import ConfigError
from hypha_ray.rl.rewards.evaluators import InPlace, Processes
from hypha_ray.rl.rewards.response import Response

MODULE = """
import os, sys

def tricky(response):
    print("a function may print")
    match response.text:
        case "hang":
            while True:
                pass
        case "die":
            os._exit(3)
        case "raise":
            raise RuntimeError("the verifier is gone")
        case "none":
            return None
    return float(response.text)

def pid(response):
    return os.getpid()
"""
DEADLINE_S = 4.0


@pytest.fixture(autouse=True)
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions of a user, beside the job."""
    (tmp_path / "tricky_rewards.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tricky_rewards", raising=False)
    yield


def responses(*texts: str) -> list[Response]:
    return [Response("?", text, (), True, {"answer": "1"}, 8) for text in texts]


def test_rewards_are_those_of_calls_in_place() -> None:
    given = responses("1", "2.5", "none", "-3")
    names = ["tricky_rewards:tricky", "exact"]
    found = Processes(names, 2, DEADLINE_S).rewards(given)

    assert [one[1] for one in found] == [1, 0, 0, 0]
    assert [one[0] for one in found if not math.isnan(one[0])] == [1, 2.5, -3]
    assert math.isnan(found[2][0])
    assert repr(found) == repr(InPlace(names).rewards(given))


def test_a_function_that_hangs_or_dies_costs_its_own_response_alone() -> None:
    found = Processes(["tricky_rewards:tricky"], 2, DEADLINE_S).rewards(responses("1", "hang", "2", "die", "3", "4"))

    assert [math.isnan(one[0]) for one in found] == [False, True, False, True, False, False]
    assert [one[0] for one in found if not math.isnan(one[0])] == [1, 2, 3, 4]


def test_processes_are_kept_for_the_next_batch() -> None:
    evaluator = Processes(["tricky_rewards:pid"], 1, DEADLINE_S)

    pids = {one[0] for _ in range(3) for one in evaluator.rewards(responses("a", "b"))}

    assert len(pids) == 1


def test_functions_are_those_beside_the_job_and_not_of_the_folder_that_a_node_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tmp_path / "node"
    node.mkdir()
    (node / "tricky_rewards.py").write_text("def tricky(response):\n    return -1\n", encoding="utf-8")
    monkeypatch.chdir(node)

    for evaluator in (Processes(["tricky_rewards:tricky"], 1, DEADLINE_S), InPlace(["tricky_rewards:tricky"])):
        assert evaluator.rewards(responses("1", "2")) == [(1,), (2,)]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("tricky_rewards:tricky", "raise", r"RWD001.*RuntimeError: the verifier is gone"),
        ("tricky_rewards:absent", "1", r"RWD004.*nothing of that name"),
        ("exakt", "1", r"RWD003.*did you mean 'exact'"),
    ],
)
def test_errors_of_functions_are_those_of_calls_in_place(name: str, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Processes([name], 2, DEADLINE_S).rewards(responses(text))
