"""Arrays out of Ray's object store as torch tensors."""

from __future__ import annotations

import warnings

import torch

from hypha_ray.types import Flat


def tensors(flat: Flat) -> dict[str, torch.Tensor]:
    """View arrays as tensors, without a copy.

    What Ray delivers is read-only and shared by all readers on a node, and torch has no read-only tensors: it warns,
    and would write all the same. The caller promises not to write into tensors of arrays that aren't its own.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return {group: torch.from_numpy(array) for group, array in flat.items()}
