"""The module tree that a job trains: the same for workers, server, export and the checks before a start."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hypha_ray.config import Job
from hypha_ray.model.critic import ActorCritic
from hypha_ray.model.loading.build import build_model, skeleton
from hypha_ray.model.lora import adapted, needs_whole

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


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
    return _with_critic(job, lambda: adapted(build_model(job.model, seed, whole=whole, device=device), job.model, seed))


def sketch_trained(job: Job) -> Any:
    """Build the same modules on torch's meta device, without weights.

    Raises:
        HyphaError: any error of `skeleton`.

    """
    return _with_critic(job, lambda: adapted(skeleton(job.model), job.model, job.run.seed, weights=False))


def exported(trained: Any) -> PreTrainedModel:
    """Return the part of the trained modules that users want in the end."""
    return trained.actor if isinstance(trained, ActorCritic) else trained


def _with_critic(job: Job, build: Callable[[], PreTrainedModel]) -> Any:
    return ActorCritic(build(), build()) if job.rl.has_critic else build()
