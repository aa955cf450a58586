"""Check that a model may be shared out to the processes of a worker."""

from __future__ import annotations

from functools import partial

from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.driver.preflight.loss_on_samples import scored_samples
from hypha_ray.model.loading.build import random_model


def check_sharding(case: Case) -> None:
    """Refuse a model whose gradient isn't the same when FSDP2 gathers its blocks one by one.

    Raises:
        ConfigError: MODEL023.

    """
    job = case.job
    if job.worker.sharding == "none" or all(job.processes_in(group) == 1 for group in job.worker_groups):
        return
    from hypha_ray.worker.group.sharding_check import check_sharding_on_copy, refused  # Few jobs need it.

    task, samples = scored_samples(case)
    build = partial(random_model, job.model, case.task)
    if not check_sharding_on_copy(job.worker, task, samples, case.network.config, build, case.facts.parameters):
        raise refused(case.network, "no small copy of it could be made to try that")
