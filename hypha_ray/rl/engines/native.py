"""Generation by the trained model itself, so that its log-probabilities are those of the training pass."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from hypha_ray.rl.engines.reserved_cache import reserve
from hypha_ray.rl.engines.sampling import Sampling, choose

_LONG = 32
"""Number of tokens from which on memory for a whole response is reserved: shorter ones don't make up for it."""


@dataclass(frozen=True, slots=True)
class Responses:
    """Responses to a batch of prompts; those to one prompt are neighbours."""

    ids: torch.Tensor
    """Token ids of prompt and response, int64 [responses, prompt + response]; prompts are padded on the left."""
    attention_mask: torch.Tensor
    """Mask of these tokens without padding, of the same shape."""
    mask: torch.Tensor
    """Mask of the response's tokens, the end token included, float32 [responses, response]."""
    logprobs: torch.Tensor
    """Log-probabilities of the response's tokens when they were sampled, float32 [responses, response]."""
    ended: torch.Tensor
    """Flags of responses that the model ended itself, bool [responses]."""

    @property
    def prompt_width(self) -> int:
        """Number of columns of the padded prompts."""
        return self.ids.shape[1] - self.mask.shape[1]


@torch.no_grad()
def generate(
    model: Any,
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    uniform: torch.Tensor,
    sampling: Sampling,
    ends: Collection[int],
) -> Responses:
    """Sample responses until each has ended or is as long as allowed.

    Args:
        model: the trained model, in evaluation mode.
        ids: prompts padded on the left, [prompts, width], on the model's device.
        attention_mask: mask of their tokens, of the same shape.
        uniform: random numbers as `draw` gives them, on the same device.
        sampling: settings.
        ends: ids of tokens that end a response.

    """
    ids, mask = (one.long().repeat_interleave(sampling.samples, 0) for one in (ids, attention_mask))
    end_ids = torch.tensor(sorted(ends), device=ids.device)
    pad = min(ends)
    alive = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    cache = None
    fed = ids
    logprobs = []
    masks = []
    for place in range(sampling.max_tokens):
        logits, cache = _next_logits(model, fed, mask, cache)
        if not place and sampling.max_tokens >= _LONG:
            reserve(cache, sampling.max_tokens - 1)
        chosen, logprob = choose(logits, uniform[:, place], sampling)
        chosen = torch.where(alive, chosen, pad)
        masks.append(alive)
        logprobs.append(logprob * alive)
        alive = alive & ~torch.isin(chosen, end_ids)
        ids = torch.cat([ids, chosen[:, None]], 1)
        mask = torch.cat([mask, masks[-1][:, None].long()], 1)
        fed = ids if cache is None else chosen[:, None]
        if not alive.any():
            break
    return Responses(ids, mask, torch.stack(masks, 1).float(), torch.stack(logprobs, 1), ~alive)


def _next_logits(model: Any, fed: torch.Tensor, mask: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """Return the logits after the last token, and the cache with it; None for a model that has none of this kind."""
    places = positions(mask)[:, -fed.shape[1] :]
    options = accepted(model, places, 1)
    output = model(input_ids=fed, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
    return output.logits[:, -1].float(), getattr(output, "past_key_values", None)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Positions of tokens in rows that are padded on the left."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def accepted(model: Any, places: torch.Tensor, keep: int) -> dict[str, Any]:
    """Return those of the keywords for positions and for the number of last logits that a model's forward has."""
    takes = inspect.signature(model.forward).parameters
    return {name: value for name, value in (("position_ids", places), ("logits_to_keep", keep)) if name in takes}
