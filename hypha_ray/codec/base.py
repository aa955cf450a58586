"""Contract of codecs and encoders, between worker and server; fp32, without an error; and codecs by their names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from hypha_ray.config.schema import Sync
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.families import CODECS
from hypha_ray.plugins import create
from hypha_ray.types import Flat
from hypha_ray.types.data import dtype_of, is_trained

if TYPE_CHECKING:
    import torch

    from hypha_ray.codec.formats.chunked import Chunked

NAMES: tuple[str, ...] = tuple(CODECS.members)
CodecOptions: TypeAlias = Mapping[str, Any] | None
"""Options of a codec of the job's own; None: all defaults."""


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
    """Encoding error so far, by group, which is added to later payloads."""

    def encode(self, values: Flat, theta: Flat | None, is_last: bool = False) -> tuple[Flat, Quality]:
        """Encode a round's result.

        Args:
            values: weights, if θ is given; otherwise the values to send themselves, such as a gradient.
            theta: the global weights that the round began with.
            is_last: whether it is the last of the run, so that no later payload makes up for the encoding error.

        Returns:
            The payload, which may share memory with `values`, and its quality.

        """


def encoded(
    encoders: Sequence[Encoder], values: Sequence[Flat], theta: Sequence[Flat], is_last: bool = False
) -> tuple[list[Flat], Quality]:
    """Encode all fragments.

    Args:
        encoders: one for each fragment.
        values: trained weights, or the values to send themselves.
        theta: global weights, if the values are weights and differences to θ are sent; otherwise empty.
        is_last: whether they are the last of the run.

    Returns:
        The payload of each fragment, and the quality of all payloads together.

    """
    bases: Sequence[Flat | None] = theta or [None] * len(values)
    payloads: list[Flat] = []
    total = Quality()
    for fragment_encoder, flat, base in zip(encoders, values, bases, strict=True):
        payload, quality = fragment_encoder.encode(flat, base, is_last)
        payloads.append(payload)
        total += quality
    return payloads, total


def payload_bytes(payload: Flat) -> int:
    """Size of a payload on the wire, in bytes."""
    return sum(array.nbytes for array in payload.values())


class Fp32:
    """Codec whose payload is the worker's weights, in their master dtypes.

    It isn't their difference to θ: θ + (w − θ) is not w in floating point, so one worker with η = 1 and μ = 0 would not
    be plain training bit for bit.
    """

    name: str = "fp32"
    yields: Literal["weights", "deltas"] = "weights"

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        """Describe one array for each group, of the group's own dtype."""
        return {group: Form(dtype_of(group), elements) for group, elements in groups.items()}

    def decode(
        self, payload: Mapping[str, torch.Tensor], group: str, part: slice, theta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a view of the payload."""
        return payload[group][part]


class Unchanged:
    """Encoder of a codec without an encoding error."""

    def __init__(self) -> None:
        self.residual: Flat = {}

    def encode(self, values: Flat, theta: Flat | None, is_last: bool = False) -> tuple[Flat, Quality]:
        """Return the arrays themselves, without a copy."""
        return dict(values), Quality()


class Fp32Differences(Fp32):
    """Codec whose payload is the difference of the worker's weights to the θ that it began with."""

    yields: Literal["weights", "deltas"] = "deltas"


class Subtraction(Unchanged):
    """Encoder of `Fp32Differences`."""

    def encode(self, values: Flat, theta: Flat | None, is_last: bool = False) -> tuple[Flat, Quality]:
        """Subtract θ from the weights, in place."""
        for group, array in values.items():
            if theta is not None and is_trained(group):
                np.subtract(array, theta[group], out=array)
        return dict(values), Quality()


def codec(name: str, options: CodecOptions = None) -> Codec:
    """Look a codec up; all but fp32 need torch, which takes seconds to load.

    Raises:
        ConfigError: COD001, no codec has this name; PLG002, a codec of the job's own can't be loaded.

    """
    member: Codec = create("codecs", name, options)
    return member


def difference_codec(name: str, options: CodecOptions = None) -> Chunked | None:
    """Look a codec of differences up; None for fp32, which encodes the weights themselves."""
    member = codec(name, options)
    if isinstance(member, Fp32):
        return None
    return cast("Chunked", member)


def downward_codec(name: str, options: CodecOptions = None) -> Chunked | None:
    """Look up the codec of steps of the global weights; None for fp32, which encodes the weights themselves."""
    member = difference_codec(name, options)
    return None if member is None else member.downward()


def encoder(name: str, decay: float, options: CodecOptions = None) -> Encoder:
    """Build an encoder for one fragment, whose receiver has no weights; for `decay`, see `Feedback`."""
    chunked = difference_codec(name, options)
    if chunked is None:
        return Unchanged()
    from hypha_ray.codec.feedback import Feedback

    return Feedback(chunked, decay)


def upward_codec(sync: Sync) -> Codec:
    """Return the codec that decodes workers' payloads.

    Without a barrier, θ may have changed before a payload arrives. So fp32 sends differences, too.
    """
    if _subtracts(sync):
        return Fp32Differences()
    member = codec(sync.codec, sync.codec_options)
    if isinstance(member, Fp32) or not sync.traits.has_barrier:
        return member
    return cast("Chunked", member).upward()


def encoders(sync: Sync, outer: OuterOptimizer | None = None) -> list[Encoder]:
    """Build the encoders of a worker's payloads, one for each fragment; `outer` steps with them, if it is known."""
    return [_upward_encoder(sync, outer) for _ in range(sync.fragments)]


def _upward_encoder(sync: Sync, outer: OuterOptimizer | None) -> Encoder:
    if _subtracts(sync):
        return Subtraction()
    member = upward_codec(sync)
    if isinstance(member, Fp32):
        return Unchanged()
    from hypha_ray.codec.feedback import Feedback
    from hypha_ray.kernels import load_ahead

    chunked = cast("Chunked", member)
    if chunked.postpones:
        load_ahead("patches", 1)
    momentum = 0.0
    if chunked.postpones and sync.error_feedback == 1 and outer is not None and outer.name == "nesterov":
        momentum = outer.momentum
    return Feedback(chunked, sync.error_feedback, momentum)


def sends_differences(sync: Sync) -> bool:
    """Whether payloads are differences of weights and θ, and neither weights nor gradients."""
    return not sync.traits.sends_gradients and upward_codec(sync).yields == "deltas"


def _subtracts(sync: Sync) -> bool:
    """Whether payloads are differences in fp32."""
    return not sync.traits.has_barrier and sync.codec == Fp32.name
