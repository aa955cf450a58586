"""Trial of a user's codec on a few values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hypha_ray.codec.blocks import BLOCK, tensors
from hypha_ray.codec.feedback import Feedback
from hypha_ray.codec.registry import difference_codec

_GROUP = "parameters/float32"
_FEW = 1000
"""Elements that are encoded, beside a part of a chunk."""


def try_codec(name: str, options: Mapping[str, Any] | None) -> None:
    """Encode values twice, and decode them as a server does.

    Raises:
        ValueError: the payload differs from the codec's `form`, or is decoded to other values than the encoder saw.

    """
    codec = difference_codec(name, options)
    assert codec is not None
    if codec.chunk < 1 or BLOCK % codec.chunk:
        raise ValueError(f"a chunk of {codec.chunk} elements, which doesn't divide {BLOCK}")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_FEW + codec.chunk // 2, generator=generator)
    sender = Feedback(codec, 1.0)
    forms = codec.form({_GROUP: len(values)})
    for _ in range(2):
        target = values
        if sender.residual:
            target = values + torch.from_numpy(sender.residual[_GROUP])
        payload, _quality = sender.encode({_GROUP: values.numpy()}, None)
        for part, form in forms.items():
            array = payload.get(part)
            if array is None or array.dtype.name != form.dtype or (form.exact and array.size != form.size):
                raise ValueError(f"the payload's {part} isn't {form.size} elements of {form.dtype}")
        decoded = codec.decode(tensors(payload), _GROUP, slice(None))[: len(values)]
        if not torch.isfinite(decoded).all():
            raise ValueError("finite values are decoded to some that aren't")
        if not torch.allclose(target - decoded, torch.from_numpy(sender.residual[_GROUP]), atol=1e-6):
            raise ValueError("a payload is decoded to other values than expand gave when it was made")
