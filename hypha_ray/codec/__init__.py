"""Encodings of a worker's result on its way to the parameter server."""

from hypha_ray.codec.base import Codec, Encoder, Form, Quality, encoded, payload_bytes
from hypha_ray.codec.formats.fp32 import Fp32
from hypha_ray.codec.registry import (
    NAMES,
    codec,
    difference_codec,
    downward_codec,
    encoder,
    encoders,
    sends_differences,
    upward_codec,
)

__all__ = [
    "NAMES",
    "Codec",
    "Encoder",
    "Form",
    "Fp32",
    "Quality",
    "codec",
    "difference_codec",
    "downward_codec",
    "encoded",
    "encoder",
    "encoders",
    "payload_bytes",
    "sends_differences",
    "upward_codec",
]
