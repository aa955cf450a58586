"""The inner optimizer: what a worker does with its own gradients between two outer rounds.

Its state is the worker's own: kept from round to round and never reset; see `inner_state` for when it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hypha_ray.config.schema import InnerOptimizer
from hypha_ray.worker.schedules import build_schedule

Parameters = list[torch.nn.Parameter]


class Inner:
    """Optimizers, their schedules, and clipping of gradients, as one.

    Args:
        optimizers: between them they have all trained parameters.
        config: schedule and clipping.
        total_steps: inner steps that the run is planned to have; None: unknown.

    """

    def __init__(
        self, optimizers: list[torch.optim.Optimizer], config: InnerOptimizer, total_steps: int | None
    ) -> None:
        self.optimizers, self._clip_norm = optimizers, config.clip_norm
        self._schedules = [build_schedule(optimizer, config, total_steps) for optimizer in optimizers]
        self._parameters: Parameters = [
            parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
        ]

    @property
    def learning_rate(self) -> float:
        """Rate of the next step; under muon that of AdamW, to which Muon's own is proportional."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def seek(self, position: float) -> None:
        """Go to a place in the schedule, in inner steps from its start; the next `step` is made there.

        By hand: torch warns of a schedule that moves before the first step, as that of a worker that joins late does.
        """
        for optimizer, schedule in zip(self.optimizers, self._schedules, strict=True):
            schedule.last_epoch = position  # type: ignore[assignment] # the curves take fractions too
            for group, peak, curve in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
                group["lr"] = float(peak) * curve(position)  # type: ignore[arg-type]

    def scale(self, factor: float) -> None:
        """Make the next step with the peak rates times this, whatever the schedule says."""
        for optimizer, schedule in zip(self.optimizers, self._schedules, strict=True):
            for group, peak in zip(optimizer.param_groups, schedule.base_lrs, strict=True):
                group["lr"] = float(peak) * factor

    def step(self) -> torch.Tensor:
        """Clip gradients, change the parameters, and go on in the schedule.

        Returns:
            L2 norm of the gradients before clipping, a scalar on the parameters' device; not waited for.

        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip_norm, norm)
        for optimizer, schedule in zip(self.optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()
        return norm

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


def build_optimizer(model: torch.nn.Module, config: InnerOptimizer, total_steps: int | None = None) -> Inner:
    """Build the inner optimizer of a model; frozen parameters are left out.

    * adamw: weight decay on parameters of two and more dimensions only, as GPT-style training and transformers' Trainer
      do: gains and biases have no scale to hold down.
    * muon: `torch.optim.Muon` for the 2-D weights between embedding and head, AdamW for the rest, as its author advises
      (Jordan 2024; in DiLoCo: arXiv 2505.23725).
    * sgd: `torch.optim.SGD`, whose weight decay goes through its momentum.

    Args:
        model: on the device where it will train.
        config: table of the job file.
        total_steps: inner steps that the run is planned to have; None: unknown.

    Raises:
        ConfigError: the schedule lacks a value, or has values that contradict each other.

    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.name == "sgd":
        momentum, decay = config.momentum, config.weight_decay
        sgd = torch.optim.SGD(trained, config.learning_rate, momentum=momentum, weight_decay=decay)
        return Inner([sgd], config, total_steps)
    if config.name == "adamw":
        return Inner([_adamw(trained, config)], config, total_steps)
    ids = _hidden_ids(model)
    hidden = [parameter for parameter in trained if id(parameter) in ids]
    rest = [parameter for parameter in trained if id(parameter) not in ids]
    optimizers: list[torch.optim.Optimizer] = [_adamw(rest, config)] if rest else []
    if hidden:
        optimizers.append(torch.optim.Muon(hidden, config.muon_learning_rate, weight_decay=config.weight_decay))
    return Inner(optimizers, config, total_steps)


def _adamw(parameters: Iterable[torch.nn.Parameter], config: InnerOptimizer) -> torch.optim.AdamW:
    """Build AdamW in its fused form, one pass over memory on CPUs and GPUs alike."""
    groups: dict[float, Parameters] = {}
    for parameter in parameters:
        groups.setdefault(config.weight_decay if parameter.ndim >= 2 else 0.0, []).append(parameter)
    options = [{"params": members, "weight_decay": decay} for decay, members in groups.items()]
    return torch.optim.AdamW(options, config.learning_rate, betas=config.betas, eps=config.epsilon, fused=True)


def _hidden_ids(model: Any) -> set[int]:
    """Ids of the 2-D weights of a model's body that are neither embeddings nor its head."""
    body = getattr(model, "base_model", model)
    outer = [module for module in body.modules() if isinstance(module, torch.nn.Embedding)]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None:
        outer.append(head)
    tables = {id(parameter) for module in outer for parameter in module.parameters()}
    return {id(parameter) for parameter in body.parameters() if parameter.ndim == 2} - tables
