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

    def merge(values: Iterable[torch.Tensor], room: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = rule([value.clone() for value in values], list(weights))
        if result.shape != room.shape:
            raise ValueError(f"{name} gave shape {tuple(result.shape)} for {tuple(room.shape)}")
        return room.copy_(result)

    return merge


def own_weights(name: str, options: Mapping[str, Any] | None, samples: Sequence[int]) -> list[float]:
    """Weights by a user's function of the deltas' samples.

    Raises:
        ConfigError: the function can't be had.
        ValueError: it gave no weights.

    """
    weights = [float(weight) for weight in create("weightings", name, options)(list(samples))]
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

    deltas = [torch.randn(8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for count in (1, 3):
        merge = own_merge(name, options, [1.0, 2.0, 3.0][:count])
        whole = merge(deltas[:count], torch.empty(8)).clone()
        parts = [merge([delta[part] for delta in deltas[:count]], torch.empty(8)[part]).clone() for part in _HALVES]
        if not torch.isfinite(whole).all():
            raise ValueError("finite deltas are merged to values that aren't")
        if not torch.equal(whole, torch.cat(parts)):
            raise ValueError("the rule depends on other elements of the deltas than the merged one")


_HALVES = (slice(0, 3), slice(3, 8))


def try_weighting(name: str, options: Mapping[str, Any] | None) -> None:
    """Weigh one delta, equal ones, and different ones.

    Raises:
        ValueError: they have no weights.

    """
    for samples in ([1], [4, 4], [3, 5, 2]):
        own_weights(name, options, samples)
