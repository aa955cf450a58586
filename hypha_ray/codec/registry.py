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
        ConfigError: COD001, no codec has this name; PLG002, one of the job's own can't be had.

    """
    made: Codec = create("codecs", name, options)
    return made


def difference_codec(name: str, options: CodecOptions = None) -> Chunked | None:
    """The same for codecs of differences; None for fp32, which is of the weights themselves."""
    found = codec(name, options)
    return None if isinstance(found, Fp32) else cast("Chunked", found)


def encoder(name: str, decay: float, options: CodecOptions = None) -> Encoder:
    """An encoder for one fragment.

    Args:
        name: the codec's.
        decay: part of what was left out that is made up for in the next round; 0: nothing is.
        options: options of the codec.

    """
    chosen = difference_codec(name, options)
    if chosen is None:
        return Unchanged()
    from hypha_ray.codec.feedback import Feedback

    return Feedback(chosen, decay)


def upward_codec(sync: Sync) -> Codec:
    """Codec that reads payloads. Without a barrier θ has moved on when they come: differences are sent in fp32, too."""
    return Fp32Differences() if _subtracts(sync) else codec(sync.codec, sync.codec_options)


def encoders(sync: Sync) -> list[Encoder]:
    """Encoders of a worker's payloads, one for each fragment."""
    if _subtracts(sync):
        return [Subtraction() for _ in range(sync.fragments)]
    return [encoder(sync.codec, sync.error_feedback, sync.codec_options) for _ in range(sync.fragments)]


def sends_differences(sync: Sync) -> bool:
    """Whether payloads are made of weights and θ; or else of the weights alone, or of gradients."""
    return not sync.traits.sends_gradients and upward_codec(sync).yields == "deltas"


def _subtracts(sync: Sync) -> bool:
    return not sync.traits.has_barrier and sync.codec == Fp32.name
