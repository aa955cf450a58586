"""Copies that go past the caches."""

from __future__ import annotations

import pytest
import torch

from hypha_ray.kernels import LEAST, compiled, copy


@pytest.mark.parametrize("size", [1, 5, 15, 16, 17, 100, 4096, (1 << 18) + 13])
@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("there", [0, 3, 15])
def test_copies_between_any_addresses_and_touches_nothing_beside(
    size: int, start: int, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEAST, "copy", 1)
    source, out = torch.randn(size + start)[start:], torch.full((there + size + 3,), 7.0)
    copy(source, out[there : there + size])
    assert torch.equal(out[there : there + size], source)
    assert (out[:there] == 7).all() and (out[there + size :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_no_plain_copy_is_left_to_torch(dtype: torch.dtype) -> None:
    source, out = torch.randn(600, 600), torch.zeros(600, 600, dtype=dtype)
    copy(source.t(), out)
    assert torch.equal(out, source.t().to(dtype))


def test_can_be_compiled_here() -> None:
    assert compiled("copy") is not None and compiled("outer") is not None and compiled("nothing") is None
    assert compiled("patches") is not None
