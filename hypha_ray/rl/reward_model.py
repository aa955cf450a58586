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

from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.config.tables.rewards import MODEL, Reward, RewardModel
from hypha_ray.errors import ConfigError, reason_of
from hypha_ray.model.checks.positions import max_positions
from hypha_ray.model.checks.small_copies import check_on_copy
from hypha_ray.model.loading.build import build_model, compare_weights, random_model, skeleton
from hypha_ray.model.loading.configuration import DTYPES
from hypha_ray.model.loading.folders import read_config
from hypha_ray.model.loading.hub import fetch, remote_code_allowed
from hypha_ray.model.loading.preprocess import load_preprocessor
from hypha_ray.model.tasks.table import find_task
from hypha_ray.rl.rewards.calls import Tasks, functions_of
from hypha_ray.rl.rewards.response import Response

Tokens: TypeAlias = Mapping[str, Sequence[int]]
"""Inputs of the model for one text, of which each has a number for each token."""


class ModelInputs:
    """Inputs made by the reward model's own tokenizer.

    Args:
        settings: table of the job file.
        tokenizer: the tokenizer.
        tasks: functions of single tasks.

    Raises:
        ConfigError: RWD007, the tokenizer has no chat template, and one is wanted.

    """

    def __init__(self, settings: RewardModel, tokenizer: Any, tasks: Tasks | None = None) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._tasks = tasks or {}
        if settings.chat_column is not None and not tokenizer.chat_template:
            raise unfit(settings, "no chat template", "one, as rl.reward.model.chat_column is set")

    def of(self, responses: Sequence[Response]) -> dict[int, Tokens]:
        """Return the inputs of the responses that the model is to score, by their places.

        Raises:
            ConfigError: RWD007, a prompt can't be put into the chat template.

        """
        asked = (place for place, one in enumerate(responses) if MODEL in functions_of(one, self._tasks, (MODEL,)))
        return {place: self._encoded(responses[place]) for place in asked}

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Make inputs without scoring them: no response has a reward. It is the model's place before a start.

        Raises:
            ConfigError: as `of`.

        """
        self.of(responses)
        return [(math.nan,)] * len(responses)

    def _encoded(self, response: Response) -> Tokens:
        column = self._settings.chat_column
        if column is None:
            return dict(self._tokenizer(response.prompt + response.text))
        return dict(self._tokenizer(self._chat(response, column), add_special_tokens=False))

    def _chat(self, response: Response, column: str) -> str:
        """Return a chat of what the column has and the response, in the form of the template."""
        if (asked := response.data.get(column)) is None:
            what = f"the record of a prompt has no {column!r}"
            fix = f"prepare the dataset with --keep-columns {column}"
            raise ConfigError("RWD007", f"{what} for the reward model", ", ".join(response.data), fix=fix)
        messages = asked if isinstance(asked, list) else [{"role": "user", "content": str(asked)}]
        answered = [*messages, {"role": "assistant", "content": response.text}]
        try:
            return str(self._tokenizer.apply_chat_template(answered, tokenize=False))
        except Exception as error:  # Templates raise errors of their own.
            got = reason_of(error)
            raise unfit(self._settings, f"{column!r} in its chat template: {got}", "a text or messages") from None


def load_tokenizer(settings: RewardModel, own: Model) -> Any:
    """Load the tokenizer beside a reward model.

    Args:
        settings: table of the job file.
        own: table of a model by which the reward model is loaded.

    Raises:
        ConfigError: RWD007, there is none.
        HyphaError: as `load_preprocessor`.

    """
    found = load_preprocessor(Preprocessor(), None, own)
    if not hasattr(found, "get_vocab"):
        raise unfit(settings, "no tokenizer", "the model's tokenizer beside it")
    return found


def unfit(settings: RewardModel, got: str, allowed: str) -> ConfigError:
    """Return the error for a model that can't reward."""
    fix = "see to rl.reward.model, or name another one"
    return ConfigError("RWD007", f"{settings.repository} can't be the reward model", got, allowed, fix)


_CLASS = "ForSequenceClassification"
"""End of the names of all classes of sequence classifiers."""
_CLOSE = 1e-3
"""Largest difference of two scores that are equal but for rounding."""

log = logging.getLogger(__name__)


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
        if network.config.num_labels != 1:
            raise unfit(settings, f"{network.config.num_labels} labels", "a sequence classifier with one label")
        self._limit = max_positions(network, decoder=False) or math.inf
        self._accepted = inspect.signature(network.forward).parameters.keys()
        self._padding = {"input_ids": _pad_token(settings, network, tokenizer)}
        self._padding["token_type_ids"] = getattr(tokenizer, "pad_token_type_id", 0)
        size = network.config.get_text_config().vocab_size
        largest = max(tokenizer.get_vocab().values())
        if largest >= size:
            raise unfit(settings, f"a tokenizer with token {largest}", f"token ids below {size}")

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return rewards as `Evaluator` says; responses that the model has no positions for have none.

        Raises:
            ConfigError: RWD007, a prompt can't be put into the chat template.

        """
        encoded = self._inputs.of(responses)
        lengths = {place: len(tokens["input_ids"]) for place, tokens in encoded.items()}
        order = sorted(
            (place for place, length in lengths.items() if 0 < length <= self._limit), key=lengths.__getitem__
        )
        if len(order) < len(encoded):
            given = len(encoded) - len(order), len(encoded), self._limit
            log.warning("%d of %d texts are empty, or longer than the %s positions of the reward model", *given)
        found: dict[int, float] = {}
        for start in range(0, len(order), self._settings.batch_size):
            part = order[start : start + self._settings.batch_size]
            found |= zip(part, self._scores([encoded[place] for place in part]), strict=True)
        return [(found.get(place, math.nan),) for place in range(len(responses))]

    @torch.no_grad()
    def _scores(self, batch: Sequence[Tokens]) -> list[float]:
        """Return scores, NaN for what isn't finite; rows are padded on the right, where heads look for padding."""
        inputs = {
            name: pad_sequence(
                [torch.tensor(one[name]) for one in batch], batch_first=True, padding_value=self._padding.get(name, 0)
            ).to(self._network.device)
            for name in batch[0]
            if name in self._accepted
        }
        options = {"use_cache": False} if "use_cache" in self._accepted else {}
        scores = self._network(**inputs, **options).logits[:, 0].float()
        return [score if math.isfinite(score) else math.nan for score in scores.tolist()]


def load_scores(reward: Reward, model: Model, device: torch.device) -> ModelScores:
    """Load the reward model of a job, in the dtype that it was saved in, and its tokenizer.

    Args:
        reward: table of the job file.
        model: table of the trained model, whose token and trust the reward model shares.
        device: device that it computes on.

    Raises:
        HyphaError: as `check_reward_model`.

    """
    own = _table(reward.model, model)
    network = build_model(own, 0, whole=True).to(device).eval().requires_grad_(False)
    return ModelScores(reward.model, network, load_tokenizer(reward.model, own), reward.by_task)


def unscored(reward: Reward, model: Model) -> ModelInputs | None:
    """Return what stands for the reward model of a job before its start; None if no function needs one.

    Raises:
        HyphaError: as `check_reward_model`.

    """
    if MODEL not in reward.functions:
        return None
    return ModelInputs(reward.model, load_tokenizer(reward.model, _table(reward.model, model)), reward.by_task)


def check_reward_model(reward: Reward, model: Model) -> list[str]:
    """Refuse a reward model that can't be used, by its configuration, tokenizer and the headers of its weights.

    A small copy is run, so that a model whose scores depend on padding is found.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: RWD007, it isn't given, or is no sequence classifier with one label that scores in batches.
        HyphaError: it can't be had, or its weights aren't those of its model.

    """
    own = _table(reward.model, model)
    network = skeleton(own)
    tokenizer = load_tokenizer(reward.model, own)
    ModelScores(reward.model, network, tokenizer)
    notes = compare_weights(own, whole=True)
    check = partial(_check_padding, settings=reward.model, tokenizer=tokenizer)
    size = sum(parameter.numel() for parameter in network.parameters())
    check_on_copy(check, network.config, partial(random_model, own, find_task(own.type)), size)
    return notes


def _check_padding(network: Any, settings: RewardModel, tokenizer: Any) -> None:
    """Compare scores of texts of different lengths with those of each text by itself."""
    plain = settings.model_copy(update={"chat_column": None})
    texts = [Response(str(10**length), "1", (), True, {}, 1) for length in range(3)]
    together = ModelScores(plain, network, tokenizer).rewards(texts)
    alone = [ModelScores(plain, network, tokenizer).rewards([text])[0] for text in texts]
    gap = max(abs(one - other) for (one,), (other,) in zip(together, alone, strict=True))
    if not gap <= _CLOSE:
        raise unfit(settings, f"scores {gap:.2g} apart with padding and without", f"up to {_CLOSE:g}")


def _table(settings: RewardModel, model: Model) -> Model:
    """Return the table of a model by which the reward model is loaded."""
    if settings.repository is None:
        fix = "name a sequence classifier with one label in rl.reward.model.repository"
        raise ConfigError("RWD007", "reward function model has no model", fix=fix)
    token = model.token.get_secret_value() if model.token else None
    trusted = remote_code_allowed(model.trust_remote_code)
    found = read_config(Path(fetch(settings.repository, settings.revision, token, code=trusted)))
    architecture = str(next(iter(found.get("architectures") or ()), None))
    if not architecture.endswith(_CLASS):
        raise unfit(settings, architecture, f"a model of a class …{_CLASS}")
    saved = found.get("dtype", found.get("torch_dtype"))
    return Model(
        repository=settings.repository,
        revision=settings.revision,
        type="sequence-classification",
        token=model.token,
        config={"dtype": saved if saved in DTYPES else "float32"},
        trust_remote_code=model.trust_remote_code,
    )


def _pad_token(settings: RewardModel, network: Any, tokenizer: Any) -> int:
    """Return the padding token of a model; one without takes its tokenizer's, as users of transformers do."""
    text = network.config.get_text_config()
    if text.pad_token_id is None:
        network.config.pad_token_id = text.pad_token_id = tokenizer.pad_token_id
    if text.pad_token_id is None:
        raise unfit(settings, "no padding token", "pad_token_id in its config.json")
    return int(text.pad_token_id)
