"""Reward functions in processes of their own: one that hangs or dies costs its response the reward, nothing else."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hypha_ray.config.rl import RL
from hypha_ray.errors import ConfigError
from hypha_ray.rl.rewards.calls import limit_of
from hypha_ray.rl.rewards.evaluators import Evaluator, InPlace, Processes, Together, check_functions
from hypha_ray.rl.rewards.response import Response
from hypha_ray.rl.scoring import evaluators_of
from hypha_ray.types.events import WorkState, current_work
from tests.support.plugins import modules_beside

MODULE = """
import os, signal, sys

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
        case "text":
            return "1"
        case "huge":
            return 1e39
    return float(response.text)

def work(response):
    from hypha_ray.types.events import current_work
    seen.append(current_work())
    return 1.0

seen = []

def pid(response):
    return os.getpid()

def stay(response):
    with open(response.text, "w") as file:
        file.write(str(os.getpid()))
    signal.pause()
"""
DEADLINE_S = 4.0
WORKER = """
import sys
from hypha_ray.rl.rewards.evaluators import Processes
from hypha_ray.rl.rewards.response import Response
sys.path.insert(0, ".")
Processes(["tricky_rewards:stay"], 1, 600.0).rewards([Response("?", sys.argv[1], (), True, {"answer": "1"}, 8)])
"""
"""A worker whose reward function is busy for long."""
beside = modules_beside(tricky_rewards=MODULE)


def responses(*texts: str) -> list[Response]:
    return [Response("?", text, (), True, {"answer": "1"}, 8) for text in texts]


@pytest.mark.slow
def test_rewards_are_those_of_calls_in_place() -> None:
    given = responses("1", "2.5", "none", "-3")
    names = ["tricky_rewards:tricky", "exact"]
    found = Processes(names, 2, DEADLINE_S).rewards(given)

    assert [one[1] for one in found] == [1, 0, 0, 0]
    assert [one[0] for one in found if not math.isnan(one[0])] == [1, 2.5, -3]
    assert math.isnan(found[2][0])
    assert repr(found) == repr(InPlace(names).rewards(given))


@pytest.mark.slow
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


def ways(name: str) -> list[Evaluator]:
    return [InPlace([name]), Processes([name], 2, DEADLINE_S)]


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["raise", "text"])
def test_an_odd_response_costs_its_reward_and_is_told_once(odd: str, caplog: pytest.LogCaptureFixture) -> None:
    for evaluator in ways("tricky_rewards:tricky"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = [evaluator.rewards(responses("1", odd, "2", odd)) for _ in range(2)]

        assert repr(found) == repr([[(1.0,), (math.nan,), (2.0,), (math.nan,)]] * 2)
        assert len(caplog.records) == 1
        assert "tricky_rewards:tricky" in caplog.text and odd in caplog.text


@pytest.mark.parametrize("odd", ["raise", "text"])
def test_a_function_that_fails_for_all_responses_is_an_error(odd: str) -> None:
    for evaluator in ways("tricky_rewards:tricky"):
        with pytest.raises(ConfigError, match="RWD001"):
            evaluator.rewards(responses(odd, odd))


@pytest.mark.slow
def test_the_only_prompt_of_a_task_may_be_odd() -> None:
    tasks = {"seven": ["tricky_rewards:tricky"], "eight": ["exact"]}
    given = [
        Response("7=", "raise", (), True, {"answer": "1", "task": "seven"}, 8),
        Response("8=", "1", (), True, {"answer": "1", "task": "eight"}, 8),
    ]
    names = ["tricky_rewards:tricky", "exact"]
    for evaluator in (InPlace(names, tasks), Processes(names, 1, DEADLINE_S, tasks)):
        assert repr(evaluator.rewards(given)) == repr([(math.nan, math.nan), (math.nan, 1.0)])


@pytest.mark.slow
def test_a_number_that_is_infinite_in_the_models_precision_is_absent() -> None:
    for evaluator in ways("tricky_rewards:tricky"):
        assert repr(evaluator.rewards(responses("huge", "1"))) == repr([(math.nan,), (1.0,)])


@pytest.mark.slow
def test_a_lost_reward_is_told_with_function_and_prompt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Processes(["exact", "tricky_rewards:tricky"], 1, 1.0).rewards(responses("1", "hang", "hang"))

    assert [record.getMessage() for record in caplog.records] == [
        "reward function tricky_rewards:tricky gave no reward, which is told once: it took longer than 1 s; "
        "the prompt was '?'"
    ]


@pytest.mark.slow
def test_a_process_that_died_between_two_batches_costs_no_reward() -> None:
    evaluator = Processes(["tricky_rewards:pid"], 1, DEADLINE_S)
    ((first,),) = evaluator.rewards(responses("a"))
    os.kill(int(first), signal.SIGKILL)
    os.waitid(os.P_PID, int(first), os.WEXITED | os.WNOWAIT)
    ((second,),) = evaluator.rewards(responses("a"))

    assert second > 0 and second != first


@pytest.mark.slow
def test_a_module_that_never_ends_its_import_is_told(tmp_path: Path) -> None:
    (tmp_path / "blocks_rewards.py").write_text("while True:\n    pass\n", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"RWD004.*too long to load.*blocks_rewards:reward"):
        Processes(["blocks_rewards:reward"], 1, DEADLINE_S, start_s=2.0).rewards(responses("1"))


@pytest.mark.parametrize(
    ("functions", "more", "apart"),
    [
        (["exact", "number", "length"], {}, []),
        (["tricky_rewards:pid"], {}, ["tricky_rewards:pid"]),
        (["exact", "tricky_rewards:pid"], {"deadline_s": 30.0}, ["tricky_rewards:pid"]),
        (["exact", "tricky_rewards:pid"], {"deadline_s": "none"}, []),
    ],
)
def test_functions_of_users_run_in_another_process_unless_the_job_says_otherwise(
    functions: list[str], more: dict[str, object], apart: list[str]
) -> None:
    table = RL.model_validate({"reward": {"functions": functions, **more}}).reward
    (row,) = Together(evaluators_of(table, {})).rewards(responses("1"))

    found = dict(zip(functions, row, strict=True))
    elsewhere = [name for name in functions if name.endswith("pid") and found[name] != os.getpid()]
    assert elsewhere == apart


def test_defaults_of_limits_are_told_by_the_registry_alone() -> None:
    assert limit_of("math", None) == 10
    assert limit_of("tricky_rewards:pid", None) == 60
    assert [limit_of(name, None) for name in ("exact", "number", "format", "length", "contains", "code")] == [None] * 6
    assert [limit_of(name, 5.0) for name in ("exact", "math", "code", "a:b")] == [None, 5, 5, 5]
    assert [limit_of(name, "none") for name in ("exact", "math", "code", "a:b")] == [None] * 4


@pytest.mark.slow
def test_functions_are_loaded_before_the_start_as_workers_will_load_them() -> None:
    check_functions(["exact", "tricky_rewards:pid"])
    with pytest.raises(ConfigError, match=r"RWD004.*nothing of that name"):
        check_functions(["tricky_rewards:absent"])
    with pytest.raises(ConfigError, match=r"RWD003.*did you mean 'exact'"):
        check_functions(["exakt"])


def test_the_reward_function_of_the_documentation_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (Path(__file__).parents[3] / "docs" / "rl.md").read_text(encoding="utf-8")
    (block,) = (block for block in document.split("```") if block.startswith("\n# lengths.py"))
    (tmp_path / "lengths.py").write_text(block, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "lengths", raising=False)

    texts = [("8", (3, 1), True), (" 8", (9, 3, 1), True), ("7", (2, 1), True), ("88", (3, 3), False)]
    given = [Response("4+4=", text, ids, ended, {"answer": "8"}, 4) for text, ids, ended in texts]
    found = InPlace(["lengths:brief"]).rewards(given)
    assert repr(found) == repr([(1.1,), (1.0,), (0.1,), (math.nan,)])


def test_the_documentation_names_every_attribute_of_a_response() -> None:
    document = (Path(__file__).parents[3] / "docs" / "rl.md").read_text(encoding="utf-8")
    table = document.split("| attribute of a `Response` |")[1].split("\n\n")[0]
    names = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)

    assert set(names) == {field.name for field in dataclasses.fields(Response)} | {"answer"}


@pytest.mark.slow
def test_a_function_that_is_busy_ends_with_its_worker(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    os.mkfifo(told)
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(told)], cwd=tmp_path)
    busy = os.pidfd_open(int(told.read_text(encoding="utf-8")))
    worker.kill()
    worker.wait()
    ended, _, _ = select.select([busy], [], [], 60.0)
    assert ended == [busy]
    os.close(busy)


def test_signs_of_life_tell_the_function_and_the_prompt_that_run_in_the_worker() -> None:
    before = current_work()
    InPlace(["exact", "tricky_rewards:work"]).rewards([Response("07=", "8", (), True, {"answer": "1"}, 8)])

    (state,) = sys.modules["tricky_rewards"].seen
    assert state == WorkState("reward function tricky_rewards:work on the prompt '07='", limited=False)
    assert current_work() == before
