"""Reward functions as people have them: trl's signature, coroutines, and several figures from one function."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypha_ray.config.schema import Rounds
from hypha_ray.errors import ConfigError
from hypha_ray.plugins import find
from hypha_ray.rl.island import Island
from hypha_ray.rl.rewards.evaluators import Evaluator, InPlace, Processes, check_functions
from hypha_ray.rl.rewards.response import Response, TrainerState
from hypha_ray.rl.rewards.signatures import PartedReward, reward_from
from hypha_ray.rl.scoring import rollout_records
from tests.support.rl import job, prompts, tokenizer
from tests.unit.rl.test_scoring import score

MODULE = '''
import asyncio, os, time
import numpy as np

def trl_lengths(completions, **columns):
    return [float(len(text)) for text in completions]

def rank_in_group(prompts, completions, completion_ids, answer, task=None, **kwargs):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    return [float(sorted(completions).index(text)) for text in completions]

def without_rest(completions, answer):
    return [float(text == right) for text, right in zip(completions, answer)]

def chat(completions, **columns):
    return [float(len(completion[0]["content"])) for completion in completions]

def needs(completions, solution, **columns):
    return [1.0 for _ in completions]

def too_few(completions, **columns):
    return [1.0]

def one_number(completions, **columns):
    return 1.0

def hangs_for_two(completions, answer, **columns):
    while answer[0] == "2":
        time.sleep(0.1)
    return [1.0 for _ in completions]

barrier = None

async def meets(response):
    """Ends only if all responses of the group are under way at the same time, in a loop that outlives a call."""
    global barrier
    if barrier is None:
        barrier = asyncio.Barrier(2)
    await barrier.wait()
    return float(response.text)

async def trl_async(completions, **columns):
    await asyncio.sleep(0)
    return [None if text == "none" else float(text) for text in completions]

def several(response):
    return {"right": float(response.text == response.answer), "size": len(response.text)}

def chosen(completions, **columns):
    return [{"reward": float(text), "other": 7} for text in completions]

def absent_part(response):
    return {"a": 1.0, "b": None}

def text_part(response):
    return {"a": "1.0"}

def any_name(**given):
    return [float(len(text)) for text in given["completions"]]

def logs_reward(completions, log_metric, **columns):
    log_metric("reward", 5)
    return [1.0 for _ in completions]

def logs_too_many(completions, log_metric, **columns):
    for number in range(33):
        log_metric(f"figure {number}", 1)
    return [1.0 for _ in completions]

def shows(completions, log_extra, **columns):
    log_extra("parsed", completions)
    log_extra("parsed", [np.int64(len(text)) for text in completions])
    log_extra("odd", (value for value in [float("nan"), {"a": 1}]))
    return [1.0, {"size": 2.0}]

def shows_too_few(completions, log_extra, **columns):
    log_extra("parsed", [1])
    return [1.0 for _ in completions]

def unordered(completions, **columns):
    return {float(len(text)) for text in completions}

def packed(completions, **columns):
    return bytes(len(text) for text in completions)

left_open = []

def leaky(response):
    import resource
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
    left_open.append(open(__file__))
    return 1.0

def quick(response):
    return one_number_later(response)

async def one_number_later(response):
    await asyncio.sleep(0)
    return float(response.text)

def logs(completions, log_metric, log_extra=None, **columns):
    log_metric("length", len(completions[0]))
    log_metric("length", len(completions[1]))
    return [{"size": len(text)} if text == "xyz" else 1.0 for text in completions]

def by_step(completions, trainer_state, **columns):
    state = trainer_state
    return [state.global_step + 100.0 * state.max_steps + 10_000.0 * state.epoch for _ in completions]

def by_loss(completions, trainer_state, **columns):
    return [trainer_state.log_history[-1]["loss"] for _ in completions]

class Unmade:
    def __init__(self):
        raise RuntimeError("no weights")

    def __call__(self, response):
        return 1.0

def takes_out(response):
    return float(response.text == response.data.pop("answer"))

class Callable:
    def __call__(self, completions, **columns):
        return [2.0 for _ in completions]
'''


@pytest.fixture(autouse=True)
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions of a user, beside the job."""
    for name in ("people", "own_rewards"):
        (tmp_path / f"{name}.py").write_text(MODULE, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield


def group(answer: str, *texts: str, is_chat: bool = False) -> list[Response]:
    """Responses to one prompt, which share its record."""
    record: Mapping[str, Any] = {"answer": answer, "task": "t"}
    return [Response("?", text, (1, 2), True, record, 8, is_chat) for text in texts]


def evaluators(*names: str, deadline_s: float = 20.0) -> Iterator[Evaluator]:
    yield InPlace(names)
    yield Processes(names, 2, deadline_s)


def test_a_function_with_the_signature_of_trl_is_called_with_the_responses_to_one_prompt() -> None:
    given = [*group("c", "b", "a", "c"), *group("7", "9", "7")]
    for evaluator in evaluators("people:trl_lengths", "exact", "people:rank_in_group", "people:without_rest"):
        found = evaluator.rewards(given)

        assert [row[2] for row in found] == [1, 0, 2, 1, 0]
        assert [row[3] for row in found] == [0, 0, 1, 0, 1]
        assert [row[1] for row in found] == [row[3] for row in found]
        assert [row[0] for row in found] == [1] * 5


def test_completions_of_a_chat_are_messages() -> None:
    assert InPlace(["people:chat"]).rewards(group("1", "abc", "d", is_chat=True)) == [(3,), (1,)]


def test_a_function_may_change_the_record_of_its_prompt() -> None:
    """Neither the next function nor the next response sees that."""
    for evaluator in evaluators("people:takes_out", "people:without_rest", "exact"):
        assert evaluator.rewards(group("c", "c", "a")) == [(1, 1, 1), (0, 0, 0)]


def test_coroutines_of_a_group_run_together_and_in_one_loop() -> None:
    given = [*group("1", "1", "2"), *group("1", "3", "4")]
    for evaluator in evaluators("people:meets"):
        assert evaluator.rewards(given) == [(1,), (2,), (3,), (4,)]


def test_a_coroutine_function_may_have_the_signature_of_trl() -> None:
    for evaluator in evaluators("people:trl_async"):
        (first,), (second,) = evaluator.rewards(group("1", "3", "none"))
        assert first == 3 and math.isnan(second)


def test_an_object_may_have_the_signature_of_trl() -> None:
    assert InPlace(["people:Callable"]).rewards(group("1", "3")) == [(2,)]


@pytest.mark.slow
def test_a_function_that_hangs_costs_the_responses_to_its_own_prompt_alone() -> None:
    given = [*group("1", "a", "b"), *group("2", "c", "d"), *group("3", "e")]
    found = Processes(["people:hangs_for_two"], 1, 2.0).rewards(given)

    assert [math.isnan(row[0]) for row in found] == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("needs", "needs a column that the prompts' records lack — got 'solution'"),
        ("too_few", "it gave 1 reward for 2 responses"),
        ("one_number", "it gave float and no list"),
        ("text_part", "it gave the text '1.0'"),
        ("unordered", "it gave set and no list"),
        ("packed", "it gave bytes and no list"),
        ("logs_too_many", "log_metric got more than 32 names"),
        ("shows_too_few", "log_extra got 1 value of parsed for 2 responses"),
    ],
)
def test_a_function_that_cannot_be_called_or_gives_nonsense_is_named(function: str, told: str) -> None:
    for evaluator in evaluators(f"people:{function}"):
        with pytest.raises(ConfigError, match="RWD001") as caught:
            evaluator.rewards(group("1", "3", "4"))

        assert told in str(caught.value)


def test_a_column_that_is_missing_has_its_remedy() -> None:
    with pytest.raises(ConfigError, match="prepare the dataset with --keep-columns solution"):
        InPlace(["people:needs"]).rewards(group("1", "3"))


def test_a_function_of_any_name_alone_is_called_as_trl_does() -> None:
    assert find("rewards", "people:any_name")
    for evaluator in evaluators("people:any_name"):
        assert evaluator.rewards(group("1", "ab", "c")) == [(2,), (1,)]


def test_numbers_that_a_function_logs_are_its_figures() -> None:
    rows = InPlace(["people:logs"]).rewards(group("1", "ab", "xyz"))
    first, second = (row[0] for row in rows)
    assert (first, second) == (1, 3)
    assert isinstance(first, PartedReward) and dict(first.parts) == {"length": 2.5}
    assert isinstance(second, PartedReward) and dict(second.parts) == {"length": 2.5, "size": 3}


def test_a_number_that_is_logged_as_reward_changes_no_reward() -> None:
    (reward,) = InPlace(["people:logs_reward"]).rewards(group("1", "ab"))[0]
    assert reward == 1 and isinstance(reward, PartedReward) and dict(reward.parts) == {"reward": 5}


def test_values_that_a_function_logs_are_in_the_records_of_responses() -> None:
    for evaluator in evaluators("people:shows"):
        rows = evaluator.rewards(group("1", "ab", "xyz"))
        first, second = (row[0] for row in rows)
        assert (first, second) == (1, 2)
        assert isinstance(first, PartedReward) and dict(first.extra) == {"parsed": 2, "odd": None}
        assert isinstance(second, PartedReward) and dict(second.extra) == {"parsed": 3, "odd": "{'a': 1}"}

    scored = score("own_rewards:shows", "exact")
    records = rollout_records(["0-0-0", "0-0-1"], scored, 3)
    column = "own_rewards:shows/parsed"
    assert [record["extra"][column] for record in records] == [len(record["response"]) for record in records]
    assert list(scored.parts) == ["own_rewards:shows", "exact", "own_rewards:shows/size"]
    assert "extra" not in rollout_records(["0-0-0", "0-0-1"], score("exact"), 1)[0]


def test_files_that_a_function_leaves_open_cost_a_response_and_not_all_later_ones() -> None:
    rows = Processes(["people:leaky"], 1, 20.0).rewards(group("1", *map(str, range(150))))
    absent = sum(math.isnan(reward) for (reward,) in rows)
    assert 1 <= absent <= 3


def test_a_plain_function_may_give_the_coroutine_of_another() -> None:
    given = group("1", "1")
    for evaluator in evaluators("people:quick"):
        assert evaluator.rewards(given) == [(1,)]


@pytest.mark.parametrize("deadline_s", ["none", 20.0])
def test_the_state_of_trls_trainer_is_that_of_the_round_and_the_prompts_epoch(deadline_s: Any) -> None:
    flags = ("--rounds.update_rounds=30", '--rl.reward.functions=["people:by_step"]')
    island = Island(job(*flags, **{"reward.deadline_s": deadline_s}), tokenizer())
    batch = prompts(["12=", "7="], ["21", "7"], epoch=2)
    for version in (0, 7):
        island.merged(version)
        assert island.step(batch).sums["reward"] == (8 * (23_000 + version), 8)
    total, count = island.evaluate([batch])["reward"]
    assert total / count == 23_007


def test_another_attribute_of_the_state_is_named() -> None:
    state = TrainerState.of(Rounds(epochs=2), 3, 1)
    response = replace(*group("1", "3"), trainer_state=state)
    told = "AttributeError: trainer_state has no 'log_history' here, only global_step, epoch"
    for evaluator in evaluators("people:by_loss"):
        with pytest.raises(ConfigError, match=f"RWD001.*{told}"):
            evaluator.rewards([response])


def test_outside_of_a_run_the_state_of_trls_trainer_is_refused_by_its_remedy() -> None:
    with pytest.raises(ConfigError, match=r"RWD001.*object of trl's trainer.*'trainer_state'.*trainer_state=None"):
        InPlace(["people:by_step"]).rewards(group("1", "3"))
    column = [replace(response, data={**response.data, "trainer_state": "a column"}) for response in group("1", "3")]
    with pytest.raises(ConfigError, match=r"RWD001.*object of trl's trainer"):
        InPlace(["people:by_step"]).rewards(column)


def test_signatures_are_said_before_the_start() -> None:
    names = ["exact", "people:several", "people:trl_lengths", "people:meets", "people:trl_async"]
    notes = check_functions(names)
    assert len(notes) == 4
    assert notes[0] == "reward function people:several is called for each response, with a Response"
    assert notes[1].startswith("reward function people:trl_lengths is called for all responses to a prompt, with compl")
    assert "a coroutine function, called for each response" in notes[2]
    assert "a coroutine function, called for all responses to a prompt" in notes[3]


def test_a_class_that_can_not_be_made_is_refused_with_its_reason() -> None:
    for evaluator in (check_functions, InPlace):
        with pytest.raises(ConfigError, match=r"RWD004.*people:Unmade can't be made.*RuntimeError: no weights"):
            evaluator(["people:Unmade"])


def test_a_function_of_several_arguments_and_no_names_of_trl_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def f(response, other): ...\n", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"RWD004.*can't be called with 1 argument"):
        find("rewards", "wrong:f")


def test_figures_of_a_function_are_recorded_apart_and_summed() -> None:
    scored = score("own_rewards:several")

    assert scored.total.tolist() == [[1, 3], [4, 4]]
    assert scored.parts["own_rewards:several/right"].tolist() == [[0, 1], [1, 0]]
    assert scored.parts["own_rewards:several/size"].tolist() == [[1, 2], [3, 4]]
    sums = scored.sums()
    assert sums["reward"] == sums["reward/own_rewards:several"] == (12, 4)
    assert sums["reward/own_rewards:several/size"] == (10, 4)


def test_a_figure_named_reward_is_the_reward() -> None:
    scored = score("own_rewards:chosen", deadline_s=30.0)

    assert scored.total.tolist() == [[1, 12], [123, 1234]]
    assert scored.parts["own_rewards:chosen/other"].tolist() == [[7, 7], [7, 7]]
    assert "own_rewards:chosen/reward" not in scored.parts


def test_a_sum_with_an_absent_figure_is_absent() -> None:
    reward = reward_from({"a": 1.0, "b": None})

    assert isinstance(reward, PartedReward) and math.isnan(reward)
    assert reward.parts["a"] == 1 and math.isnan(reward.parts["b"])


@pytest.mark.parametrize("figures", [{}, {"": 1.0}, {3: 1.0}, {str(number): 1.0 for number in range(33)}])
def test_figures_without_names_or_without_end_are_refused(figures: dict[Any, float]) -> None:
    with pytest.raises(TypeError, match="it gave"):
        reward_from(figures)


@pytest.mark.parametrize("number", [10**400, -(10**400), Fraction(10**400, 3), {"a": 10**400}])
def test_a_number_beyond_all_floats_is_absent(number: Any) -> None:
    assert math.isnan(reward_from(number))


def test_a_reward_among_figures_counts_as_a_number_everywhere() -> None:
    reward = reward_from({"reward": np.float32(0.5), "steps": 3})

    assert np.array([(reward,)]).tolist() == [[0.5]]


def test_the_coroutine_function_of_the_documentation_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (Path(__file__).parents[3] / "docs" / "rl.md").read_text(encoding="utf-8")
    (block,) = (block for block in document.split("```") if block.startswith("\n# figures.py"))
    (tmp_path / "figures.py").write_text(block, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "figures", raising=False)

    (first,), (second,), (third,) = InPlace(["figures:graded"]).rewards(group("8", "8", "79", ""))

    assert (first, second) == (2, 0.5) and math.isnan(third)
