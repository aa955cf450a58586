"""Tables of reinforcement learning and of rewards; settings that an algorithm's name stands for."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from hypha_ray.config.value_types import Count, NotNegative, Positive, Table, variable
from hypha_ray.plugins import Plugin

RewardName: TypeAlias = Annotated[str, Plugin("rewards", checked=False)]
"""Name of a reward function, which is looked up before the start."""
JUDGE: Final = "judge"
"""Name of the reward function that asks a judge."""
ENVIRONMENT: Final = "environment"
"""Name of the reward function that gives what the environment of an episode gave."""
MODEL: Final = "model"
"""Name of the reward function that asks a reward model."""
SLOW: Final = frozenset({"math", "code"})
"""Registered functions that may take long; the others are as fast as comparisons of texts."""
Deadline: TypeAlias = Positive | Literal["none"] | None
"""Time limit of reward functions in seconds; None: each has its own."""
Advantage: TypeAlias = Annotated[str, Plugin("advantages")]
Loss: TypeAlias = Annotated[str, Plugin("rl_losses")]
EnvironmentName: TypeAlias = Annotated[str, Plugin("environments", checked=False)]
"""Name of an environment, which is looked up before the start."""
Ratio: TypeAlias = Literal["token", "sequence"]
Aggregation: TypeAlias = Literal["token", "sequence", "constant"]
Estimator: TypeAlias = Literal["k1", "k2", "k3"]
Place: TypeAlias = Literal["loss", "reward"]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]
LOWEST_TEMPERATURE: Final = 1e-6
"""Lowest temperature to sample at: logits by a lower one may be infinite."""


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
    except ValueError:  # For instance an open bracket, or a port that is no number.
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


def temperature_or_none(value: float) -> float:
    """Check a temperature that may be 0."""
    if 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(f"0, or {LOWEST_TEMPERATURE:g} or more")
    return value


def server_command(line: str) -> str:
    """Check the command line of a server."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = []
    fields = set(re.findall(r"\{(\w*)\}", line))
    if not words or "port" not in fields or fields - {"model", "port"}:
        raise ValueError("a command line with {port}, and with {model} for the folder of the model")
    return line


class Recipe(NamedTuple):
    """Parts that an algorithm consists of."""

    advantage: Advantage
    ratio: Ratio
    aggregation: Aggregation
    clip_low: float
    clip_high: float
    drop_equal_groups: bool = False
    kl_estimator: Estimator = "k3"
    kl_place: Place = "loss"
    loss: Loss = "clipped"


RECIPES: Final[dict[str, Recipe]] = {
    "ppo": Recipe("gae", "token", "token", 0.2, 0.2, kl_estimator="k1", kl_place="reward"),
    "grpo": Recipe("group_std", "token", "sequence", 0.2, 0.2),
    "dr_grpo": Recipe("group_mean", "token", "constant", 0.2, 0.2),
    "rloo": Recipe("leave_one_out", "token", "constant", 0.2, 0.2),
    "reinforce++": Recipe("batch_std", "token", "token", 0.2, 0.2),
    "dapo": Recipe("group_std", "token", "token", 0.2, 0.28, drop_equal_groups=True),
    "gspo": Recipe("group_std", "sequence", "sequence", 3e-4, 4e-4),
}
"""Recipes by the name of their algorithm; docs/rl.md lists the papers."""


class GenerationServer(Table):
    """Server of its own environment that generates, with `rl.generation.engine = "server"`."""

    dialect: Literal["vllm", "sglang"] = Field("vllm", description="requests and answers that the server knows")
    command: Annotated[str, AfterValidator(server_command)] | None = Field(
        None, description="command line by which a worker starts its own server; {model} and {port} are filled in"
    )
    urls: list[Annotated[str, AfterValidator(server_url)]] = Field(
        [], fail_fast=True, description="addresses of running servers, one for each worker"
    )
    folder: str | None = Field(
        None, description="folder that worker and server see, for weights; default: that of temporary files"
    )
    start_s: Positive = Field(600.0, description="longest time until a server answers, at first and after it was lost")
    deadline_s: Positive = Field(600.0, description="longest time until the whole of one answer is there")


class Generation(Table):
    """Generation of the responses that are trained on."""

    engine: Literal["native", "continuous", "server"] = Field(
        "native",
        description="what generates: the trained model itself, the same by continuous batching of transformers, "
        "or a server that is given its weights",
    )

    max_response_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        256, description="tokens after which a response is cut off"
    )
    temperature: Annotated[float, Field(ge=LOWEST_TEMPERATURE, allow_inf_nan=False)] = Field(
        1.0, description="divisor of logits, in generation and in training"
    )
    request_prompts: Count = Field(
        8, description="prompts that are responded to at once, by one of rl.generators or by the worker"
    )
    server: GenerationServer = GenerationServer()


class Episode(Table):
    """Limits of a conversation with the environment, with `rl.environment`."""

    turns: Count = Field(8, description="responses after which an episode is over")
    turn_tokens: Count | None = Field(
        None,
        description="tokens after which a response is cut off, which ends the episode; default: what "
        "rl.generation.max_response_tokens leaves, which is for all turns and the environment's messages together",
    )
    deadline_s: Positive = Field(
        60.0, description="longest time of a call of the environment, after which its episode has no reward"
    )
    processes: Count = Field(1, description="processes of a worker that environments run in")


class Critic(Table):
    """Critic, for advantages by `gae`: a copy of the model that values the state before each token."""

    learning_rate: Positive | None = Field(None, description="peak learning rate; default: inner_optimizer's")
    value_clip: Positive = Field(0.2, description="largest change of a value that is learned in one step")
    discount: Share = Field(1.0, description="weight of a reward that comes one token later")
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = Field(
        0.95, description="weight of longer estimates of an advantage; 1: rewards alone, 0: the next value alone"
    )


class RlEvaluation(Table):
    """Generation of the responses that a validation prompt is judged by."""

    samples: Count = Field(1, description="responses to a prompt; more than one: pass@samples is reported too")
    temperature: Annotated[NotNegative, AfterValidator(temperature_or_none)] = Field(
        1.0, description="divisor of logits; 0: the most probable token each time"
    )
    top_p: Share = Field(1.0, description="probability of the most probable tokens that are sampled from; 1: all")
    top_k: Count | None = Field(None, description="number of most probable tokens that are sampled from; default: all")
    every_steps: Count | None = Field(
        None,
        description="batches after which a worker evaluates a batch of its validation prompts within a round; "
        "default: never",
    )


class RL(Table):
    """Reinforcement learning: batches are prompts, and responses are trained on by their rewards."""

    algorithm: Literal["ppo", "grpo", "dr_grpo", "rloo", "reinforce++", "dapo", "gspo"] | None = Field(
        None,
        description="chooses loss, advantage, ratio, aggregation and clipping; default: none, training on the dataset",
    )
    group_size: Count = Field(8, description="responses to a prompt in a step")
    advantage: Advantage | None = Field(
        None, description="baseline and scale of rewards, or module:object of your own; default: by algorithm"
    )
    advantage_options: dict[str, Any] | None = Field(None, description="options of an advantage of your own")
    loss: Loss | None = Field(
        None, description="loss of each token, or module:object of your own; default: by algorithm"
    )
    loss_options: dict[str, Any] | None = Field(None, description="options of a loss of your own")
    ratio: Ratio | None = Field(None, description="importance ratio of a token or a response; default: by algorithm")
    aggregation: Aggregation | None = Field(
        None, description="mean over tokens, over responses, or over the longest length; default: by algorithm"
    )
    clip_low: NotNegative | None = Field(None, description="clip range of ratios below 1; default: by algorithm")
    clip_high: NotNegative | None = Field(None, description="clip range of ratios above 1; default: by algorithm")
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        None, description="largest ratio that counts beside a negative advantage; default: no limit"
    )
    drop_equal_groups: bool | None = Field(
        None, description="leave out groups whose rewards are all equal; default: by algorithm"
    )
    mask_truncated: bool = Field(
        False,
        description="leave responses that were cut off out of the loss; their rewards count among those of their group",
    )
    refill: Annotated[int, Field(ge=0)] = Field(
        0,
        description="draws of further prompts in a step, in the place of those whose groups are left out because all "
        "rewards are equal; all prompts that were drawn count as used",
    )
    epochs: Count = Field(1, description="passes over a step's responses")
    minibatches: Count = Field(1, description="optimizer steps in a pass, each on a part of the prompts")
    reference: Literal["none", "initial", "round", "average"] = Field(
        "none",
        description="weights that the policy is held to: the run's first, the global ones of each round, "
        "or a moving average of its own",
    )
    reference_rate: Share = Field(0.05, description="part of the policy's weights that the average takes in each step")
    kl: NotNegative = Field(0.0, description="coefficient of the divergence from the reference")
    kl_estimator: Estimator | None = Field(None, description="estimator of that divergence; default: by algorithm")
    kl_place: Place | None = Field(
        None, description="what the divergence is added to, or taken off; default: by algorithm"
    )
    kl_target: Positive | None = Field(
        None,
        description="mean divergence of a token that rl.kl adapts to in the reward; default: it is fixed",
    )
    kl_horizon: Count = Field(10_000, description="responses in which the coefficient changes by up to a fifth")
    entropy: NotNegative = Field(0.0, description="coefficient of the entropy bonus")
    offload_reference: bool = Field(False, description="keep the reference out of the device's memory between its uses")
    save_every_steps: Count | None = Field(
        None, description="batches after which a worker writes its policy beside the run's files; default: never"
    )
    behaviour_cap: Positive | None = Field(
        None, description="cap of truncated importance weights; default: generation's log-probabilities are trusted"
    )
    shown_responses: Annotated[int, Field(ge=0)] = Field(
        4, description="responses of each worker and round that rollouts.jsonl has, of its first batch at most"
    )
    model_workers: Count = Field(
        1, description="processes of a worker, which share its resources; all but the first generate and reward"
    )
    generators: Annotated[int, Field(ge=0, le=1000)] = Field(
        0, description="machines beside the workers that only respond to prompts and reward, for all workers"
    )
    data_parallel: bool = Field(
        False, description="all model workers compute the policy's gradient, each on its part of a step's responses"
    )
    staleness: Annotated[int, Field(ge=0)] = Field(
        0,
        description="steps that the weights which respond may be behind those that are trained; above 0, model workers "
        "or generators respond to the next batches while this one is trained on",
    )
    environment: EnvironmentName | None = Field(
        None,
        description="code that responses are a conversation with: registered name, or module:class beside the job; "
        "default: a prompt has one response",
    )
    environment_options: dict[str, Any] | None = Field(None, description="options of the environment")
    generation: Generation = Generation()
    episode: Episode = Episode()
    reward: Reward = Reward()
    critic: Critic = Critic()
    evaluation: RlEvaluation = RlEvaluation()

    @property
    def reference_is_trainers(self) -> bool:
        """Whether the trainer's process has the reference: it is the only one, or the policy's weights enter it."""
        return self.model_workers == 1 or self.reference != "initial" or self.is_asynchronous

    @property
    def is_asynchronous(self) -> bool:
        """Whether responses come from a stream of other processes, on weights of earlier steps."""
        return self.algorithm is not None and self.staleness > 0

    @property
    def responds_before(self) -> bool:
        """Whether responses are there before the calls of a step begin: of others, or of draws that refill a batch."""
        return self.is_asynchronous or self.refill > 0 or self.generators > 0

    @property
    def corrects(self) -> bool:
        """Whether to correct for stale samples by importance weights π_train / π_sample."""
        return self.behaviour_cap is not None or self.is_asynchronous

    @property
    def scores_again(self) -> bool:
        """Whether the policy computes log-probabilities of responses before it is trained on them.

        If a batch has a single step and no reward needs them earlier, those that the step computes are the same.
        """
        needed_for_reward = self.reference != "none" and self.recipe.kl_place == "reward"
        return self.corrects and (self.epochs * self.minibatches > 1 or needed_for_reward)

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.algorithm is not None and self.recipe.advantage == "gae"

    @property
    def recipe(self) -> Recipe:
        """The algorithm's recipe, with the parts that the job file sets itself."""
        assert self.algorithm is not None
        overrides = {}
        for name in Recipe._fields:
            value = getattr(self, name)
            if value is not None:
                overrides[name] = value
        return RECIPES[self.algorithm]._replace(**overrides)
