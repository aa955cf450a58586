"""Check of a model's generation, before it is trained on what it generates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hypha_ray.config.tables.rl import RL
from hypha_ray.errors import ConfigError
from hypha_ray.model.trained import Critic
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
    sampling = replace(training_sampling(rl), samples=1)
    sampling = replace(sampling, max_tokens=min(_TOKENS, sampling.max_tokens))
    if rl.has_critic:
        _check_critic(model, prompts)
    ids, mask = (torch.from_numpy(prompts.arrays[name]) for name in ("input_ids", "attention_mask"))
    policy = Policy(model, rl.generation.temperature, None, vocabulary_of(tokenizer))
    sampling = replace(sampling, vocabulary=policy.vocabulary)
    ends = end_tokens(model, tokenizer)
    if rl.generation.engine == "continuous":
        found = ContinuousEngine(0, short=0).generate(model, ids, mask, prompts.keys, sampling, ends)
    else:
        found = generate(model, ids, mask, draw(0, prompts.keys, sampling), sampling, ends)
    for row in range(len(prompts)):
        alone = _alone(found, row)
        gap = float((policy.logprobs(alone) - alone.logprobs).abs().max())
        if not gap <= _CLOSE:
            what = (
                f"{type(model).__name__} can't be trained on what it generates: padding or cache change probabilities"
            )
            raise ConfigError(
                "RL005", what, f"log-probabilities {gap:.2g} apart", f"up to {_CLOSE:g}", "choose another model"
            )


@torch.no_grad()
def _check_critic(model: Any, prompts: Samples) -> None:
    """Value the states of some prompts."""
    ids, mask = (torch.from_numpy(prompts.arrays[name]).long() for name in ("input_ids", "attention_mask"))
    Critic(model)(input_ids=ids, attention_mask=mask, use_cache=False)


def _alone(found: Responses, row: int) -> Responses:
    """Return a response without any padding."""
    kept = found.attention_mask[row].bool()
    tokens = found.mask[row].bool()
    ids = found.ids[row][kept][None]
    logprobs = found.logprobs[row][tokens][None]
    return Responses(ids, torch.ones_like(ids), torch.ones_like(logprobs), logprobs, found.ended[row : row + 1])
