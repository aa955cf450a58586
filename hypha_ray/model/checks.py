"""Checks of a model: of the longest sequence that it takes, and of one that isn't built, on a small copy of it.

The longest sequence is read off the modules instead of the configuration. Families have many names for the limit,
reserve positions for padding, or name a limit without effect, as models with rotary positions do. Only a table of
positions that are looked up limits anything.

A small copy has fewer and narrower layers, with random weights. Most families share the names of their sizes. If a
family requires other relations of its sizes, a copy can't be built, and the next larger one is tried.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.errors import ConfigError, DataError, HyphaError, reason_of
from hypha_ray.files import uncollected
from hypha_ray.model.task import Task

_TABLE: Final = re.compile(r"(^|\.)(wpe|positions_embed|embed_positions|position_embeddings?|pos_emb)$")
_OF_IMAGES: Final = re.compile(r"vision|visual|image|audio|speech")
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
_SMALL_WIDTH = 64
"""Width of a narrow copy's feed-forward layers."""
BUDGET = 500_000_000
"""Number of parameters of the largest copy that is built."""
SMALL = 3_000_000
"""Number of parameters up to which a model is checked itself, not a smaller copy."""
Build = Callable[[Any], Any]


def max_positions(model: torch.nn.Module, *, decoder: bool) -> int | None:
    """Return the number of tokens that a model has positions for; None: unlimited.

    Args:
        model: model with or without weights.
        decoder: ask the decoder of an encoder-decoder, which is given the labels, instead of the encoder.

    """
    config = getattr(model, "config", None)
    is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    if decoder and not is_encoder_decoder:
        return None
    sizes: list[int] = []
    for name, size in _tables(model):
        is_of_decoder = "decoder" in name.split(".")
        if not is_encoder_decoder or decoder == is_of_decoder:
            sizes.append(size)
    return min(sizes, default=None)


def require_positions(
    model: torch.nn.Module, task: Task, shapes: Mapping[str, tuple[int, ...]], subject: str, response: int = 0
) -> None:
    """Refuse sequences that are longer than the model has positions for.

    Args:
        model: model with or without weights.
        task: task of the model.
        shapes: shape of one sample of each tensor of the dataset.
        subject: words for the dataset, such as ``dataset 'texts'``.
        response: largest number of tokens that the model adds to each sequence.

    Raises:
        DataError: sequences are longer.

    """
    limits = [("input_ids", max_positions(model, decoder=False))]
    if task.labels == "positions":
        limits += [("labels", max_positions(model, decoder=True))]
    for name, limit in limits:
        *_, longest = shapes.get(name) or (0,)
        if limit is not None and longest + response > limit:
            problem = f"the sequences of {subject} are too long for the model"
            fix = "prepare the dataset with a shorter --seq-len, or give the model more positions"
            if response:
                problem = f"{problem} with a response of {response} tokens"
                fix = f"allow shorter responses, {fix}"
            raise DataError("DATA024", problem, f"{longest + response} tokens", f"up to {limit}", fix)


def _tables(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """Return the name of each table, and the number of tokens that it has positions for."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and _TABLE.search(name) and not _OF_IMAGES.search(name):
            offset = getattr(module, "offset", None)
            if not isinstance(offset, int):
                offset = 0
                if module.padding_idx is not None:  # RoBERTa's positions begin behind that of padding.
                    offset = module.padding_idx + 1
            yield name, module.num_embeddings - offset
    for name, buffer in model.named_buffers():
        if name.endswith("embed_positions") and buffer.ndim == 2 and not _OF_IMAGES.search(name):
            yield name, buffer.shape[0]


def token_counts(arrays: Mapping[str, npt.NDArray[np.generic]]) -> npt.NDArray[np.int64]:
    """Tokens of each sample without padding, [N].

    In packed samples, which have no `attention_mask`, positions count from 0 in each sequence, and are 0 at padding.
    A sequence has two tokens at least, so the number of its ones is that of its beginnings.
    """
    tokens = arrays["input_ids"]
    if "attention_mask" in arrays:
        is_token = arrays["attention_mask"].astype(np.int64)
    elif "position_ids" in arrays:
        positions = arrays["position_ids"].astype(np.int64)
        is_token = (positions > 0).astype(np.int64) + (positions == 1)
    else:
        is_token = np.ones(tokens.shape, np.int64)
    by_sample = is_token.reshape(len(tokens), -1)
    return np.asarray(by_sample.sum(axis=1), np.int64)


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
        small_config = copy.deepcopy(config)
        _shrink(small_config, plan)
        for name in getattr(type(small_config), "sub_configs", {}):
            part = getattr(small_config, name, None)
            if hasattr(part, "__dict__"):
                _shrink(part, plan)
        yield small_config


def _shrink(config: Any, plan: _Plan) -> None:
    """Reduce layers and experts of a configuration, and its widths if the plan does."""
    sizes = {name: value for name, value in vars(config).items() if type(value) is int and value > 0}
    layers = {name: value for name, value in sizes.items() if name in _LAYERS}
    for name, value in list(vars(config).items()):
        if name in layers:
            setattr(config, name, min(value, plan.layers))
        elif isinstance(value, list | tuple) and len(value) > plan.layers and len(value) in layers.values():
            setattr(config, name, _select_layers(value, plan.layers))
        elif name in _EXPERTS and plan.experts and name in sizes:
            setattr(config, name, min(value, plan.experts))
    if plan.head or plan.own_width:
        _narrow(config, sizes, plan)


def _narrow(config: Any, sizes: dict[str, int], plan: _Plan) -> None:
    """Reduce the widths of a configuration, and its heads if the plan does."""
    heads = {name: value for name, value in sizes.items() if name in _HEADS}
    divisor = max(1, math.gcd(*heads.values()) // 2) if plan.heads else 1
    width = _SMALL_WIDTH
    if heads:
        most_heads = math.lcm(*heads.values()) // divisor
        width = most_heads * (plan.head or 0)
    if plan.own_width:
        width = 2 * _SMALL_WIDTH
    for name, value in sizes.items():
        if name in heads:
            setattr(config, name, value // divisor)
        elif name in _HIDDEN:
            setattr(config, name, min(value, width))
        elif name in _INNER:
            setattr(config, name, min(value, _SMALL_WIDTH))
        elif name == "head_dim" and plan.head:
            setattr(config, name, min(value, plan.head))
    for count, head, factor, groups in _MAMBA:
        if {count, head, factor, groups} <= vars(config).keys() and "mamba_d_ssm" not in vars(config):
            inner_width = getattr(config, factor) * config.hidden_size
            setattr(config, count, inner_width // getattr(config, head))
            setattr(config, groups, 1)


def _select_layers(kinds: Any, count: int) -> Any:
    """Return `count` entries of a list with one for each layer, every kind of layer among them if possible."""
    first_of_kinds: list[int] = []
    repeated_rows: list[int] = []
    for index, kind_name in enumerate(kinds):
        if kind_name in kinds[:index]:
            repeated_rows.append(index)
        else:
            first_of_kinds.append(index)
    selected = sorted((first_of_kinds + repeated_rows)[:count])
    return type(kinds)(kinds[index] for index in selected)


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
    for candidate in _candidates(config, parameters):
        with _silent():
            try:
                check(_build(candidate, build))
            except HyphaError:
                raise
            except Exception as error:  # The next one is more like the model itself.
                if candidate is config:
                    raise unusable_error(error) from error
            else:
                return True
    return False


@contextmanager
def evaluating(network: Any) -> Iterator[None]:
    """Context in which a model is in evaluation mode, without gradients."""
    training = network.training
    network.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        network.train(training)


def _candidates(config: Any, parameters: int) -> Iterator[Any]:
    """Return the configurations to try: copies of a large model, then its own unless that is too large to build."""
    if parameters > SMALL:
        yield from small_copies(config)
    if parameters <= BUDGET:
        yield config


def _build(config: Any, build: Build) -> Any:
    """Build a model with random weights only: the zeros that some families begin with would hide every difference."""
    with torch.device("meta"):
        sketch = build(config)
    parameter_count = sum(parameter.numel() for parameter in sketch.parameters())
    if parameter_count > BUDGET:
        raise ValueError(f"{parameter_count} parameters")
    with torch.random.fork_rng(devices=[]), uncollected():
        torch.manual_seed(0)
        network = build(config)
        network = network.float().eval()
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.ndim > 1:
                    inputs = parameter[0].numel()
                    parameter.add_(torch.randn_like(parameter), alpha=inputs**-0.5)
    return network


@contextmanager
def _silent() -> Iterator[None]:
    """Silence transformers' remarks about a copy, which the user doesn't know."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def unusable_error(failure: Exception) -> ConfigError:
    """Return the error for a model that fails on the dataset's samples."""
    return ConfigError(
        "MODEL017",
        "the model can't be run on samples of the dataset",
        reason_of(failure),
        fix="choose another model or model.type, or prepare the dataset for this one",
    )
