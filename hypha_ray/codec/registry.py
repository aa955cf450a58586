"""Codecs by the names that a job file uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hypha_ray.codec.base import Codec, Encoder
from hypha_ray.codec.fp32 import Fp32, Unchanged
from hypha_ray.errors import ConfigError

if TYPE_CHECKING:
    from hypha_ray.codec.chunked import Chunked

NAMES = ("fp32", "bf16", "fp16", "int8", "int4", "e3m0", "topk")


def codec(name: str) -> Codec:
    """Look a codec up; all but fp32 need torch, which takes seconds to load.

    Raises:
        ConfigError: no codec has this name.

    """
    if name == Fp32.name:
        return Fp32()
    if name not in NAMES:
        raise ConfigError("COD001", "sync.codec names no codec", got=repr(name), allowed=", ".join(NAMES))
    from hypha_ray.codec import e3m0, floats, integers, topk

    found: tuple[type[Codec], ...] = (floats.Bf16, floats.Fp16, integers.Int8, integers.Int4, e3m0.E3m0, topk.TopK)
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
