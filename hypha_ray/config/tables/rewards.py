"""Tables of rewards: functions, models that judge or score, and what belongs to which task."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from hypha_ray.config.value_types import Count, Positive, Table, variable
from hypha_ray.plugins import Plugin

RewardName: TypeAlias = Annotated[str, Plugin("rewards", checked=False)]
"""Name of a reward function, which is looked up before the start."""
JUDGE: Final = "judge"
"""Name of the reward function that asks a judge."""
ENVIRONMENT: Final = "environment"
"""Name of the reward function that gives what the environment of an episode gave."""
MODEL: Final = "model"
"""Name of the reward function that asks a reward model."""
Deadline: TypeAlias = Positive | Literal["none"] | None
"""Time limit of reward functions in seconds; None: each has its own."""


def distinct(names: list[str]) -> list[str]:
    """Check that no name is given twice."""
    if not names or len(set(names)) < len(names):
        raise ValueError("one or more names, each of them once")
    return names


Functions: TypeAlias = Annotated[list[str], AfterValidator(distinct)]
"""Names of reward functions."""


def server_url(url: str) -> str:
    """Check the address of a server."""
    try:
        is_valid = re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", url) and urlsplit(url).port != 0
    except ValueError:  # Such as a bracket that isn't closed, or a port that is no number.
        is_valid = False
    if not is_valid:
        raise ValueError("http://host:port or https://host:port")
    return url


def judge_template(text: str) -> str:
    """Check the text for a judge."""
    fields = set(re.findall(r"\{(\w+)\}", text))
    if "response" not in fields or fields - {"prompt", "response", "answer"}:
        raise ValueError("a text with {response}, and if wanted with {prompt} and {answer}")
    return text


def judge_pattern(text: str) -> str:
    """Check the regular expression for a judge's answers."""
    try:
        groups = re.compile(text).groups
    except re.error:
        groups = 0
    if groups != 1:
        raise ValueError("a regular expression with one group")
    return text


class Judge(Table):
    """Language model that rewards, with the function `judge`: reached by HTTP in the manner of OpenAI."""

    url: Annotated[str, AfterValidator(server_url)] | None = Field(
        None, description="address up to /chat/completions, such as http://host:8000/v1"
    )
    model: str | None = Field(None, description="name of the model there")
    template: Annotated[str, AfterValidator(judge_template)] = Field(
        "Question:\n{prompt}\n\nRight answer:\n{answer}\n\nResponse to grade:\n{response}\n\n"
        'Grade the response from 0 to 1. End with "score: " and the number.',
        description="text that it is sent; {prompt}, {response} and {answer} are filled in",
    )
    pattern: Annotated[str, AfterValidator(judge_pattern)] = Field(
        r"score:\s*(-?\d+(?:\.\d+)?)", description="regular expression whose group is the score; the last match counts"
    )
    full_score: Positive = Field(
        1.0, description="score of a right answer; the reward is the score divided by it, and none if it is larger"
    )
    key_variable: Annotated[str, AfterValidator(variable)] | None = Field(
        None, description="environment variable that has the key; default: none is sent"
    )
    max_tokens: Count | None = Field(None, description="longest answer in tokens; default: the judge's own")
    deadline_s: Positive = Field(60.0, description="longest time until the whole of one answer is there")
    retries: Annotated[int, Field(ge=0)] = Field(
        3, description="further attempts, after 0.5 s, 1 s, 2 s …, or when the judge says (Retry-After)"
    )
    at_once: Count = Field(16, description="responses that a worker has judged at a time")


class RewardModel(Table):
    """Sequence classifier of transformers with one label, which rewards by the function `model`."""

    repository: str | None = Field(None, description="hub id or local folder")
    revision: str | None = Field(None, description="branch, tag or commit of the repository")
    chat_column: str | None = Field(
        None,
        description="column of the prompts' records, see --keep-columns of jobs/prepare.py, whose text or messages go "
        "into the model's chat template before the response; default: the text of prompt and response, as it is",
    )
    batch_size: Count = Field(16, description="responses that the model scores at a time")


class TaskRewards(Table):
    """Functions of the prompts of one task, of those in `rl.reward.functions`."""

    name: str = Field("", description="task, as the records of prompts have it: --task of jobs/prepare.py")
    functions: Functions = Field(
        [],
        fail_fast=True,
        description="functions that reward a response to such a prompt; 1 of the first one is a right answer",
    )


class Reward(Table):
    """Reward of a response: a weighted sum of functions."""

    functions: Annotated[list[RewardName], AfterValidator(distinct)] = Field(
        ["exact"], fail_fast=True, description="registered names, or module:function beside the job; see docs/rl.md"
    )
    tasks: list[TaskRewards] = Field(
        [], fail_fast=True, description="functions of single tasks; prompts of all other tasks have all functions"
    )
    weights: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(
        [], fail_fast=True, description="weight of each function; default: 1 for each"
    )
    deadline_s: Deadline = Field(
        None,
        description="limit for a response, after which it has no reward, of math, code and functions of your own; "
        "default: 10 s for math, 60 s for your own; none: they run in the worker's own process",
    )
    processes: Count = Field(1, description="processes of a worker that functions with a limit run in")
    judge: Judge = Judge()
    model: RewardModel = RewardModel()

    @property
    def loaded_functions(self) -> list[str]:
        """Functions that are loaded as code; those by models, `judge` and `model`, are none."""
        return [name for name in self.functions if name not in (JUDGE, MODEL)]

    @property
    def by_task(self) -> dict[str, list[str]]:
        """Functions of the tasks that have some of their own."""
        return {task.name: task.functions for task in self.tasks}
