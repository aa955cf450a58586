"""Codecs by the names that a job file uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from hypha_ray.codec.base import Codec, Encoder
from hypha_ray.codec.formats.fp32 import Fp32, Fp32Differences, Subtraction, Unchanged
from hypha_ray.config.schema import Sync
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
    """Build an encoder for one fragment.

    Args:
        name: name of the codec.
        decay: part of the encoding error that is made up for in the next round; 0: none of it.
        options: options of the codec.

    """
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
    return codec(sync.codec, sync.codec_options)


def encoders(sync: Sync) -> list[Encoder]:
    """Build the encoders of a worker's payloads, one for each fragment."""
    fragment_encoders: list[Encoder] = []
    for _ in range(sync.fragments):
        if _subtracts(sync):
            fragment_encoders.append(Subtraction())
        else:
            fragment_encoders.append(encoder(sync.codec, sync.error_feedback, sync.codec_options))
    return fragment_encoders


def sends_differences(sync: Sync) -> bool:
    """Whether payloads are differences of weights and θ, and neither weights nor gradients."""
    return not sync.traits.sends_gradients and upward_codec(sync).yields == "deltas"


def _subtracts(sync: Sync) -> bool:
    """Whether payloads are differences in fp32."""
    return not sync.traits.has_barrier and sync.codec == Fp32.name
