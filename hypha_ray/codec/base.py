"""The seam between worker, wire and parameter server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from hypha_ray.types import Flat

if TYPE_CHECKING:
    import torch


class Form(NamedTuple):
    """Form of an array in a payload: numpy's name of its dtype, and its number of elements or the most."""

    dtype: str
    size: int
    exact: bool = True


class Codec(Protocol):
    """A payload encoding; it has no state of its own."""

    name: str
    yields: Literal["weights", "deltas"]
    """Result of `decode` for parameters: the worker's weights w, or their difference w − θ."""

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        """Describe the payload of a fragment with these groups and sizes (`Layout.groups`)."""
        ...

    def decode(self, payload: Mapping[str, torch.Tensor], group: str, part: slice) -> torch.Tensor:
        """Decode elements of a group; the result may be a view of the payload, so it must not be written to.

        Args:
            payload: its arrays, as `form` has them.
            group: which one.
            part: all of it, or one of its `blocks`.

        """
        ...


@dataclass(slots=True)
class Quality:
    """Error of payloads, as sums of squares and products."""

    target: float = 0.0
    decoded: float = 0.0
    product: float = 0.0
    difference: float = 0.0

    def take(self, target: torch.Tensor, decoded: torch.Tensor, difference: torch.Tensor) -> None:
        """Count a block."""
        self.target += _dot(target, target)
        self.decoded += _dot(decoded, decoded)
        self.product += _dot(target, decoded)
        self.difference += _dot(difference, difference)

    def __add__(self, other: Quality) -> Quality:
        sums = (self.target + other.target, self.decoded + other.decoded)
        return Quality(*sums, self.product + other.product, self.difference + other.difference)

    @property
    def error(self) -> float:
        """L2 norm of what is lost, over that of what was to be sent."""
        return math.sqrt(self.difference / self.target) if self.target > 0 else 0.0

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both; 1 if there is nothing to be lost."""
        return self.product / math.sqrt(self.target * self.decoded) if self.target and self.decoded else 1.0


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    """Product of two vectors, taken anew where overflow or underflow may have spoilt it in fp32."""
    from hypha_ray.kernels import SMALL  # With it comes torch, which not every importer needs.

    quick = float(one.dot(other))
    return quick if SMALL < abs(quick) < math.inf else float(one.double().dot(other.double()))


class Encoder(Protocol):
    """Makes a sender's payloads of one fragment, round after round."""

    residual: Flat
    """Encoding error so far, by group, which later payloads make up for."""

    def encode(self, values: Flat, theta: Flat | None) -> tuple[Flat, Quality]:
        """Encode a round's result.

        Args:
            values: weights, if there is θ; or else what is to be sent itself, such as a gradient.
            theta: the global weights that the round began with.

        Returns:
            The payload, which may share memory with `values`; and how good it is.

        """
        ...


def encoded(encoders: Sequence[Encoder], values: Sequence[Flat], theta: Sequence[Flat]) -> tuple[list[Flat], Quality]:
    """The payloads of all fragments, and how good they are.

    Args:
        encoders: one for each fragment.
        values: what was trained, or what is to be sent itself.
        theta: global weights, if the values are weights and differences to θ are to be sent; or else nothing.

    """
    bases: Sequence[Flat | None] = theta or [None] * len(values)
    parts = [one.encode(flat, base) for one, flat, base in zip(encoders, values, bases, strict=True)]
    return [payload for payload, _ in parts], sum((quality for _, quality in parts), Quality())


def payload_bytes(payload: Flat) -> int:
    """Size of a payload on the wire, in bytes."""
    return sum(array.nbytes for array in payload.values())
