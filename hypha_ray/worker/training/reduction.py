"""Sums over the processes of a worker, which the gradient of a batch is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hypha_ray.optim.optimizers import Inner


class Reduction(Protocol):
    """Sums over all processes that have a part of a batch."""

    def total(self, count: int) -> int:
        """Return the sum of a number that each process has."""
        ...

    def add_up(self, parameters: Sequence[Tensor], loss: Tensor) -> None:
        """Replace gradients and loss by their sums, in the first process; those of others are of no use afterwards."""
        ...

    def norm(self, optimizer: Inner) -> Tensor:
        """Return the norm of the summed gradients, as the first process needs it."""
        ...


class Alone:
    """Sums of the only process: nothing is to be done."""

    def total(self, count: int) -> int:
        """Return the number itself."""
        return count

    def add_up(self, parameters: Sequence[Tensor], loss: Tensor) -> None:
        """Leave everything as it is."""

    def norm(self, optimizer: Inner) -> Tensor:
        """Return the norm of the gradients."""
        return optimizer.norm()
