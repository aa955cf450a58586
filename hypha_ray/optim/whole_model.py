"""Weights and inner state of a trainer that holds them whole, as arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch

from hypha_ray.model.flat import Array, Groups
from hypha_ray.model.layout import gather, scatter
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.pending_step import FinishedStep, PendingStep
from hypha_ray.optim.state import export_state, load_state
from hypha_ray.optim.step import Step
from hypha_ray.types import Flat, Layout, Samples


class WholeModel:
    """Base class of trainers whose process has all weights and all of the optimizer's state."""

    model: torch.nn.Module
    optimizer: Inner

    @abstractmethod
    def step(self, batch: Samples) -> Step:
        """Take one inner step."""

    def begin_step(self, batch: Samples) -> PendingStep:
        """Take one inner step at once."""
        return FinishedStep(self.step(batch))

    def gather(self, layout: Layout, fragment: int, out: Flat | None = None, gradients: bool = False) -> Flat:
        """Copy a fragment out of the model, as `model.layout.gather`."""
        return gather(self.model, layout, fragment, out, gradients)

    def scatter(self, layout: Layout, fragment: int, flat: Groups, mixing: float = 0.0) -> None:
        """Copy a fragment's arrays into the model, as `model.layout.scatter`."""
        scatter(self.model, layout, fragment, flat, mixing)

    def optimizer_state(self) -> Flat:
        """Copy the optimizer's state, as `export_state`."""
        return export_state(self.optimizer)

    def load_optimizer_state(self, state: Mapping[str, Array]) -> None:
        """Go on from what `optimizer_state` gave.

        Raises:
            CheckpointError: as `load_state`.

        """
        load_state(self.optimizer, state)
