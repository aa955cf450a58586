"""Checks of a model that isn't built, on a small copy of it: fewer and narrower layers, with random weights.

Most families share the names of their sizes. If a family's sizes have to fit each other in another way, a copy
can't be built, and the next, larger one is tried.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch

from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.heavy_imports import uncollected

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


BUDGET = 500_000_000
"""Number of parameters of the largest copy that is built."""
SMALL = 3_000_000
"""Number of parameters up to which a model is checked itself, not a smaller copy."""

Build = Callable[[Any], Any]


def check_on_copy(check: Callable[[Any], None], config: Any, build: Build, parameters: int) -> bool:
    """Run a check on the smallest copy that can be built, and that it can be run on.

    Args:
        check: function of a model in evaluation mode; it raises an error of ours if the model is to be refused.
        config: configuration of the model.
        build: function that makes a model from a configuration.
        parameters: number of the model's parameters.

    Returns:
        Whether a copy could be built and checked.

    Raises:
        ConfigError: whatever the check raises, or MODEL017, the model can't be run on the samples.

    """
    copies = iter(()) if parameters <= SMALL else small_copies(config)
    for candidate in chain(copies, [config] if parameters <= BUDGET else []):
        with _silent():
            try:
                check(_build(candidate, build))
            except HyphaError:
                raise
            except Exception as error:  # The next one is more like the model itself.
                if candidate is config:
                    raise unusable(error) from error
            else:
                return True
    return False


def _build(config: Any, build: Build) -> Any:
    """Build a model with random weights only: the zeros that some families begin with would hide every difference."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build(config).parameters())
    if size > BUDGET:
        raise ValueError(f"{size} parameters")
    with torch.random.fork_rng(devices=[]), uncollected():
        torch.manual_seed(0)
        network = build(config).float().eval()
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.ndim > 1:
                    parameter.add_(torch.randn_like(parameter), alpha=parameter[0].numel() ** -0.5)
    return network


@contextmanager
def _silent() -> Iterator[None]:
    """Silence transformers' remarks about a copy that the user never asked for."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def unusable(failure: Exception) -> ConfigError:
    """Return the error for a model that fails on the dataset's samples."""
    line = f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:300]
    return ConfigError(
        "MODEL017",
        "the model can't be run on samples of the dataset",
        line,
        fix="choose another model or model.type, or prepare the dataset for this one",
    )
