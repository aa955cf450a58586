"""Generation by the trained model itself, so that its log-probabilities are those of the training pass."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hypha_ray.rl.engines.sampling import Sampling, choose


class ReservedLayer(DynamicLayer):  # type: ignore[misc]
    """Layer whose keys and values lie at the beginning of larger buffers; attention sees views without the rest.

    Args:
        filled: layer with the keys and values of prompts.
        tokens: number of tokens that may follow.

    """

    def __init__(self, filled: DynamicLayer, tokens: int) -> None:
        super().__init__()
        self.lazy_initialization(filled.keys, filled.values)
        self._buffers = tuple(_with_room(states, tokens) for states in (filled.keys, filled.values))
        self._show(filled.keys.shape[-2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of further tokens, and return all."""
        before = self.get_seq_length()
        after = before + key_states.shape[-2]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., before:after, :] = states
        self._show(after)
        return self.keys, self.values

    def _show(self, length: int) -> None:
        self.keys, self.values = (buffer[..., :length, :] for buffer in self._buffers)


def reserve(cache: Any, tokens: int) -> None:
    """Reserve memory for further tokens in layers of a cache that would be copied for each of them.

    Layers of other kinds, such as those with a sliding window, stay as they are. So do all layers on a GPU, where the
    gain hasn't been measured.
    """
    layers = getattr(cache, "layers", [])
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer and layer.is_initialized and layer.keys.device.type == "cpu":
            layers[index] = ReservedLayer(layer, tokens)


def _with_room(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a buffer that begins with these states."""
    *outer, length, width = states.shape
    buffer = states.new_empty(*outer, length + tokens, width)
    buffer[..., :length, :] = states
    return buffer


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
