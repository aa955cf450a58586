"""Codecs by the names that a job file uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from hypha_ray.codec.base import Codec, Encoder
from hypha_ray.codec.formats.fp32 import Fp32, Fp32Differences, Subtraction, Unchanged
from hypha_ray.config.schema import Sync
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.families import CODECS
from hypha_ray.plugins import create

if TYPE_CHECKING:
    from hypha_ray.codec.formats.chunked import Chunked

NAMES: tuple[str, ...] = tuple(CODECS.members)
CodecOptions: TypeAlias = Mapping[str, Any] | None
"""Options of a codec of the job's own; None: all defaults."""


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
