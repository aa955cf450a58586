"""The modules that a job trains: the same for workers, server, export and the checks before a start."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from hypha_ray.config import Job
from hypha_ray.errors import ConfigError
from hypha_ray.model.loading.build import build_model, skeleton
from hypha_ray.model.lora import needs_whole, with_adapter

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class CriticModel(torch.nn.Module):
    """Body of a language model under a head of one number, which is 0 before any training.

    Args:
        network: the language model, whose own head is left out.

    Raises:
        ConfigError: RL014, body and head of the model can't be told apart.

    """

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        output = network.get_output_embeddings()
        if network.base_model is network or output is None:
            fix = "choose an algorithm without a critic, or another model"
            raise ConfigError("RL014", "no critic can be made of the model", type(network).__name__, fix=fix)
        self.base_model: Any = network.base_model
        self.head = torch.nn.Linear(output.weight.shape[1], 1, device=network.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, **inputs: Any) -> torch.Tensor:
        """Return values, [sequences, positions]; the inputs are those of the body."""
        hidden: torch.Tensor = self.base_model(**inputs).last_hidden_state
        values: torch.Tensor = self.head(hidden)[..., 0]
        return values


class ActorCritic(torch.nn.Module):
    """Policy and critic, which are trained and exchanged together.

    Args:
        actor: the policy.
        critic: another copy of the model, to be made a critic.

    """

    def __init__(self, actor: PreTrainedModel, critic: PreTrainedModel) -> None:
        super().__init__()
        self.actor = actor
        self.critic = CriticModel(critic)


def build_trained(job: Job, device: torch.device | None = None) -> Any:
    """Build all modules that are trained and exchanged, on the CPU and with initial weights.

    Args:
        job: the job file.
        device: device that they will be used on, for quantized weights, which are made there; None: the CPU.

    Returns:
        The model of transformers, or `ActorCritic` if the job has a critic.

    Raises:
        HyphaError: any error of `build_model`.

    """
    seed = job.run.seed
    whole = needs_whole(job.model)

    def build() -> PreTrainedModel:
        network = build_model(job.model, seed, whole=whole, device=device)
        return with_adapter(network, job.model, seed)

    return _with_critic(job, build)


def sketch_trained(job: Job) -> Any:
    """Build the same modules on torch's meta device, without weights.

    Raises:
        HyphaError: any error of `skeleton`.

    """

    def build() -> PreTrainedModel:
        return with_adapter(skeleton(job.model), job.model, job.run.seed, weights=False)

    return _with_critic(job, build)


def exported(trained: Any) -> PreTrainedModel:
    """Return the part of the trained modules that is exported: the model without a critic."""
    if isinstance(trained, ActorCritic):
        return trained.actor
    return cast("PreTrainedModel", trained)


def _with_critic(job: Job, build: Callable[[], PreTrainedModel]) -> Any:
    if job.rl.has_critic:
        return ActorCritic(build(), build())
    return build()
