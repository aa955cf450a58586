"""Passes over large arrays that numba compiles; results are to the bit those of torch, which does it where numba can't.

What is compiled is kept beside its source, so only the first process on a machine waits for it.
"""

from hypha_ray.kernels.copying import copy, get_ready
from hypha_ray.kernels.loading import load_ahead
from hypha_ray.kernels.outer import SMALL, Averaged, available, nesterov, portions

__all__ = ["SMALL", "Averaged", "available", "copy", "get_ready", "load_ahead", "nesterov", "portions"]
