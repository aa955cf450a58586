"""Codecs by the names that a job file uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, get_args

from hypha_ray.codec.base import Codec, Encoder
from hypha_ray.codec.formats.fp32 import Fp32, Fp32Differences, Subtraction, Unchanged
from hypha_ray.config.schema import Sync
from hypha_ray.config.value_types import Encoding
from hypha_ray.errors import ConfigError

if TYPE_CHECKING:
    from hypha_ray.codec.formats.chunked import Chunked

NAMES: tuple[str, ...] = get_args(Encoding)


def codec(name: str) -> Codec:
    """Look a codec up; all but fp32 need torch, which takes seconds to load.

    Raises:
        ConfigError: no codec has this name.

    """
    if name == Fp32.name:
        return Fp32()
    if name not in NAMES:
        raise ConfigError("COD001", "sync.codec names no codec", got=repr(name), allowed=", ".join(NAMES))
    from hypha_ray.codec.formats import e3m0, floats, huffman, integers, topk

    even = (integers.Int8, integers.Int4, huffman.Huffman3, huffman.Huffman2)
    found: tuple[type[Codec], ...] = (floats.Bf16, floats.Fp16, *even, e3m0.E3m0, topk.TopK)
    return next(kind for kind in found if kind.name == name)()


def difference_codec(name: str) -> Chunked | None:
    """The same for codecs of differences; None for fp32, which is of the weights themselves."""
    found = codec(name)
    return None if isinstance(found, Fp32) else cast("Chunked", found)


def encoder(name: str, decay: float) -> Encoder:
    """An encoder for one fragment.

    Args:
        name: the codec's.
        decay: part of what was left out that is made up for in the next round; 0: nothing is.

    """
    chosen = difference_codec(name)
    if chosen is None:
        return Unchanged()
    from hypha_ray.codec.feedback import Feedback

    return Feedback(chosen, decay)


def upward_codec(sync: Sync) -> Codec:
    """Codec that reads payloads. Without a barrier θ has moved on when they come: differences are sent in fp32, too."""
    return Fp32Differences() if _subtracts(sync) else codec(sync.codec)


def encoders(sync: Sync) -> list[Encoder]:
    """Encoders of a worker's payloads, one for each fragment."""
    if _subtracts(sync):
        return [Subtraction() for _ in range(sync.fragments)]
    return [encoder(sync.codec, sync.error_feedback) for _ in range(sync.fragments)]


def sends_differences(sync: Sync) -> bool:
    """Whether payloads are made of weights and θ; or else of the weights alone, or of gradients."""
    return not sync.traits.sends_gradients and upward_codec(sync).yields == "deltas"


def _subtracts(sync: Sync) -> bool:
    return not sync.traits.has_barrier and sync.codec == Fp32.name
