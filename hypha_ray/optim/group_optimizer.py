"""Optimizers that step on all parameters of a group together."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch


class GroupOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is given by what it does to a group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step on the gradients that are there; a closure isn't called."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step(group, parameters, [parameter.grad for parameter in parameters])

    @abstractmethod
    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None: ...
