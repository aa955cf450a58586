"""Cache of keys and values with memory reserved for a whole response, so that a token isn't paid with a copy of all."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer


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
