"""Merge rules and weightings that users bring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hypha_ray.plugins import create

if TYPE_CHECKING:
    import torch


def own_merge(
    name: str, options: Mapping[str, Any] | None, weights: Sequence[float]
) -> Callable[[Iterable[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Merge by a user's rule: a function of deltas, 1-D and in worker order, and of their weights.

    Raises:
        ConfigError: the rule can't be had.

    """
    rule = create("merge_rules", name, options)

    def merge(values: Iterable[torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
        copies = [value.clone() for value in values]
        merged: torch.Tensor = rule(copies, list(weights))
        if merged.shape != scratch.shape:
            got = tuple(merged.shape)
            raise ValueError(f"{name} gave shape {got} for {tuple(scratch.shape)}")
        return scratch.copy_(merged)

    return merge


def own_weights(name: str, options: Mapping[str, Any] | None, samples: Sequence[int]) -> list[float]:
    """Weights by a user's function of the deltas' samples.

    Raises:
        ConfigError: the function can't be had.
        ValueError: it gave no weights.

    """
    weighting = create("weightings", name, options)
    weights = [float(weight) for weight in weighting(list(samples))]
    whole = len(weights) == len(samples) and sum(weights) > 0
    if not whole or not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"{name} gave {weights} for the samples {list(samples)}: no weights from 0, one for each")
    return weights


def try_merge(name: str, options: Mapping[str, Any] | None) -> None:
    """Merge deltas of one worker and of three, whole and in two blocks, which have to be equal.

    Raises:
        ValueError: the rule depends on other elements than the merged one, or gives values that aren't finite.

    """
    import torch

    all_deltas = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        all_deltas.append(torch.randn(8, generator=generator))
    for count in (1, 3):
        merge = own_merge(name, options, [1.0, 2.0, 3.0][:count])
        deltas = all_deltas[:count]
        whole = merge(deltas, torch.empty(8)).clone()
        parts = []
        for part in _BLOCKS:
            blocks = [delta[part] for delta in deltas]
            merged = merge(blocks, torch.empty(8)[part])
            parts.append(merged.clone())
        if not torch.isfinite(whole).all():
            raise ValueError("finite deltas are merged to values that aren't")
        if not torch.equal(whole, torch.cat(parts)):
            raise ValueError("the rule depends on other elements of the deltas than the merged one")


_BLOCKS = (slice(0, 3), slice(3, 8))


def try_weighting(name: str, options: Mapping[str, Any] | None) -> None:
    """Weigh one delta, equal ones, and different ones.

    Raises:
        ValueError: they have no weights.

    """
    for samples in ([1], [4, 4], [3, 5, 2]):
        own_weights(name, options, samples)
