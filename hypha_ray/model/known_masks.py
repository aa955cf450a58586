"""Masks whose contents the host knows, so that a model's forward pass doesn't wait for the device to read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def known_mask(inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which transformers is told whether a decoder's attention mask hides anything.

    Otherwise it asks the device in each forward pass, which waits for all that the device has to do before. Masks of
    other shapes are asked as always, and so are all of them in a version of transformers that asks in another way.

    Args:
        inputs: keyword arguments of the model, on the CPU.

    """
    from transformers import masking_utils

    module: Any = masking_utils
    mask, ask = inputs.get("attention_mask"), getattr(module, "fast_all", None)
    if mask is None or mask.ndim != 2 or ask is None:
        yield
        return
    shape, shows_all = mask.shape, bool(mask.all())
    module.fast_all = lambda tensor: shows_all if tensor.shape == shape else ask(tensor)
    try:
        yield
    finally:
        module.fast_all = ask
