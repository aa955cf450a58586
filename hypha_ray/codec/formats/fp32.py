"""32-bit floats: weights unchanged to the bit, or their differences to θ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np

from hypha_ray.codec.base import Form, Quality
from hypha_ray.types import Flat
from hypha_ray.types.layout import dtype_of, is_trained

if TYPE_CHECKING:
    import torch


class Fp32:
    """Codec whose payload is the worker's weights, in their master dtypes.

    It isn't their difference to θ: θ + (w − θ) is not w in floating point, so one worker with η = 1 and μ = 0 would not
    be plain training bit for bit.
    """

    name: str = "fp32"
    yields: Literal["weights", "deltas"] = "weights"

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        """Describe one array for each group, of the group's own dtype."""
        return {group: Form(dtype_of(group), size) for group, size in groups.items()}

    def decode(
        self, payload: Mapping[str, torch.Tensor], group: str, part: slice, theta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a view of the payload."""
        return payload[group][part]


class Unchanged:
    """Encoder of a codec without an encoding error."""

    def __init__(self) -> None:
        self.residual: Flat = {}

    def encode(self, values: Flat, theta: Flat | None, last: bool = False) -> tuple[Flat, Quality]:
        """Return the arrays themselves, without a copy."""
        return dict(values), Quality()


class Fp32Differences(Fp32):
    """Codec whose payload is the difference of the worker's weights to the θ that it began with."""

    yields: Literal["weights", "deltas"] = "deltas"


class Subtraction(Unchanged):
    """Encoder of `Fp32Differences`."""

    def encode(self, values: Flat, theta: Flat | None, last: bool = False) -> tuple[Flat, Quality]:
        """Subtract θ from the weights, in place."""
        for group, array in values.items():
            if theta is not None and is_trained(group):
                np.subtract(array, theta[group], out=array)
        return dict(values), Quality()
