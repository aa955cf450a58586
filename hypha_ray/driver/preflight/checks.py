"""All checks before a start, in one list, for a run and for a dry run.

    settings ──► dataset ──► skeleton of the model ──► model and dataset ──► weights ──► (Ray) ──► cluster

Cheap checks come first. Checks of the model use its skeleton on the meta device, which needs no memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hypha_ray.config import Job
from hypha_ray.config.checks import check_destinations, check_options, plugin_uses
from hypha_ray.config.rl import MODEL
from hypha_ray.driver.datasets.data_source import DataSource
from hypha_ray.driver.preflight.settings import check_packages, check_settings
from hypha_ray.driver.trained_models.preferences import require_preferences
from hypha_ray.errors import ConfigError
from hypha_ray.families import ADVANTAGES, CODECS, ENVIRONMENTS, REWARDS
from hypha_ray.heavy_imports import uncollected
from hypha_ray.plugins import attempt, is_built_in, look_beside_the_job

if TYPE_CHECKING:
    from hypha_ray.driver.preflight.compatibility import Case


def check_job(job: Job) -> None:
    """Refuse an optimizer, schedule, sink, address or device that isn't available, as `check_early` has done.

    Raises:
        HyphaError: a setting of the job file is wrong.

    """
    check_packages(job)
    check_destinations(job, os.environ)
    check_settings(job)


def check_plugins(job: Job) -> list[str]:
    """Load plug-ins that lie beside the job or are installed, and try each on a small example.

    Reward functions and environments, which are loaded in processes of their own, come last.

    Returns:
        Notes for the user.

    Raises:
        HyphaError: CFG001, CFG002, CFG003, wrong options; COD002, a codec can't be had; PLG001, PLG002, PLG003, a
            member can't be used; or its own refusal of the job; or as `check_rewards`.

    """
    look_beside_the_job()
    check_options(job)
    _try_codecs(job)
    for use in plugin_uses(job):
        if use.family not in (REWARDS.name, ENVIRONMENTS.name):
            attempt(use.key, use.family, use.name, use.options, job)
        if use.family == ADVANTAGES.name and job.sync.traits.sends_gradients:
            from hypha_ray.rl.algorithms.advantages import check_advantages

            check_advantages(use.name, use.options, apart=True)
    return check_rewards(job)


def _try_codecs(job: Job) -> None:
    """Try the codecs that are built in: the loops of one may not be there.

    Raises:
        ConfigError: COD002.

    """
    for name in sorted({job.sync.codec, job.sync.downward_codec}):
        if name != "fp32" and is_built_in(CODECS.name, name):
            from hypha_ray.members.trials import try_codec

            try_codec(name, None)


def check_rewards(job: Job) -> list[str]:
    """Load the reward functions, also of modules in the working directory, and check the reward model.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: RWD003, RWD004, one can't be had; RWD007, the model can't be a reward model; PLG001, PLG002,
            there is no such environment, or it can't be had.
        HyphaError: the reward model can't be loaded, or its weights don't fit its configuration.

    """
    if job.rl.algorithm is None:
        return []
    from hypha_ray.rl.rewards.evaluators import check_functions

    look_beside_the_job()
    notes = check_functions(job.rl.reward.loaded_functions)
    if job.rl.environment is not None:
        from hypha_ray.rl.environments.pool import EnvironmentPool

        pool = EnvironmentPool(job.rl)
        pool.tools()  # It is loaded for that.
        pool.close()
    if MODEL not in job.rl.reward.functions:
        return notes
    with uncollected():  # Loading torch takes seconds.
        from hypha_ray.rl.reward_model import check_reward_model
    return notes + check_reward_model(job.rl.reward, job.model)


def check_end(job: Job, dataset: Path) -> None:
    """Load the modules and the tokenizer that the end of a run needs, so that a missing one stops the start.

    Raises:
        HyphaError: a package, or files of the tokenizer or image processor, can't be used.

    """
    try:
        with uncollected():
            import hypha_ray.model.saved_model
            import hypha_ray.store.snapshots
            import hypha_ray.telemetry.plots  # noqa: F401
            from hypha_ray.model.loading.preprocess import load_preprocessor
    except ImportError as error:
        problem = "a package is missing that saves the model or draws the plots"
        got = " ".join(str(error).split())
        raise ConfigError("CFG012", problem, got, fix="install hypha_ray again, with what it needs") from None
    load_preprocessor(job.preprocessor, dataset, job.model)


def case_of(job: Job, source: DataSource) -> Case:
    """Build the skeleton of a job's model, for `check_case` and for notes on a worker's step.

    Raises:
        HyphaError: the model can't be built as configured, or a task of another kind is trained on the dataset.

    """
    if job.preference.loss is not None:
        require_preferences(source.manifest, job.preference)
    elif job.rl.algorithm is None:
        source.manifest.refuse_prompts()
    with uncollected():  # Loading torch takes seconds.
        from hypha_ray.driver.preflight.compatibility import Case
        from hypha_ray.model.loading.build import check_factory, describe
        from hypha_ray.model.lora import ActorCritic, exported, sketch_trained
        from hypha_ray.model.tasks import find_task, require_trainable

    task = find_task(job.model.type, job.model.input_names)
    if not all(group.bridged for group in job.worker_groups):
        require_trainable(task)
    modules = sketch_trained(job)
    network = exported(modules)
    if job.model.factory is not None:
        check_factory(job.model, network)
    with_critic = modules if isinstance(modules, ActorCritic) else None
    return Case(job, source, network, task, describe(network, task), with_critic)


def check_case(case: Case) -> list[str]:
    """Refuse a model that doesn't fit its settings, the dataset or the given weights.

    A resumed run was checked when it began.

    Returns:
        Notes for the user.

    Raises:
        HyphaError: the model, its weights, or the dataset for it is wrong.

    """
    with uncollected():
        from hypha_ray.driver.preflight.compatibility import CHECKS, compare_tokens
        from hypha_ray.driver.preflight.notes import muon_notes, reference_notes, token_notes
        from hypha_ray.driver.preflight.trials import check_fused_loss, check_sharding
        from hypha_ray.model.loading.build import compare_weights
        from hypha_ray.model.lora import has_adapter, needs_whole

    for check in CHECKS:
        check(case)
    model = case.job.model
    # For a repository of the hub, the nodes that fetch it report that.
    notes = compare_weights(model, whole=needs_whole(model))
    notes.extend(compare_tokens(case))
    notes.extend(token_notes(case))
    for manifest in case.source.manifests:
        notes.extend(reference_notes(case.job, manifest))
    notes.extend(muon_notes(case))
    if has_adapter(model):
        _check_adapter(case.job)
    notes.extend(_try_copy(case))
    check_sharding(case)
    check_fused_loss(case)
    return notes


def _try_copy(case: Case) -> list[str]:
    """Try a small copy of the model on samples of the dataset; returns notes."""
    with uncollected():
        if case.job.rl.algorithm is None:
            from hypha_ray.driver.preflight.trials import check_loss as check
        else:
            from hypha_ray.driver.preflight.trials import check_rollouts as check
    return check(case)


def _check_adapter(job: Job) -> None:
    """Refuse an adapter that can't be trained."""
    if job.rl.has_critic:
        critic = f"rl.algorithm = {job.rl.algorithm!r} trains a critic beside the policy"
        problem = f"{critic}, and adapters of two models at once aren't supported"
        raise ConfigError("CFG011", problem, fix="choose grpo, or train all weights")
    if any(group.bridged for group in job.worker_groups):
        problem = f"{job.model.repository} is an adapter, and the base model of an external trainer can't be proved"
        raise ConfigError("CFG011", problem, fix="give a whole model, or have Ray start the workers")
    if job.worker.sharding == "full":
        problem = f"{job.model.repository} is an adapter, and worker.sharding trains whole models"
        raise ConfigError("CFG011", problem, fix="give a whole model, or leave worker.sharding out")


def check_fragments(job: Job) -> None:
    """Refuse more fragments than the model can be cut into, for a partial job file without a dataset."""
    if job.sync.fragments == 1:
        return
    with uncollected():
        from hypha_ray.model.layout import layout_of
        from hypha_ray.model.lora import sketch_trained
    layout_of(sketch_trained(job), job.sync.fragments, job.sync.partition)
