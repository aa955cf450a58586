"""Small copies of a configuration, with fewer and narrower layers, to check on any machine what a large model computes.

Most families share the names of their sizes. If a family's sizes have to fit each other in another way, a copy
can't be built, and the caller tries the next, larger one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

_LAYERS = frozenset(
    {
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_encoder_layers",
        "encoder_layers", "decoder_layers", "depth",
    }
)  # fmt: skip
_HIDDEN = frozenset(
    {
        "hidden_size", "n_embd", "d_model", "dim", "n_embed", "embedding_size", "word_embed_proj_dim",
        "attention_hidden_size",
    }
)  # fmt: skip
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
_MAMBA = (
    ("num_heads", "head_dim", "expand", "n_groups"),
    ("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_n_groups"),
)
"""Mamba-2's number of heads, width of a head, ratio of the inner width to the layers', and number of groups."""
_SIZES_KEPT = 64


class _Plan(NamedTuple):
    """Sizes of a copy."""

    layers: int
    """Largest number of layers."""
    experts: int | None = None
    """Largest number of experts; None: all of them."""
    heads: bool = False
    """Heads are reduced, all kinds of heads in proportion."""
    head: int | None = None
    """Width of a head, from which the layers' width follows; None: widths stay."""
    own_width: bool = False
    """The layers' width is independent of the heads'."""


_PLANS = (
    _Plan(layers=4, experts=16, heads=True, head=16),
    _Plan(layers=8, heads=True, head=64),
    _Plan(layers=8, own_width=True),
    _Plan(layers=4, head=64),
    _Plan(layers=2),
)


def small_copies(config: Any) -> Iterator[Any]:
    """Return ever larger copies of a configuration; some of them may make no model."""
    for plan in _PLANS:
        small = copy.deepcopy(config)
        for part in (small, *(getattr(small, name, None) for name in getattr(type(small), "sub_configs", {}))):
            if part is not None and hasattr(part, "__dict__"):
                _shrink(part, plan)
        yield small


def _shrink(part: Any, plan: _Plan) -> None:
    sizes = {name: value for name, value in vars(part).items() if type(value) is int and value > 0}
    layers = {name: value for name, value in sizes.items() if name in _LAYERS}
    for name, value in list(vars(part).items()):
        if name in layers:
            setattr(part, name, min(value, plan.layers))
        elif isinstance(value, list | tuple) and len(value) > plan.layers and len(value) in layers.values():
            setattr(part, name, _some(value, plan.layers))
        elif name in _EXPERTS and plan.experts and name in sizes:
            setattr(part, name, min(value, plan.experts))
    if plan.head or plan.own_width:
        _narrow(part, sizes, plan)


def _narrow(part: Any, sizes: dict[str, int], plan: _Plan) -> None:
    heads = {name: value for name, value in sizes.items() if name in _HEADS}
    fewer = max(1, math.gcd(*heads.values()) // 2) if plan.heads else 1
    width = math.lcm(*heads.values()) // fewer * (plan.head or 0) if heads else _SIZES_KEPT
    for name, value in sizes.items():
        if name in heads:
            setattr(part, name, value // fewer)
        elif name in _HIDDEN:
            setattr(part, name, min(value, 2 * _SIZES_KEPT if plan.own_width else width))
        elif name in _INNER:
            setattr(part, name, min(value, _SIZES_KEPT))
        elif name == "head_dim" and plan.head:
            setattr(part, name, min(value, plan.head))
    for count, head, factor, groups in _MAMBA:
        if {count, head, factor, groups} <= vars(part).keys() and "mamba_d_ssm" not in vars(part):
            setattr(part, count, getattr(part, factor) * part.hidden_size // getattr(part, head))
            setattr(part, groups, 1)


def _some(kinds: Any, count: int) -> Any:
    """Return `count` entries of a list with one for each layer, every kind of layer among them if possible."""
    first = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    kept = sorted((first + [index for index in range(len(kinds)) if index not in first])[:count])
    return type(kinds)(kinds[index] for index in kept)
