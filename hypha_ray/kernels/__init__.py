"""Passes over large arrays that numba compiles; results are to the bit those of torch, which does it where numba can't.

What is compiled is kept beside its source, so only the first process on a machine waits for it.
"""

from hypha_ray.kernels.passes import SMALL, Averaged, copy, is_worth_it, load_ahead, nesterov, portions

__all__ = ["SMALL", "Averaged", "copy", "is_worth_it", "load_ahead", "nesterov", "portions"]
