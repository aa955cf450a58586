"""Inputs of a reward model: prompt and response in one text, or in the model's chat template."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.config.tables.rewards import MODEL, RewardModel
from hypha_ray.errors import ConfigError, reason_of
from hypha_ray.model.loading.preprocess import load_preprocessor
from hypha_ray.rl.rewards.registry import Tasks, functions_of
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
