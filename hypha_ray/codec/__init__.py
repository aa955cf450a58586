"""Encodings of a worker's result on its way to the parameter server."""

from hypha_ray.codec.base import (
    NAMES,
    Codec,
    Encoder,
    Form,
    Fp32,
    Quality,
    codec,
    difference_codec,
    downward_codec,
    encoded,
    encoder,
    encoders,
    payload_bytes,
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
