"""Weights that Muon takes: matrices of a model's body, by themselves or as lists of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

MATRICES = "matrices"
"""Kind of the parameters that Muon takes."""
_TRANSPOSED = {"Llama4TextExperts"}
"""Classes whose experts have inputs for rows, and don't say so."""


def muon_weights(model: nn.Module) -> dict[int, bool]:
    """Find the weights that Muon takes, as its author advises (Jordan 2024).

    They are the matrices of a model's body that are neither embeddings nor its head. A tensor of three dimensions has
    one for each expert. AdamW gets the rest.

    Returns:
        By the id of a parameter, whether rows of its matrices are inputs.

    """
    from transformers.pytorch_utils import Conv1D

    body: Any = getattr(model, "base_model", model)
    tables = _tables(model, body)
    sideways_by_id: dict[int, bool] = {}
    for module in body.modules():
        experts = list(_experts(module))
        if experts:  # What else is there are biases, of two dimensions.
            sideways = bool(getattr(module, "is_transposed", type(module).__name__ in _TRANSPOSED))
            sideways_by_id |= {id(parameter): sideways for parameter in experts}
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 2 and id(parameter) not in tables:
                sideways_by_id[id(parameter)] = isinstance(module, Conv1D)
    return sideways_by_id


def _tables(model: Any, body: nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings and head."""
    outer = [module for module in body.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None:
        outer.append(head)
    return {id(parameter) for module in outer for parameter in module.parameters()}


def _experts(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters of a module that have a matrix for each of its experts."""
    count = getattr(module, "num_experts", None)
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 3 and parameter.shape[0] == count:
            yield parameter


def shares(model: nn.Module) -> dict[str, int]:
    """Count the trained parameters of a model by kind; Muon takes the matrices, and AdamW the others."""
    body: Any = getattr(model, "base_model", model)
    taken = muon_weights(model)
    tables = _tables(model, body)
    counts = dict.fromkeys((MATRICES, "embeddings and head", "vectors", "other tensors"), 0)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in taken:
            kind = MATRICES
        elif id(parameter) in tables:
            kind = "embeddings and head"
        else:
            kind = "vectors" if parameter.ndim < 2 else "other tensors"
        counts[kind] += parameter.numel()
    return {kind: count for kind, count in counts.items() if count}
