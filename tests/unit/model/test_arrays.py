"""Tensors as arrays, and back."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from hypha_ray.model.layout import array_of, tensor_of

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_values_of_every_dtype_come_back_from_memory_that_may_only_be_read(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    sent = np.frombuffer(array_of(tensor).tobytes(), array_of(tensor).dtype).reshape(shape)
    assert not sent.flags.writeable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tensor_of(sent)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


def test_an_array_of_a_tensor_on_the_cpu_is_no_copy() -> None:
    tensor = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    array = array_of(tensor)
    with torch.no_grad():
        tensor.fill_(1)
    assert torch.equal(tensor_of(array), torch.ones(4, dtype=torch.bfloat16))
