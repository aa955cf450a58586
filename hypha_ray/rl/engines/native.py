"""Generation by the trained model itself, so that its log-probabilities are those of the training pass."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hypha_ray.rl.engines.sampling import Sampling, choose

_LONG = 32
"""Least number of tokens for which memory for a whole response is reserved: shorter responses gain nothing by it."""


class ReservedLayer(DynamicLayer):  # type: ignore[misc]
    """Layer whose keys and values are views of the beginning of larger buffers.

    Args:
        filled: layer with the keys and values of prompts.
        tokens: number of tokens that may follow.

    """

    def __init__(self, filled: DynamicLayer, tokens: int) -> None:
        super().__init__()
        self.lazy_initialization(filled.keys, filled.values)
        self._key_buffer = _enlarged(filled.keys, tokens)
        self._value_buffer = _enlarged(filled.values, tokens)
        self._set_views(filled.keys.shape[-2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of further tokens, and return all."""
        before = self.get_seq_length()
        after = before + key_states.shape[-2]
        self._key_buffer[..., before:after, :] = key_states
        self._value_buffer[..., before:after, :] = value_states
        self._set_views(after)
        return self.keys, self.values

    def _set_views(self, length: int) -> None:
        self.keys = self._key_buffer[..., :length, :]
        self.values = self._value_buffer[..., :length, :]


def reserve(cache: Any, tokens: int) -> None:
    """Reserve memory for further tokens in the layers of a cache that are copied for each token otherwise.

    Layers of other kinds, such as those with a sliding window, stay as they are. So do all layers on a GPU, where the
    gain hasn't been measured.
    """
    layers = getattr(cache, "layers", [])
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer and layer.is_initialized and layer.keys.device.type == "cpu":
            layers[index] = ReservedLayer(layer, tokens)


def _enlarged(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a buffer that begins with these states."""
    *outer, length, width = states.shape
    buffer = states.new_empty(*outer, length + tokens, width)
    buffer[..., :length, :] = states
    return buffer


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
    ids = ids.long().repeat_interleave(sampling.samples, 0)
    mask = attention_mask.long().repeat_interleave(sampling.samples, 0)
    end_ids = torch.tensor(sorted(ends), device=ids.device)
    pad = min(ends)
    alive = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    cache = None
    inputs = ids
    logprobs: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    for step in range(sampling.max_tokens):
        logits, cache = _next_logits(model, inputs, mask, cache)
        if step == 0 and sampling.max_tokens >= _LONG:
            reserve(cache, sampling.max_tokens - 1)
        chosen, logprob = choose(logits, uniform[:, step], sampling)
        chosen = torch.where(alive, chosen, pad)
        masks.append(alive)
        logprobs.append(logprob * alive)
        ids = torch.cat([ids, chosen[:, None]], 1)
        mask = torch.cat([mask, alive[:, None].long()], 1)
        inputs = ids if cache is None else chosen[:, None]
        alive = alive & ~torch.isin(chosen, end_ids)
        if not alive.any():
            break
    return Responses(
        ids=ids,
        attention_mask=mask,
        mask=torch.stack(masks, 1).float(),
        logprobs=torch.stack(logprobs, 1),
        ended=~alive,
    )


def _next_logits(model: Any, inputs: torch.Tensor, mask: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """Return the logits after the last token, and the cache with that token; None for a model without such a cache."""
    position_ids = positions(mask)[:, -inputs.shape[1] :]
    options = accepted(model, position_ids, 1)
    output = model(input_ids=inputs, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
    logits = output.logits[:, -1]
    return logits.float(), getattr(output, "past_key_values", None)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Positions of tokens in rows that are padded on the left."""
    before = mask.cumsum(1) - 1
    return before.clamp(min=0)


def accepted(model: Any, position_ids: torch.Tensor, logits_to_keep: int) -> dict[str, Any]:
    """Return the keywords for positions and for the number of last logits, as far as a model's forward has them."""
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {}
    if "position_ids" in parameters:
        options["position_ids"] = position_ids
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = logits_to_keep
    return options
