"""Codecs by the names that a job file uses."""

from __future__ import annotations

from hypha_ray.codec.base import Codec
from hypha_ray.codec.fp32 import Fp32
from hypha_ray.errors import ConfigError

CODECS: dict[str, type[Codec]] = {Fp32.name: Fp32}


def codec(name: str) -> Codec:
    """Look a codec up.

    Raises:
        ConfigError: no codec has this name.

    """
    if name not in CODECS:
        raise ConfigError("COD001", "sync.codec names no codec", got=repr(name), allowed=", ".join(CODECS))
    return CODECS[name]()
