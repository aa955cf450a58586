"""Passes over large arrays that numba compiles, or torch computes if numba can't; results are the same to the bit.

Numba keeps compiled code beside its source, so only the first process on a machine waits for it.
"""

from hypha_ray.kernels.passes import SMALL, Averaged, compiled, copy, is_worth_it, load_ahead, nesterov, portions

__all__ = ["SMALL", "Averaged", "compiled", "copy", "is_worth_it", "load_ahead", "nesterov", "portions"]
