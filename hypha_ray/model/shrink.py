"""A small model of the same making: fewer layers and narrower ones, to try on any machine what a large one computes.

Each size of a configuration has a name that most families share. Where a family wants its sizes to fit each other in a
way that isn't known here, a less small copy is tried, and the model itself if it is small enough.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

_LAYERS = frozenset(
    {
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_encoder_layers",
        "encoder_layers", "decoder_layers", "depth",
    }
)  # fmt: skip
_HIDDEN = frozenset({"hidden_size", "n_embd", "d_model", "dim", "n_embed", "embedding_size", "word_embed_proj_dim"})
_HEADS = frozenset(
    {
        "num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads",
        "num_key_value_heads",
    }
)  # fmt: skip
_INNER = frozenset(
    {
        "intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim",
        "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size",
    }
)  # fmt: skip
_EXPERTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts"})
_LAYERS_KEPT = 4
_EXPERTS_KEPT = 8
_HEAD = 16
"""Width of a head of a small copy."""
_INNER_KEPT = 64


def smaller(config: Any) -> Iterator[Any]:
    """Return ever less small copies of a configuration; not all of them need make a model."""
    for wide in (False, True):
        yield _shrunk(config, wide)


def _shrunk(config: Any, wide: bool) -> Any:
    """Return a copy with few layers, and with narrow ones unless `wide`."""
    small = copy.deepcopy(config)
    for part in (small, *(getattr(small, name, None) for name in getattr(type(small), "sub_configs", {}))):
        if part is not None and hasattr(part, "__dict__"):
            _shrink(part, wide)
    return small


def _shrink(part: Any, wide: bool) -> None:
    sizes = {name: value for name, value in vars(part).items() if type(value) is int and value > 0}
    layers = {name: value for name, value in sizes.items() if name in _LAYERS}
    for name, value in layers.items():
        setattr(part, name, min(value, _LAYERS_KEPT))
    for name, value in vars(part).items():
        if isinstance(value, list | tuple) and len(value) > _LAYERS_KEPT and len(value) in layers.values():
            setattr(part, name, _some(value))
    for name, value in sizes.items():
        if name in _EXPERTS:
            setattr(part, name, min(value, _EXPERTS_KEPT))
    if wide:
        return
    heads = {name: value for name, value in sizes.items() if name in _HEADS}
    fewer = max(1, math.gcd(*heads.values()) // 2)
    width = math.lcm(*heads.values()) // fewer * _HEAD if heads else _INNER_KEPT
    for name, value in sizes.items():
        if name in heads:
            setattr(part, name, value // fewer)
        elif name in _HIDDEN:
            setattr(part, name, min(value, width))
        elif name in _INNER:
            setattr(part, name, min(value, _INNER_KEPT))
        elif name == "head_dim":
            setattr(part, name, min(value, _HEAD))


def _some(kinds: Any) -> Any:
    """Return as many entries of a list with one for each layer as are kept, every kind among the first of them."""
    first = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    kept = sorted((first + [index for index in range(len(kinds)) if index not in first])[:_LAYERS_KEPT])
    return type(kinds)(kinds[index] for index in kept)
