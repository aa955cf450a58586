"""Check that the loss of a job's model may be fused with its head."""

from __future__ import annotations

from functools import partial

from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.driver.preflight.loss_on_samples import scored_samples
from hypha_ray.model.checks.fused_check import check_fused_on_copy, head_of, untried
from hypha_ray.model.loading.build import random_model


def check_fused_loss(case: Case) -> None:
    """Refuse `worker.fused_loss` for a model whose logits are more than a linear layer of hidden states.

    Raises:
        ConfigError: MODEL020.

    """
    job = case.job
    if job.worker.fused_loss is not True or all(group.bridged for group in job.worker_groups):
        return
    head_of(case.task, case.network)
    task, samples = scored_samples(case)
    build = partial(random_model, job.model, case.task)
    if not check_fused_on_copy(task, samples, case.network.config, build, case.facts.parameters):
        raise untried(case.network)
