"""Interface of roles, and the refusal of requests that have no meaning for a role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hypha_ray.optim.optimizers import Inner
from hypha_ray.rl.dataflow.sample import Sample
from hypha_ray.types import Sums


@dataclass
class RoleOutcome:
    """Result of an operation of a role."""

    sample: Sample | None = None
    """Samples with the keys that were made; None if none were."""
    sums: Sums = field(default_factory=dict)
    """Figures of the operation."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Single values, such as the norm of a gradient."""
    problems: tuple[str, ...] = ()
    """Lines for the user about failures beside the operation, which itself succeeded."""


class Role:
    """Role of a model, or of functions in its place.

    Subclasses have the operations that have a meaning for them. Each takes samples with the keys of its call, and the
    arguments of the request.
    """

    def initialize(self, steps: int) -> None:
        """Build the optimizer, for a run of `steps` steps."""
        raise NotImplementedError

    def generate(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Make responses to prompts."""
        raise NotImplementedError

    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Add keys by one forward pass, or by functions."""
        raise NotImplementedError

    def train_step(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Take the optimizer steps of a batch, or only add its gradient."""
        raise NotImplementedError

    def config(self) -> Mapping[str, Any]:
        """Return facts of the model."""
        raise NotImplementedError

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the model's weights by name: its own tensors, not copies."""
        raise NotImplementedError

    def take_weights(self, weights: Mapping[str, torch.Tensor], eta: float) -> None:
        """Make the model's weights `eta` times these plus `1 - eta` times the present ones."""
        raise NotImplementedError

    def offload(self) -> None:
        """Move the model's weights out of the device's memory."""
        raise NotImplementedError

    def load(self) -> None:
        """Bring offloaded weights back; called before each use of the role."""

    def save(self, folder: str) -> None:
        """Write the model to a folder."""
        raise NotImplementedError

    def close(self) -> None:
        """Release resources other than memory."""


class TrainedRole(Role):
    """Role of a model in training."""

    optimizer: Inner
    """Inner optimizer of the model, once that is initialized."""


def facts_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return facts of a model."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters}
