"""The module tree that a job trains: the same for workers, server, export and the checks before a start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypha_ray.config import Job
from hypha_ray.model.loading.build import build_model, skeleton
from hypha_ray.model.lora import adapted, needs_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_trained(job: Job) -> PreTrainedModel:
    """Build all modules that are trained and exchanged, on the CPU and with initial weights.

    Raises:
        HyphaError: any error of `build_model`.

    """
    return adapted(build_model(job.model, job.run.seed, whole=needs_whole(job.model)), job.model, job.run.seed)


def sketch_trained(job: Job) -> PreTrainedModel:
    """Build the same modules on torch's meta device, without weights.

    Raises:
        HyphaError: any error of `skeleton`.

    """
    return adapted(skeleton(job.model), job.model, job.run.seed)
