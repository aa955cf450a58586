"""Reward model: a sequence classifier of transformers that gives prompt and response one score."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence

from hypha_ray.config.rl import MODEL, Reward, RewardModel
from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.errors import ConfigError, reason_of
from hypha_ray.model.build import build_model, compare_weights, random_model, skeleton
from hypha_ray.model.checks import check_on_copy, max_positions
from hypha_ray.model.configuration import DTYPES
from hypha_ray.model.sources import fetch, hub_token, read_config, remote_code_allowed
from hypha_ray.model.tasks import find_task
from hypha_ray.model.tokenizers import load_preprocessor
from hypha_ray.rl.rewards.calls import Tasks, functions_of
from hypha_ray.rl.rewards.response import Response

Tokens: TypeAlias = Mapping[str, Sequence[int]]
"""Inputs of the model for one text; each has one number for each token."""
_CLASS = "ForSequenceClassification"
"""End of the names of all classes of sequence classifiers."""
_CLOSE = 1e-3
"""Largest difference of two scores that differ only by rounding."""

log = logging.getLogger(__name__)


class ModelInputs:
    """Inputs made by the reward model's own tokenizer.

    Args:
        settings: table of the job file.
        tokenizer: the tokenizer.
        tasks: functions of single tasks.

    Raises:
        ConfigError: RWD007, the tokenizer lacks the chat template that the settings ask for.

    """

    def __init__(self, settings: RewardModel, tokenizer: Any, tasks: Tasks | None = None) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._tasks = tasks or {}
        if settings.chat_column is not None and not tokenizer.chat_template:
            raise unfit(settings, "no chat template", "one, as rl.reward.model.chat_column is set")

    def of(self, responses: Sequence[Response]) -> dict[int, Tokens]:
        """Return the inputs of the responses that the model is to score, by their indices.

        Raises:
            ConfigError: RWD007, a prompt can't be put into the chat template.

        """
        inputs: dict[int, Tokens] = {}
        for index, response in enumerate(responses):
            if MODEL in functions_of(response, self._tasks, (MODEL,)):
                inputs[index] = self._encode(response)
        return inputs

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Make inputs without scoring them: no response has a reward. Checks before a start call it.

        Raises:
            ConfigError: as `of`.

        """
        self.of(responses)
        return [(math.nan,)] * len(responses)

    def _encode(self, response: Response) -> Tokens:
        column = self._settings.chat_column
        if column is None:
            return dict(self._tokenizer(response.prompt + response.text))
        chat = self._chat(response, column)
        return dict(self._tokenizer(chat, add_special_tokens=False))

    def _chat(self, response: Response, column: str) -> str:
        """Return the messages of the column and the response as text, by the chat template."""
        messages = response.data.get(column)
        if messages is None:
            problem = f"the record of a prompt has no {column!r} for the reward model"
            fix = f"prepare the dataset with --keep-columns {column}"
            raise ConfigError("RWD007", problem, ", ".join(response.data), fix=fix)
        if not isinstance(messages, list):
            messages = [{"role": "user", "content": str(messages)}]
        chat = [*messages, {"role": "assistant", "content": response.text}]
        try:
            return str(self._tokenizer.apply_chat_template(chat, tokenize=False))
        except Exception as error:  # Templates raise errors of their own.
            got = reason_of(error)
            raise unfit(self._settings, f"{column!r} in its chat template: {got}", "a text or messages") from None


def load_tokenizer(settings: RewardModel, model: Model) -> Any:
    """Load the tokenizer beside a reward model.

    Args:
        settings: table of the job file.
        model: table by which the reward model is loaded.

    Raises:
        ConfigError: RWD007, there is none.
        HyphaError: as `load_preprocessor`.

    """
    tokenizer = load_preprocessor(Preprocessor(), None, model)
    if not hasattr(tokenizer, "get_vocab"):
        raise unfit(settings, "no tokenizer", "the model's tokenizer beside it")
    return tokenizer


def unfit(settings: RewardModel, got: str, allowed: str) -> ConfigError:
    """Return the error for a model that can't reward."""
    fix = "see to rl.reward.model, or name another one"
    return ConfigError("RWD007", f"{settings.repository} can't be the reward model", got, allowed, fix)


class ModelScores:
    """Scores of responses by a model, in batches of responses of about one length.

    Args:
        settings: table of the job file.
        network: sequence classifier with one label, in evaluation mode.
        tokenizer: the classifier's own tokenizer.
        tasks: functions of single tasks.

    Raises:
        ConfigError: RWD007, the classifier doesn't give one score, or its tokenizer doesn't allow batches or chats.

    """

    def __init__(self, settings: RewardModel, network: Any, tokenizer: Any, tasks: Tasks | None = None) -> None:
        self._settings = settings
        self._network = network
        self._inputs = ModelInputs(settings, tokenizer, tasks)
        labels = network.config.num_labels
        if labels != 1:
            raise unfit(settings, f"{labels} labels", "a sequence classifier with one label")
        self._limit = max_positions(network, decoder=False) or math.inf
        self._accepted = set(inspect.signature(network.forward).parameters)
        self._padding = {"input_ids": _pad_token(settings, network, tokenizer)}
        self._padding["token_type_ids"] = getattr(tokenizer, "pad_token_type_id", 0)
        vocabulary_size = network.config.get_text_config().vocab_size
        vocabulary = tokenizer.get_vocab()
        largest = max(vocabulary.values())
        if largest >= vocabulary_size:
            raise unfit(settings, f"a tokenizer with token {largest}", f"token ids below {vocabulary_size}")

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return rewards as `Evaluator` says; responses longer than the model's positions have none.

        Raises:
            ConfigError: RWD007, a prompt can't be put into the chat template.

        """
        inputs = self._inputs.of(responses)
        lengths: dict[int, int] = {}
        for index, tokens in inputs.items():
            length = len(tokens["input_ids"])
            if 0 < length <= self._limit:
                lengths[index] = length
        if len(lengths) < len(inputs):
            text = "%d of %d texts are empty, or longer than the %s positions of the reward model"
            log.warning(text, len(inputs) - len(lengths), len(inputs), self._limit)
        rewards = [math.nan] * len(responses)
        by_length = sorted(lengths, key=lengths.__getitem__)
        for start in range(0, len(by_length), self._settings.batch_size):
            indices = by_length[start : start + self._settings.batch_size]
            scores = self._scores([inputs[index] for index in indices])
            for index, score in zip(indices, scores, strict=True):
                rewards[index] = score
        return [(reward,) for reward in rewards]

    @torch.no_grad()
    def _scores(self, batch: Sequence[Tokens]) -> list[float]:
        """Return scores, NaN in place of ∞; rows are padded on the right, where classifiers look for padding."""
        inputs: dict[str, Any] = {}
        for name in batch[0]:
            if name not in self._accepted:
                continue
            rows = [torch.tensor(tokens[name]) for tokens in batch]
            padding = self._padding.get(name, 0)
            padded_ids = pad_sequence(rows, batch_first=True, padding_value=padding)
            inputs[name] = padded_ids.to(self._network.device)
        if "use_cache" in self._accepted:
            inputs["use_cache"] = False
        output = self._network(**inputs)
        logits = output.logits[:, 0].float()
        scores: list[float] = logits.masked_fill(~logits.isfinite(), math.nan).tolist()
        return scores


def load_scores(reward: Reward, model: Model, device: torch.device) -> ModelScores:
    """Load the reward model of a job, in the dtype that it was saved in, and its tokenizer.

    Args:
        reward: table of the job file.
        model: table of the trained model, whose token and trust the reward model shares.
        device: device that it computes on.

    Raises:
        HyphaError: as `check_reward_model`.

    """
    table = _model_table(reward.model, model)
    network = build_model(table, 0, needs_all=True)
    network = network.to(device).eval().requires_grad_(False)
    return ModelScores(reward.model, network, load_tokenizer(reward.model, table), reward.by_task)


def unscored(reward: Reward, model: Model) -> ModelInputs | None:
    """Return the inputs of a job's reward model, without the model; None if no function needs one.

    Raises:
        HyphaError: as `check_reward_model`.

    """
    if MODEL not in reward.functions:
        return None
    tokenizer = load_tokenizer(reward.model, _model_table(reward.model, model))
    return ModelInputs(reward.model, tokenizer, reward.by_task)


def check_reward_model(reward: Reward, model: Model) -> list[str]:
    """Refuse a reward model that can't be used, by its configuration, tokenizer and the headers of its weights.

    A small copy is run, so that a model whose scores depend on padding is found.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: RWD007, it isn't given, or is no sequence classifier with one label that scores in batches.
        HyphaError: it can't be had, or its weights aren't those of its model.

    """
    table = _model_table(reward.model, model)
    network = skeleton(table)
    tokenizer = load_tokenizer(reward.model, table)
    ModelScores(reward.model, network, tokenizer)
    notes = compare_weights(table, needs_all=True)
    check = partial(_check_padding, settings=reward.model, tokenizer=tokenizer)
    build = partial(random_model, table, find_task(table.type))
    parameter_count = sum(parameter.numel() for parameter in network.parameters())
    check_on_copy(check, network.config, build, parameter_count)
    return notes


def _check_padding(network: Any, settings: RewardModel, tokenizer: Any) -> None:
    """Compare scores of texts of different lengths with those of each text by itself."""
    plain_settings = settings.model_copy(update={"chat_column": None})
    texts = [Response(str(10**length), "1", (), True, {}, 1) for length in range(3)]
    scores = ModelScores(plain_settings, network, tokenizer)
    distances: list[float] = []
    for text, (padded_score,) in zip(texts, scores.rewards(texts), strict=True):
        [(single_score,)] = scores.rewards([text])
        distances.append(abs(padded_score - single_score))
    largest = max(distances)
    if not largest <= _CLOSE:
        raise unfit(settings, f"scores {largest:.2g} apart with padding and without", f"up to {_CLOSE:g}")


def _model_table(settings: RewardModel, model: Model) -> Model:
    """Return the table of a model by which the reward model is loaded."""
    if settings.repository is None:
        fix = "name a sequence classifier with one label in rl.reward.model.repository"
        raise ConfigError("RWD007", "reward function model has no model", fix=fix)
    is_trusted = remote_code_allowed(model.trust_remote_code)
    folder = Path(fetch(settings.repository, settings.revision, hub_token(model), needs_code=is_trusted))
    config = read_config(folder)
    architectures = config.get("architectures") or [None]
    architecture = str(architectures[0])
    if not architecture.endswith(_CLASS):
        raise unfit(settings, architecture, f"a model of a class …{_CLASS}")
    dtype = config.get("dtype", config.get("torch_dtype"))
    return Model(
        repository=settings.repository,
        revision=settings.revision,
        type="sequence-classification",
        token=model.token,
        config={"dtype": dtype if dtype in DTYPES else "float32"},
        trust_remote_code=model.trust_remote_code,
    )


def _pad_token(settings: RewardModel, network: Any, tokenizer: Any) -> int:
    """Return the padding token of a model; a model without one gets its tokenizer's."""
    text = network.config.get_text_config()
    if text.pad_token_id is None:
        network.config.pad_token_id = text.pad_token_id = tokenizer.pad_token_id
    if text.pad_token_id is None:
        raise unfit(settings, "no padding token", "pad_token_id in its config.json")
    return int(text.pad_token_id)
