"""Check of a model's generation, before it is trained on what it generates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hypha_ray.config.tables.rl import RL
from hypha_ray.errors import ConfigError
from hypha_ray.model.trained import CriticModel
from hypha_ray.model.vocabulary import vocabulary_of
from hypha_ray.rl.engines.continuous import ContinuousEngine
from hypha_ray.rl.engines.native import Responses, generate
from hypha_ray.rl.engines.sampling import draw, training_sampling
from hypha_ray.rl.policy import Policy, end_tokens
from hypha_ray.types import Samples

_TOKENS = 8
"""Largest number of tokens of a response."""
_CLOSE = 1e-3
"""Largest difference of two log-probabilities that are equal but for rounding."""


def check_generation(model: Any, rl: RL, tokenizer: Any, prompts: Samples) -> None:
    """Compare log-probabilities at generation with those of each response by itself, without padding and cache.

    Raises:
        ConfigError: RL005, they differ: the model can't be trained on what it generates. RL014, the algorithm needs a
            critic, and none can be made of the model. RL026, the model can't generate by continuous batching.

    """
    sampling = training_sampling(rl)
    tokens = min(_TOKENS, sampling.max_tokens)
    if rl.has_critic:
        _check_critic(model, prompts)
    ids = torch.from_numpy(prompts.arrays["input_ids"])
    mask = torch.from_numpy(prompts.arrays["attention_mask"])
    policy = Policy(model, rl.generation.temperature, None, vocabulary_of(tokenizer))
    sampling = replace(sampling, samples=1, max_tokens=tokens, vocabulary=policy.vocabulary)
    ends = end_tokens(model, tokenizer)
    if rl.generation.engine == "continuous":
        responses = ContinuousEngine(0, short=0).generate(model, ids, mask, prompts.keys, sampling, ends)
    else:
        responses = generate(model, ids, mask, draw(0, prompts.keys, sampling), sampling, ends)
    for row in range(len(prompts)):
        response = _without_padding(responses, row)
        distances = (policy.logprobs(response) - response.logprobs).abs()
        largest = float(distances.max())
        if not largest <= _CLOSE:
            name = type(model).__name__
            raise ConfigError(
                "RL005",
                f"{name} can't be trained on what it generates: padding or cache change probabilities",
                f"log-probabilities {largest:.2g} apart",
                f"up to {_CLOSE:g}",
                "choose another model",
            )


@torch.no_grad()
def _check_critic(model: Any, prompts: Samples) -> None:
    """Value the states of some prompts."""
    ids = torch.from_numpy(prompts.arrays["input_ids"]).long()
    mask = torch.from_numpy(prompts.arrays["attention_mask"]).long()
    CriticModel(model)(input_ids=ids, attention_mask=mask, use_cache=False)


def _without_padding(responses: Responses, row: int) -> Responses:
    """Return a response without any padding."""
    all_tokens = responses.attention_mask[row].bool()
    response_tokens = responses.mask[row].bool()
    ids = responses.ids[row][all_tokens][None]
    logprobs = responses.logprobs[row][response_tokens][None]
    ended = responses.ended[row : row + 1]
    return Responses(ids, torch.ones_like(ids), torch.ones_like(logprobs), logprobs, ended)
