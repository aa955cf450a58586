"""Copies that go past the caches."""

from __future__ import annotations

import torch

from hypha_ray.kernels.loading import compiled, is_worth_it


def copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy as ``out.copy_(source)``; large fp32 arrays are written without being read into the caches before.

    `torch` and the C library read each line of the target from memory first, unless they copy tens of megabytes at
    once. Without that two processes can copy at the same time as fast as one alone.

    Args:
        source: of any shape, never written to.
        out: of the same shape.

    """
    plain = (one.dtype == torch.float32 and one.is_cpu and one.is_contiguous() for one in (source, out))
    if source.shape == out.shape and all(plain) and is_worth_it("copy", out.numel()):
        numba = compiled("copy")
        assert numba is not None
        numba.copy(source.data_ptr(), out.data_ptr(), out.numel())
    else:
        out.copy_(source)
