"""What a worker's result is encoded as on its way to the parameter server."""

from hypha_ray.codec.base import Codec, Form, payload_bytes
from hypha_ray.codec.fp32 import Fp32
from hypha_ray.codec.registry import codec

__all__ = ["Codec", "Form", "Fp32", "codec", "payload_bytes"]
