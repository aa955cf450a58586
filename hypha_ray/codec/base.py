"""Contract of codecs and encoders, between the worker that encodes a delta and the parameter server that decodes it."""

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
    """Encoding of payloads, without a state of its own."""

    name: str
    yields: Literal["weights", "deltas"]
    """Result of `decode` for parameters: the worker's weights w, or their difference w − θ."""

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        """Describe the payload of a fragment with these groups and sizes (`Layout.groups`)."""

    def decode(
        self, payload: Mapping[str, torch.Tensor], group: str, part: slice, theta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Decode elements of a group; the result may be a view of the payload, so it must not be written to.

        Args:
            payload: arrays of the payload, as `form` describes them.
            group: name of the group.
            part: the whole group, or one of its `blocks`.
            theta: these elements of the weights that the sender began with, if its codec needs them.

        """


@dataclass(slots=True)
class Quality:
    """Encoding error of payloads, as sums over their elements."""

    target: float = 0.0
    """Squares of the values to send."""
    decoded: float = 0.0
    """Squares of the decoded values."""
    product: float = 0.0
    """Products of values to send and decoded values."""
    difference: float = 0.0
    """Squares of the encoding error."""

    def add_block(self, target: torch.Tensor, decoded: torch.Tensor, difference: torch.Tensor) -> None:
        """Add the sums of a block."""
        self.target += _dot(target, target)
        self.decoded += _dot(decoded, decoded)
        self.product += _dot(target, decoded)
        self.difference += _dot(difference, difference)

    def __add__(self, added: Quality) -> Quality:
        return Quality(
            target=self.target + added.target,
            decoded=self.decoded + added.decoded,
            product=self.product + added.product,
            difference=self.difference + added.difference,
        )

    @property
    def error(self) -> float:
        """Relative encoding error: its L2 norm, over that of the values to send."""
        return math.sqrt(self.difference / self.target) if self.target > 0 else 0.0

    @property
    def cosine(self) -> float:
        """Cosine similarity of the values to send and the decoded ones; 1 if either are all zero."""
        if not self.target or not self.decoded:
            return 1.0
        return self.product / math.sqrt(self.target * self.decoded)


def _dot(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the product of two vectors, in float64 if overflow or underflow may have spoilt it in float32."""
    from hypha_ray.kernels import SMALL  # With it comes torch, which not every importer needs.

    product = float(first.dot(second))
    if SMALL < abs(product) < math.inf:
        return product
    return float(first.double().dot(second.double()))


class Encoder(Protocol):
    """Encoder of a sender's payloads of one fragment, round after round."""

    residual: Flat
    """Encoding error so far, by group, which later payloads make up for."""

    def encode(self, values: Flat, theta: Flat | None, last: bool = False) -> tuple[Flat, Quality]:
        """Encode a round's result.

        Args:
            values: weights, if θ is given; otherwise the values to send themselves, such as a gradient.
            theta: the global weights that the round began with.
            last: whether it is the last of the run, so that no later payload makes up for the encoding error.

        Returns:
            The payload, which may share memory with `values`, and its quality.

        """


def encoded(
    encoders: Sequence[Encoder], values: Sequence[Flat], theta: Sequence[Flat], last: bool = False
) -> tuple[list[Flat], Quality]:
    """Encode all fragments.

    Args:
        encoders: one for each fragment.
        values: trained weights, or the values to send themselves.
        theta: global weights, if the values are weights and differences to θ are sent; otherwise empty.
        last: whether they are the last of the run.

    Returns:
        The payload of each fragment, and the quality of all payloads together.

    """
    bases: Sequence[Flat | None] = theta or [None] * len(values)
    payloads: list[Flat] = []
    total = Quality()
    for fragment_encoder, flat, base in zip(encoders, values, bases, strict=True):
        payload, quality = fragment_encoder.encode(flat, base, last)
        payloads.append(payload)
        total += quality
    return payloads, total


def payload_bytes(payload: Flat) -> int:
    """Size of a payload on the wire, in bytes."""
    return sum(array.nbytes for array in payload.values())
