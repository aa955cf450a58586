"""Rewards by a judge, against a server of chat completions over real sockets."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hypha_ray.config.load import load, resolved_toml
from hypha_ray.config.rl import RL
from hypha_ray.config.rl import Judge as JudgeTable
from hypha_ray.errors import AuthenticationError, ConfigError, HyphaError
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.rewards import evaluators
from hypha_ray.rl.rewards.evaluators import JudgeCalls
from hypha_ray.rl.rewards.response import Response
from hypha_ray.rl.scoring import Scored, Scorer
from tests.support.http_servers import LocalServer, QuietHandler
from tests.support.rl import CHARACTERS, END, prompts, tokenizer

KEY = "sk-very-secret-73519"


@dataclass
class Bench:
    """A server of chat completions that answers by a function of the text it is asked."""

    url: str = ""
    says: Callable[[str], Any] = lambda text: "score: 1"
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers, which are errors."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of errors."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    together: threading.Barrier | None = None
    """Barrier that requests wait at before they are answered."""


@pytest.fixture
def bench() -> Iterator[Bench]:
    found = Bench()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.body())
            found.asked.append({**asked, "path": self.path})
            found.keys.add(self.headers["Authorization"])
            if found.together is not None:
                try:
                    found.together.wait(60)
                except threading.BrokenBarrierError:  # The test is over.
                    return
            status = found.statuses.pop(0) if found.statuses else 200
            said = found.says(asked["messages"][0]["content"]) if status == 200 else None
            answer = {"choices": [{"message": {"role": "assistant", "content": said}}]}
            body = json.dumps(answer if status == 200 else {"error": f"wrong key {self.headers['Authorization']}"})
            self.send_response(status)
            for name, text in found.headers.items() if status != 200 else ():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body.encode() if said != "garbage" else b"<html>")

    with LocalServer(Handler) as server:
        found.url = f"{server.url}/v1"
        yield found


def judged(bench: Bench, *texts: str, **settings: Any) -> list[float]:
    calls = JudgeCalls(JudgeTable(**{"url": bench.url, "model": "grader", "retries": 0, **settings}))
    given = [Response(f"question {text}", text, (), True, {"answer": "42"}, 8) for text in texts]
    return [one for (one,) in calls.rewards(given)]


def test_scores_are_the_last_match_of_the_pattern(bench: Bench) -> None:
    bench.says = lambda text: f"The scale is score: 0 to 1. score: {0.25 if 'good' in text else -3}"

    assert judged(bench, "good", "bad") == [0.25, -3]
    assert judged(bench, "x", pattern=r"scale is (\w+)") != [0]
    (asked, *_) = [one for one in bench.asked if "good" in one["messages"][0]["content"]]
    assert asked["path"] == "/v1/chat/completions"
    assert (asked["model"], asked["temperature"], "max_tokens" in asked) == ("grader", 0.0, False)


def test_a_score_beyond_the_full_one_is_none(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.says = lambda text: f"score: {10 if 'good' in text else 5}"

    with caplog.at_level(logging.WARNING):
        assert all(map(math.isnan, judged(bench, "good", "bad")))
    assert "where rl.reward.judge.full_score is 1" in caplog.text
    assert judged(bench, "good", "bad", full_score=10) == [1.0, 0.5]


def test_a_pattern_that_takes_too_long_costs_the_reward_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.says = lambda text: "1 " * (2**20 if text.endswith("bad") else 1)
    monkeypatch.setattr(evaluators, "_PATTERN_S", 1e-3)

    with caplog.at_level(logging.WARNING):
        first, second = judged(bench, "good", "bad", template="{response}", pattern=r"(\d+)\s")
    assert first == 1 and math.isnan(second)
    assert "rl.reward.judge.pattern takes longer" in caplog.text


def test_what_a_response_says_is_no_part_of_the_template(bench: Bench) -> None:
    judged(bench, "{answer}{prompt}", template="{prompt}|{response}|{answer}|{}", max_tokens=9)

    assert bench.asked[0]["messages"] == [
        {"role": "user", "content": "question {answer}{prompt}|{answer}{prompt}|42|{}"}
    ]
    assert bench.asked[0]["max_tokens"] == 9


@pytest.mark.parametrize("said", ["no idea", "score: nan", "score: ", None, "garbage", ""])
def test_answers_without_a_score_leave_the_response_without_reward(bench: Bench, said: Any) -> None:
    bench.says = lambda text: said if text.endswith("bad") else "score: 1"

    first, second = judged(bench, "good", "bad", template="{response}")

    assert first == 1 and math.isnan(second)


@pytest.mark.parametrize(
    ("statuses", "retries", "asked"), [([500], 1, 2), ([429, 503], 2, 3), ([500, 500], 1, 2), ([400], 5, 1)]
)
def test_failures_of_the_judge_are_tried_again_and_those_of_a_request_are_not(
    bench: Bench, statuses: list[int], retries: int, asked: int
) -> None:
    bench.statuses = list(statuses)
    (found,) = judged(bench, "x", retries=retries)

    assert len(bench.asked) == asked
    assert math.isnan(found) == (len(statuses) == asked)


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_address_ends_the_run_and_isnt_told(
    bench: Bench, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADER_KEY", KEY)
    bench.statuses = [status]
    with pytest.raises(ConfigError, match=f"RWD005.*status {status}.*Bearer \\*\\*\\*") as raised:
        judged(bench, "x", key_variable="GRADER_KEY")
    assert bench.keys == {f"Bearer {KEY}"}
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_judge_that_is_elsewhere_ends_the_run_and_nothing_is_sent_there(bench: Bench, status: int) -> None:
    bench.statuses, bench.headers = [status], {"Location": f"{bench.url}/elsewhere?key=hidden-word"}
    with pytest.raises(ConfigError, match=f"RWD005.*status {status}: a redirect to {bench.url}/elsewhere") as raised:
        judged(bench, "x", retries=2)
    assert "hidden-word" not in str(raised.value)
    assert len(bench.asked) == 1


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 503])
def test_a_judge_that_asks_for_patience_is_asked_again_when_it_said(bench: Bench, status: int) -> None:
    bench.statuses, bench.headers = [status], {"Retry-After": "1.5"}
    began = time.monotonic()

    assert judged(bench, "x", retries=1) == [1]
    assert time.monotonic() - began >= 1.5
    assert len(bench.asked) == 2


def test_pauses_that_a_judge_asks_for_use_up_no_retry(bench: Bench) -> None:
    bench.statuses, bench.headers = [429, 429, 429], {"Retry-After": "0"}

    assert judged(bench, "x", retries=1) == [1]
    assert len(bench.asked) == 4


def test_a_key_is_in_no_log_and_no_job_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADER_KEY", KEY)
    bench.statuses = [500]
    with caplog.at_level(logging.DEBUG):
        judged(bench, "x", key_variable="GRADER_KEY")
    flags = ["--rl.algorithm=grpo", '--rl.reward.functions=["judge"]', "--rl.reward.judge.key_variable=GRADER_KEY"]

    assert "no score for 1 of 1" in caplog.text and KEY not in caplog.text
    assert KEY not in resolved_toml(load(["--dataset.path", "unused", *flags]).job)


def test_a_judge_is_asked_for_no_response_of_a_task_that_has_other_functions(bench: Bench) -> None:
    bench.says = lambda text: "score: 0.5"
    calls = JudgeCalls(JudgeTable(url=bench.url, model="grader"), {"sums": ["number"]})
    given = [Response("?", "!", (), True, {"task": task, "answer": "42"}, 8) for task in ("sums", "poems")]
    (summed,), (written,) = calls.rewards(given)

    assert math.isnan(summed) and written == 0.5
    assert len(bench.asked) == 1


def test_as_many_responses_are_judged_at_a_time_as_allowed(bench: Bench) -> None:
    bench.together = threading.Barrier(4)

    assert judged(bench, *map(str, range(8)), at_once=4) == [1] * 8


def test_a_judge_that_hangs_costs_the_reward(bench: Bench) -> None:
    bench.together = threading.Barrier(2)
    try:
        assert math.isnan(judged(bench, "x", deadline_s=0.3)[0])
    finally:
        bench.together.abort()


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"url": None}, ConfigError, r"RWD005.*judge\.url"),
        ({"model": None}, ConfigError, r"RWD005.*judge\.model"),
        ({"key_variable": "NO_SUCH_KEY"}, AuthenticationError, "RWD006.*NO_SUCH_KEY"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_one_clear_error(
    bench: Bench, settings: dict[str, Any], error: type[HyphaError], told: str
) -> None:
    with pytest.raises(error, match=told):
        judged(bench, "x", **settings)


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("url=a:1", "http://"),
        ("pattern=score", "one group"),
        ("pattern=(", "one group"),
        ("template=good?", "{response}"),
        ("template={response}{reply}", "{response}"),
        ("key_variable=sk-1", "environment variable"),
    ],
)
def test_settings_of_a_judge_are_checked_when_they_are_read(flag: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"CFG003.*{told}"):
        load(["--dataset.path", "unused", f"--rl.reward.judge.{flag}"])


def test_a_key_in_place_of_its_variable_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match=r"CFG003.*kept secret") as raised:
        load(["--dataset.path", "unused", f"--rl.reward.judge.key_variable={KEY}"])
    assert KEY not in str(raised.value)


def scored(bench: Bench, functions: list[str], weights: list[float], deadline_s: float | None = None) -> Scored:
    """Score the response 1 to a prompt with the answer 1, and the response 3 to one with the answer 2."""
    judge = {"url": bench.url, "model": "grader", "retries": 0}
    table = {"functions": functions, "weights": weights, "judge": judge, "deadline_s": deadline_s}
    batch = prompts(["1=", "2="], ["1", "2"])
    prompt = torch.from_numpy(batch.arrays["input_ids"]).long()
    ids = torch.cat([prompt, torch.tensor([[2 + CHARACTERS.index(one), END] for one in "13"])], 1)
    ones = torch.ones(2, 2)
    responses = Responses(ids, torch.ones_like(ids), ones, ones, torch.tensor([True, True]))
    return Scorer(RL.model_validate({"algorithm": "grpo", "reward": table}), tokenizer()).score(batch.arrays, responses)


@pytest.mark.parametrize("deadline_s", [None, 60.0])
def test_a_judge_is_weighed_among_other_functions(bench: Bench, deadline_s: float | None) -> None:
    bench.says = lambda text: "score: 0.5" if "grade:\n3" in text else "score: 0.25"
    found = scored(bench, ["exact", "judge", "contains"], [1.0, 2.0, 10.0], deadline_s)

    assert found.total.tolist() == [[1 + 0.5 + 10], [1.0]]
    assert {name: part.ravel().tolist() for name, part in found.parts.items()} == {
        "exact": [1, 0],
        "judge": [0.25, 0.5],
        "contains": [1, 0],
    }


def test_responses_without_a_score_are_counted_as_those_of_other_functions(bench: Bench) -> None:
    bench.says = lambda text: "score: 1" if "grade:\n3" in text else "hm"
    found = scored(bench, ["judge"], [1.0])

    assert math.isnan(found.total[0, 0]) and found.total[1, 0] == 1
    assert found.sums() == {"reward": (1, 1), "absent_rewards": (1, 2)}


def test_a_judge_without_a_score_for_a_whole_batch_ends_the_run_with_its_reason(bench: Bench) -> None:
    bench.says = lambda text: "I can't say"
    with pytest.raises(ConfigError, match=r"RWD002.*I can't say"):
        scored(bench, ["judge"], [1.0])
