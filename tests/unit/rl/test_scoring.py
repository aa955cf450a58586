"""Rewards of a batch of responses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config.rl import RL
from hypha_ray.config.schema import Rounds
from hypha_ray.errors import ConfigError
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.rewards.response import TrainerState, pack_records
from hypha_ray.rl.scoring import Scored, Scorer, rollout_records
from tests.support.plugins import modules_beside
from tests.support.rl import CHARACTERS, END, PAD, prompts, tokenizer

MODULE = """
import math
import os

def length(response):
    return len(response.text)

def nothing(response):
    return None

def wild(response):
    return {"1": math.nan, "12": math.inf, "123": None}.get(response.text, 2.0)

def text(response):
    return "1.0"

def broken(response):
    raise RuntimeError("the verifier\\nis gone")

def words(response):
    return "much"

def leaves(response):
    raise SystemExit(3)

def broken_for_eight(response):
    return {"7=": len(response.text)}[response.prompt]

def one_of_all(completions, **columns):
    return [1.0]

def each(completions, **columns):
    return [1.0 for text in completions]

def dies(response):
    os._exit(3)

def not_a_number(response):
    return float("nan")

def seldom(response):
    return 1.0 if response.answer == "123" else None
"""
TEXTS = ["1", "12", "123", "1234"]
"""Responses: two to each of two prompts, all of them ended but the last one."""
beside = modules_beside(own_rewards=MODULE, script_that_ends="raise SystemExit(3)")


def try_functions(*functions: str, **more: Any) -> list[str]:
    """Try functions as a dry run does."""
    table = {"functions": list(functions), **more}
    rl = RL.model_validate({"reward": table, "generation": {"max_response_tokens": 5}})
    batch = prompts(["7=", "89="], ["12", "123"])
    return Scorer(rl, tokenizer()).check(batch.arrays, TrainerState.of(Rounds(epochs=1), 0, 0))


def score(*functions: str, weights: list[float] | None = None, **more: Any) -> Scored:
    """Score the responses by these functions; the first prompt is of task `seven`, the other one of `eight`."""
    table = {"functions": list(functions), "weights": weights or [], **more}
    rl = RL.model_validate({"reward": table, "generation": {"max_response_tokens": 5}})
    batch = prompts(["7=", "89="], ["12", "123"])
    batch.arrays["reward_data"] = pack_records([{"task": "seven", "answer": "12"}, {"task": "eight", "answer": "123"}])
    width = batch.arrays["input_ids"].shape[1]
    rows = [[2 + CHARACTERS.index(one) for one in text] + [END] * (text != "1234") for text in TEXTS]
    ids = torch.tensor([row + [PAD] * (4 - len(row)) for row in rows])
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (4 - len(row)) for row in rows])
    prompt = torch.from_numpy(batch.arrays["input_ids"]).long().repeat_interleave(2, 0)
    whole = torch.cat([prompt, ids], 1)
    assert whole.shape[1] == width + 4
    responses = Responses(whole, whole != PAD, mask, torch.zeros_like(mask), torch.tensor([True, True, True, False]))
    return Scorer(rl, tokenizer()).score(batch.arrays, responses)


def test_texts_have_neither_prompt_nor_padding_nor_end() -> None:
    scored = score("exact", "own_rewards:length")

    assert scored.parts["exact"].tolist() == [[0, 1], [1, 0]]
    assert scored.parts["own_rewards:length"].tolist() == [[1, 2], [3, 4]]
    assert scored.passed.tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("deadline", [{}, {"deadline_s": "none"}])
@pytest.mark.parametrize("others", [(), ("exact",)])
def test_trial_finds_a_function_that_gives_one_reward_for_a_whole_group(
    deadline: dict[str, str], others: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"RWD001.*own_rewards:one_of_all.*it gave 1 reward for 2 responses"):
        try_functions("own_rewards:one_of_all", *others, **deadline)
    try_functions("own_rewards:each", "own_rewards:length", *others, **deadline)


def test_a_trial_refuses_a_function_that_ends_its_process(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"RWD001.*own_rewards:dies failed.*its process died"):
        try_functions("own_rewards:length", "own_rewards:dies")
    assert not caplog.messages


def test_a_trial_notes_functions_without_a_reward() -> None:
    (note,) = try_functions("own_rewards:nothing", "own_rewards:not_a_number")
    assert note.startswith(
        "no right answer that was tried got a reward from own_rewards:nothing, own_rewards:not_a_number"
    )
    assert try_functions("own_rewards:nothing", "own_rewards:seldom") == []


def test_functions_are_weighted_and_recorded_apart() -> None:
    scored = score("exact", "own_rewards:length", weights=[1.0, 0.5])

    assert scored.total.tolist() == [[0.5, 2.0], [2.5, 2.0]]
    assert scored.sums() == {"reward": (7, 4), "reward/exact": (2, 4), "reward/own_rewards:length": (10, 4)}


@pytest.mark.parametrize("deadline_s", [None, 60.0])
def test_responses_are_rewarded_by_the_functions_of_their_task_alone(deadline_s: float | None) -> None:
    functions = ("own_rewards:length", "exact", "own_rewards:broken_for_eight")
    seven = {"name": "seven", "functions": ["own_rewards:broken_for_eight"]}
    tasks = [seven, {"name": "eight", "functions": ["exact", "own_rewards:length"]}]
    scored = score(*functions, weights=[0.5, 1.0, 10.0], tasks=tasks, deadline_s=deadline_s)

    assert scored.total.tolist() == [[10, 20], [1 + 1.5, 2]]
    assert scored.passed.tolist() == [[True, True], [True, False]]
    sums = {"reward/own_rewards:length": (7, 2), "reward/exact": (1, 2), "reward/own_rewards:broken_for_eight": (3, 2)}
    assert scored.sums() == {"reward": (34.5, 4), **sums}
    shown = [record["rewards"] for record in rollout_records(["2-5-30", "2-5-31"], scored, 3)]
    assert shown[0] == {"own_rewards:length": None, "exact": None, "own_rewards:broken_for_eight": 1}
    assert shown[2] == {"own_rewards:length": 3, "exact": 1, "own_rewards:broken_for_eight": None}


def test_what_is_no_finite_number_is_absent() -> None:
    scored = score("own_rewards:wild")

    np.testing.assert_array_equal(scored.total, [[math.nan, math.nan], [math.nan, 2]])
    assert scored.sums() == {"reward": (2, 1), "absent_rewards": (3, 4)}


def test_a_function_that_weighs_nothing_takes_no_reward_away() -> None:
    scored = score("own_rewards:length", "own_rewards:wild", weights=[1.0, 0.0])

    assert scored.sums() == {"reward": (10, 4), "reward/own_rewards:length": (10, 4), "reward/own_rewards:wild": (2, 1)}


def test_a_weighted_sum_that_is_too_large_for_the_model_is_absent() -> None:
    scored = score("own_rewards:length", weights=[1e15])

    assert scored.parts["own_rewards:length"].tolist() == [[1, 2], [3, 4]]
    assert scored.sums()["absent_rewards"] == (3, 4)


@pytest.mark.parametrize(
    ("function", "code", "told"),
    [
        ("own_rewards:broken", "RWD001", "RuntimeError: the verifier is gone"),
        ("own_rewards:words", "RWD001", "much"),
        ("own_rewards:text", "RWD001", "it gave the text '1.0'"),
        ("own_rewards:leaves", "RWD001", "SystemExit: 3"),
        ("script_that_ends:f", "RWD004", "SystemExit: 3"),
        ("own_rewards:nothing", "RWD002", "own_rewards:nothing"),
        ("own_rewards:absent", "RWD004", "own_rewards"),
        ("no_such_module:f", "RWD004", "no_such_module"),
        ("exactly", "RWD003", "did you mean 'exact'"),
    ],
)
def test_functions_that_give_nothing_are_named(function: str, code: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        score(function)

    assert caught.value.code == code
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_records_of_responses_say_what_a_person_wants_to_read() -> None:
    records = rollout_records(["2-5-30", "2-5-31"], score("own_rewards:wild", "exact", weights=[1.0, 0.5]), 3)

    assert records[1] == {
        "epoch": 2,
        "slice": 5,
        "sample": 30,
        "number": 1,
        "prompt": "7=",
        "response": "12",
        "answer": "12",
        "ids": [2 + CHARACTERS.index("1"), 2 + CHARACTERS.index("2"), END],
        "tokens": 3,
        "ended": True,
        "reward": None,
        "rewards": {"own_rewards:wild": None, "exact": 1.0},
    }
    assert [(record["sample"], record["response"]) for record in records] == [(30, "1"), (30, "12"), (31, "123")]
