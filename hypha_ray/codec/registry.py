"""Codecs by the names that a job file uses."""

from __future__ import annotations

from hypha_ray.codec.base import Codec, Encoder
from hypha_ray.codec.fp32 import Fp32, Unchanged
from hypha_ray.errors import ConfigError

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


def encoder(name: str, decay: float) -> Encoder:
    """An encoder for one fragment.

    Args:
        name: the codec's.
        decay: part of what was left out that is made up for in the next round; 0: nothing is.

    """
    chosen = codec(name)
    if isinstance(chosen, Fp32):
        return Unchanged()
    from hypha_ray.codec.chunked import Chunked
    from hypha_ray.codec.feedback import Feedback

    assert isinstance(chosen, Chunked)
    return Feedback(chosen, decay)
