"""What the name of a group says: ``parameters/float32``, ``buffers/int64``."""

from __future__ import annotations


def is_trained(group: str) -> bool:
    """Whether a group is one of parameters, which are encoded and stepped; buffers are passed on and averaged."""
    return group.startswith("parameters/")


def dtype_of(group: str) -> str:
    """Numpy's name of the dtype of a group's array."""
    return group.rpartition("/")[2]
