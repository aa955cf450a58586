"""All checks before a start, in one list, for a run and for a dry run.

    settings ──► dataset ──► skeleton of the model ──► model and dataset ──► weights ──► (Ray) ──► cluster

Cheap checks come first. Checks of the model use its skeleton on the meta device, which needs no memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hypha_ray import plugins
from hypha_ray.config import Job
from hypha_ray.config.checks import check_destinations, check_options, plugin_uses
from hypha_ray.config.load import differences, job_of_run, refuse_changes
from hypha_ray.config.rl import MODEL
from hypha_ray.data.catalogue import folders_of
from hypha_ray.data.catalogue import load as load_manifest
from hypha_ray.data.mixture import COPY, mixed
from hypha_ray.driver.dataset_settings import require_preferences, with_classes
from hypha_ray.driver.run_folders import no_run
from hypha_ray.errors import ConfigError
from hypha_ray.exchange_schedule import SETTLING, outer_steps_before, settled_momentum
from hypha_ray.families import ADVANTAGES, CODECS, ENVIRONMENTS, REWARDS
from hypha_ray.files import uncollected
from hypha_ray.model.sources import local_folder
from hypha_ray.optim.schedules import check_schedule, inner_steps
from hypha_ray.plugins import attempt, is_built_in, is_own, look_beside_the_job
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.base import check_built_in

if TYPE_CHECKING:
    from hypha_ray.driver.data_source import DataSource
    from hypha_ray.driver.preflight.compatibility import Case


def check_early(job: Job, directory: RunDirectory | None, resume: bool) -> None:
    """Refuse settings that are wrong with any model, samples and cluster.

    Args:
        job: the job; a partial one is checked as far as possible.
        directory: run directory, which may not exist yet; None: the run has no name yet.
        resume: whether the run has to exist, and may be by another job.

    Raises:
        HyphaError: a setting is wrong, or a file or run that the job names is missing.

    """
    has_begun = directory is not None and directory.begun
    if directory is not None and resume and not has_begun:
        raise no_run(directory.path.name, directory.path.parent)
    check_packages(job)
    check_settings(job)
    if directory is None or not has_begun:
        _check_repositories(job)
        if job.dataset.given:
            folders_of(job.dataset)
    elif job.dataset.given and not (directory.path / COPY).is_dir():
        folders = folders_of(job.dataset)
        if not resume:
            _refuse_another_job(job, directory, folders)


def check_packages(job: Job) -> None:
    """Refuse a sink, an optimizer or quantized weights whose package isn't installed, or has no such member.

    Raises:
        HyphaError: a setting of the job file is wrong.

    """
    check_built_in(job)
    if job.model.quantization is not None:
        from hypha_ray.model.build import check_quantization

        check_quantization()
    inner = job.inner_optimizer.name
    if inner in ("adamw", "muon", "sgd") or is_own("inner_optimizers", inner):
        return
    from hypha_ray.optim.optimizers import EIGHT_BITS, check_eight_bits, optimizer_class

    if inner == EIGHT_BITS:
        check_eight_bits()
    else:
        optimizer_class(inner)


def check_settings(job: Job) -> None:
    """Refuse a schedule, address or device that isn't available.

    Raises:
        HyphaError: a setting of the job file is wrong.

    """
    if job.rounds.counted:
        check_schedule(job.inner_optimizer, inner_steps(job))
    if any(group.dials_in for group in job.worker_groups):
        from hypha_ray.worker.bridged.process import check as check_door

        check_door(job)
    check_devices(job)


def check_devices(job: Job) -> None:
    """Refuse GPUs and processes that a worker wouldn't use, and a device that it couldn't see.

    Ray shows a worker only the GPUs that it reserves. An external trainer isn't limited by Ray.

    Raises:
        ConfigError: CFG003 too many or too few of them, CFG011 no GPU.

    """
    common_key = "resources.min_gpus" if job.resources.min_gpus else "resources.worker.gpu"
    for number, group in enumerate(job.worker_groups):
        if group.bridged:
            continue
        key = f"workers.{number}.gpu" if job.workers else common_key
        _check_processes(job, key, group.gpu, job.processes_in(group))
        if job.worker.device == "cuda" and not group.gpu:
            fix = "reserve a GPU or a part of one, or leave worker.device at auto"
            raise ConfigError("CFG011", f'worker.device = "cuda" and {key} = 0 exclude each other', fix=fix)


def _check_processes(job: Job, key: str, gpus: float, processes: int) -> None:
    """Refuse processes of a worker without a GPU each or without a sample; those of an island may share GPUs."""
    supervised = job.rl.algorithm is None
    if gpus != processes and (gpus > 1 or (supervised and gpus and processes > 1)):
        setting = "rl.model_workers"
        fix = "set it to the GPUs"
        if supervised:
            setting = "worker.processes"
            fix = "leave it out"
        problem = f"{key}: a process of a worker uses one GPU, and {setting} is {processes}"
        raise ConfigError("CFG003", problem, f"{gpus:g}", f"{processes}", fix)
    batch_size = job.rounds.max_batch_size
    if supervised and processes > batch_size:
        problem = f"rounds.max_batch_size: the {processes} processes of a worker share each batch"
        fix = "raise it, or have fewer processes"
        raise ConfigError("CFG003", problem, str(batch_size), f"{processes} or more", fix)


def _check_repositories(job: Job) -> None:
    """Refuse missing folders of models, and unknown reward functions and environments."""
    rewards = None if job.rl.algorithm is None else job.rl.reward
    repositories = [job.model.repository, job.preprocessor.repository]
    if rewards is not None and MODEL in rewards.functions:
        repositories.append(rewards.model.repository)
    for repository in repositories:
        if repository is not None:
            local_folder(repository)
    if rewards is not None:
        from hypha_ray.rl.rewards.calls import require_known

        require_known(rewards.loaded_functions)
        if job.rl.environment is not None:
            plugins.require_known("environments", job.rl.environment)


def _refuse_another_job(job: Job, directory: RunDirectory, folders: list[Path]) -> None:
    """Refuse the name of a run by another job, if all of the datasets are on this machine."""
    if len(folders) == len(job.dataset.parts):
        manifests = [load_manifest(folder) for folder in folders]
        manifest = mixed(manifests) if job.dataset.mix else manifests[0]
        job = with_classes(job, manifest)
        run_job = job_of_run(directory.path)
        refuse_changes(differences(job, run_job), directory.path)


def advice(job: Job, gpus: float = 0.0) -> Iterator[str]:
    """Advice on a job, as texts; `gpus` is the number of GPUs of the cluster."""
    yield from _of_gpus(job, gpus)
    yield from _of_sparse_gradients(job)
    yield from _of_momentum(job)
    yield from _of_delay(job)
    yield from _of_policies(job)


def _of_gpus(job: Job, gpus: float) -> Iterator[str]:
    """Advice on GPUs that no worker leases: a worker uses only the GPUs of its lease."""
    leases_gpus = any(group.gpu for group in job.worker_groups if not group.bridged)
    if gpus and not leases_gpus and job.worker.device == "auto":
        yield f"all workers train on CPUs, because none leases a GPU, and there are {gpus:g}: set resources.worker.gpu"


def _of_sparse_gradients(job: Job) -> Iterator[str]:
    if job.sync.traits.sends_gradients and job.sync.codec == "topk" and "adam" in job.inner_optimizer.name:
        problem = f"{job.inner_optimizer.name} on topk gradients learns less than one worker alone"
        yield f"{problem}: its second moment meets values that come rarely and large; choose another codec, or sgd"


def _of_momentum(job: Job) -> Iterator[str]:
    """Advice on momentum, which steps once per exchange of a fragment, or with every delta without a barrier."""
    sync = job.sync
    momentum = job.outer_optimizer.momentum
    rounds = job.rounds.update_rounds
    steps = min(outer_steps_before(job, rounds, fragment) for fragment in range(sync.fragments))
    available = f"each of {sync.fragments} fragments has" if sync.staggered else "there are"
    if not sync.traits.has_barrier and not sync.delayed_nesterov:
        steps *= sync.period or job.num_workers
    if sync.traits.sends_gradients or job.outer_optimizer.name != "nesterov" or not momentum or not steps:
        return
    needed = round(SETTLING / (1 - momentum))
    if needed > steps:
        better = settled_momentum(steps)
        problem = (
            f"outer_optimizer.momentum {momentum:g} takes about {needed} rounds to settle, and {available} {steps}"
        )
        yield f"{problem}: {better:g} would do, or more and shorter rounds"


def _of_delay(job: Job) -> Iterator[str]:
    """Advice on mixing: without it, a worker drops its steps on a fragment between a delta and the result."""
    sync = job.sync
    global_batch = job.num_workers * job.rounds.max_batch_size
    round_batches = math.ceil(job.samples(job.rounds.warmup_rounds) / global_batch)
    period = round_batches
    if sync.staggered:
        period *= sync.fragments
    delay = round_batches * (sync.in_flight - 1) + sync.delay_steps
    if not sync.mixing and 2 * delay > period:
        lateness_text = f"results come {delay} batches late, and are exchanged every {period} or so of a worker"
        loss = "all that it learns of a fragment meanwhile is dropped"
        yield f"{lateness_text}: {loss}; set sync.mixing, or make rounds longer"


def _of_policies(job: Job) -> Iterator[str]:
    """Advice on momentum of policies, whose deltas agree at first."""
    outer = job.outer_optimizer
    if job.rl.algorithm is None or job.sync.traits.sends_gradients:
        return
    if outer.name == "nesterov" and outer.momentum > 0.5:
        yield f"outer_optimizer.momentum {outer.momentum:g} makes policies lose their entropy: take up to 0.5"


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

            check_advantages(use.name, use.options, must_be_separate=True)
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
        pool.tools()  # This loads the environment.
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
            from hypha_ray.model.tokenizers import load_preprocessor
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
        from hypha_ray.model.build import check_factory, describe
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
        from hypha_ray.driver.preflight.notes import muon_notes, preference_notes, token_notes
        from hypha_ray.driver.preflight.trials import check_fused_loss, check_sharding
        from hypha_ray.model.build import compare_weights
        from hypha_ray.model.lora import has_adapter, needs_whole

    for check in CHECKS:
        check(case)
    model = case.job.model
    # For a repository of the hub, the nodes that fetch it report that.
    notes = compare_weights(model, needs_all=needs_whole(model))
    notes.extend(compare_tokens(case))
    notes.extend(token_notes(case))
    for manifest in case.source.manifests:
        notes.extend(preference_notes(case.job, manifest))
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
        critic_text = f"rl.algorithm = {job.rl.algorithm!r} trains a critic beside the policy"
        problem = f"{critic_text}, and adapters of two models at once aren't supported"
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
