"""Checks of a model's loss on samples before a start: as it is, fused with the head, and sharded.

Checks of a job of reinforcement learning: its model, its prompts, its rewards, and that the model can generate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hypha_ray.config.rl import RL
from hypha_ray.driver.data_source import job_preprocessor, samples_at
from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.build import random_model, task_of
from hypha_ray.model.checks import check_on_copy, max_positions, require_positions
from hypha_ray.model.lora import CriticModel
from hypha_ray.model.loss_check import (
    check_fused_on_copy,
    check_loss_on_copy,
    check_metrics_of,
    head_of,
    no_copy_error,
)
from hypha_ray.model.losses import require_mean
from hypha_ray.model.metrics import MASKING_SEED, metrics_named, tensors_of
from hypha_ray.model.preferences.losses import with_preferences
from hypha_ray.model.task import Task, missing_mask_token
from hypha_ray.model.tokenizers import load_special_tokens, tokenizer_of, vocabulary_of
from hypha_ray.rl.engines.continuous import ContinuousEngine
from hypha_ray.rl.engines.native import Completion, Responses, Sampling, draw, generate, responses_of, training_sampling
from hypha_ray.rl.environments.rollouts import EnvironmentRollouts, Integers, Trajectory
from hypha_ray.rl.policy import Policy, end_tokens
from hypha_ray.rl.reward_model import unscored
from hypha_ray.rl.rewards.response import TrainerState, records_of
from hypha_ray.rl.scoring import Scorer
from hypha_ray.texts import counted
from hypha_ray.types import Arrays, Samples, dataset_of, joined

_AT_ONCE = 256
"""Number of samples that are searched at once for something to score."""
_SAMPLES = 3
"""Number of prompts in the check of generation."""
_TOKENS = 8
"""Largest number of tokens of a response."""
_CLOSE = 1e-3
"""Largest difference of two log-probabilities that differ only by rounding."""


def check_loss(case: Case) -> list[str]:
    """Refuse a job whose model has no loss on its dataset, or another loss than its task.

    Losses of trainers outside of Ray are unknown here, and aren't checked.

    Returns:
        Notes about tensors of the dataset that the model isn't fed.

    Raises:
        HyphaError: the loss isn't the task's, the model can't be run on the dataset, or nothing in it can be scored.

    """
    job = case.job
    if case.trains_outside_ray:
        return []
    task, samples = scored_samples(case)
    build = partial(random_model, job.model, case.task)
    if task.objective is not None:
        plain_task = task_of(job.model, case.network)
        check_loss_on_copy(plain_task, _flattened(samples), case.network.config, build, case.facts.parameters)
    is_checked = check_loss_on_copy(task, samples, case.network.config, build, case.facts.parameters)
    if job.model.metrics:
        check = partial(check_metrics_of, metrics_named(job.model.metrics), task, samples)
        check_on_copy(check, case.network.config, build, case.facts.parameters)
    notes = _unused_tensors(case, task, samples)
    if not is_checked:
        architecture = type(case.network).__name__
        notes.append(f"no small copy of {architecture} could be made, so its loss is taken as it is")
    return notes


def _flattened(samples: Samples) -> Samples:
    """Return preferences as samples of one sequence each, on which a language model has its own loss."""
    arrays = {}
    for name in ("input_ids", "attention_mask", "labels"):
        array = samples.arrays[name]
        arrays[name] = array.reshape(-1, array.shape[-1])
    return Samples(arrays, samples.keys.repeat(2, axis=0))


def scored_samples(case: Case) -> tuple[Task, Samples]:
    """Return the completed task, and training samples of which some are scored.

    Raises:
        HyphaError: the loss can't be had as the job wants it, or nothing in the dataset can be scored.

    """
    job = case.job
    masks = case.task.labels == "masked"
    specials = None
    if masks:
        specials = load_special_tokens(job.preprocessor, case.source.folder, job.model)
    task = with_preferences(task_of(job.model, case.network, specials), job.preference)
    require_mean(task, job.sync.traits)
    tensors = {tensor.name for tensor in case.manifest.tensors}
    if masks and task.masking is None and "labels" not in tensors:
        raise missing_mask_token(task.name)
    return task, _scored(case, task)


def _scored(case: Case, task: Task) -> Samples:
    """Return training samples with something to score; both splits must have some.

    Raises:
        DataError: a split has none.

    """
    for split in ("validation", "train"):
        samples = _first_scored(case, task, split)
        if samples is None and case.manifest.of(split):
            problem = f"nothing in {case.manifest.name}/{split} can be scored"
            fix = "prepare the dataset for this task"
            raise DataError("DATA052", problem, f"{task.name} ignores all labels", fix=fix)
    assert samples is not None
    return samples


def _first_scored(case: Case, task: Task, split: str) -> Samples | None:
    """Return the first samples of a split with something to score; None if it has none."""
    for samples in _samples(case, split):
        if task.count(task.inputs(tensors_of(samples), samples.keys, MASKING_SEED)):
            return samples
    return None


def _samples(case: Case, split: str) -> Iterator[Samples]:
    """Return a split's samples in parts of a few hundred."""
    for info in case.manifest.of(split):
        arrays = case.source.read(info)
        for start in range(0, info.samples, _AT_ONCE):
            rows = np.arange(start, min(start + _AT_ONCE, info.samples))
            yield samples_at(rows, arrays, info.index)


def _unused_tensors(case: Case, task: Task, samples: Samples) -> list[str]:
    """Return a note for each tensor of the dataset that the model isn't fed, unless the job chooses tensors."""
    if case.job.model.input_names is not None:
        return []
    used_tensors = {name for name, _, _ in task.model_tensors(tensors_of(samples))}
    if "attention_mask" not in task.accepts:
        used_tensors.add("attention_mask")  # The mask still marks the scored tokens.
    architecture = type(case.network).__name__
    notes = []
    for name in sorted(set(samples.arrays) - used_tensors):
        notes.append(f"the dataset's tensor {name!r} is left out: {architecture} takes none like it")
    return notes


def check_fused_loss(case: Case) -> None:
    """Refuse `worker.fused_loss` for a model whose logits are more than a linear layer of hidden states.

    Raises:
        ConfigError: MODEL020.

    """
    job = case.job
    if job.worker.fused_loss is not True or case.trains_outside_ray:
        return
    head_of(case.task, case.network)
    task, samples = scored_samples(case)
    build = partial(random_model, job.model, case.task)
    if not check_fused_on_copy(task, samples, case.network.config, build, case.facts.parameters):
        raise no_copy_error(case.network)


def check_sharding(case: Case) -> None:
    """Refuse a model whose gradient isn't the same when FSDP2 gathers its blocks one by one.

    Raises:
        ConfigError: MODEL023.

    """
    job = case.job
    if job.worker.sharding == "none" or all(job.processes_in(group) == 1 for group in job.worker_groups):
        return
    from hypha_ray.worker.group.shards import check_sharding_on_copy, sharding_error  # Few jobs need it.

    task, samples = scored_samples(case)
    build = partial(random_model, job.model, case.task)
    if not check_sharding_on_copy(job.worker, task, samples, case.network.config, build, case.facts.parameters):
        raise sharding_error(case.network, "no small copy of it could be made to try that")


def check_rollouts(case: Case) -> list[str]:
    """Refuse a job whose model can't be trained on its prompts.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: model, tokenizer, reward functions or environment don't allow it.
        DataError: the dataset has no prompts, or they leave no room for responses.

    """
    response = case.job.rl.generation.max_response_tokens
    require_positions(case.network, case.task, case.shapes, f"dataset {case.manifest.name!r}", response)
    tokenizer = tokenizer_of(job_preprocessor(case.job, case.source))
    slices = _first_slices(case)
    prompts = joined([_few_prompts(index, arrays) for index, arrays in slices.items()])
    scorer = Scorer(case.job.rl, tokenizer, unscored(case.job.rl.reward, case.job.model))
    notes = scorer.check(prompts.arrays, TrainerState.of(case.job.rounds, 0, 0))
    if case.job.rl.environment is not None:
        positions = max_positions(case.network, decoder=False)
        notes += try_environment(case.job.rl, tokenizer, end_tokens(case.network, tokenizer), positions, prompts)
    check = partial(check_generation, rl=case.job.rl, tokenizer=tokenizer, prompts=prompts)
    build = partial(random_model, case.job.model, case.task)
    is_checked = check_on_copy(check, case.network.config, build, case.facts.parameters)
    notes += _missing_tasks(case, slices)
    if not is_checked:
        architecture = case.facts.architecture
        notes.append(f"no small copy of {architecture} could be made, so its generation isn't checked")
    return notes


def _first_slices(case: Case) -> dict[int, Arrays]:
    """Read the first slice of each dataset of a mixture."""
    first_by_dataset = {dataset_of(info.index): info for info in reversed(case.manifest.of("train"))}
    return {info.index: case.source.read(info) for info in first_by_dataset.values()}


def _missing_tasks(case: Case, slices: Mapping[int, Arrays]) -> list[str]:
    """Return a note if reward functions are given for tasks that no prompt of these slices is of."""
    rewarded_tasks = case.job.rl.reward.by_task
    if not rewarded_tasks:
        return []
    tasks: set[str] = set()
    for arrays in slices.values():
        tasks |= {str(record.get("task")) for record in records_of(arrays["reward_data"])}
    missing = [task for task in rewarded_tasks if task not in tasks]
    if not missing:
        return []
    listed_tasks = ", ".join(sorted(tasks))
    return [f"rl.reward.tasks names {', '.join(missing)}, and the first prompts are of {listed_tasks} alone"]


def _few_prompts(index: int, arrays: Arrays) -> Samples:
    """Return a few prompts of a slice, the shortest and the longest among them."""
    by_length: Any = np.argsort(arrays["attention_mask"].sum(1), kind="stable")
    positions = np.linspace(0, len(by_length) - 1, _SAMPLES).round().astype(int)
    rows = by_length[np.unique(positions)]
    return samples_at(rows, arrays, index)


def check_generation(model: Any, rl: RL, tokenizer: Any, prompts: Samples) -> None:
    """Compare log-probabilities at generation with those of each response by itself, without padding and cache.

    Raises:
        ConfigError: RL005, they differ: the model can't be trained on what it generates. RL014, the algorithm needs a
            critic, and none can be made of the model. RL026, the model can't generate by continuous batching.

    """
    sampling = training_sampling(rl)
    tokens = min(_TOKENS, sampling.max_tokens)
    if rl.has_critic:
        _check_critic(model, prompts)
    ids = torch.from_numpy(prompts.arrays["input_ids"])
    mask = torch.from_numpy(prompts.arrays["attention_mask"])
    policy = Policy(model, rl.generation.temperature, None, vocabulary_of(tokenizer))
    sampling = replace(sampling, samples=1, max_tokens=tokens, vocabulary=policy.vocabulary)
    ends = end_tokens(model, tokenizer)
    if rl.generation.engine == "continuous":
        responses = ContinuousEngine(0, short=0).generate(model, ids, mask, prompts.keys, sampling, ends)
    else:
        responses = generate(model, ids, mask, draw(0, prompts.keys, sampling), sampling, ends)
    for row in range(len(prompts)):
        response = _without_padding(responses, row)
        distances = (policy.logprobs(response) - response.logprobs).abs()
        largest = float(distances.max())
        if not largest <= _CLOSE:
            name = type(model).__name__
            raise ConfigError(
                "RL005",
                f"{name} can't be trained on what it generates: padding or cache change probabilities",
                f"log-probabilities {largest:.2g} apart",
                f"up to {_CLOSE:g}",
                "choose another model",
            )


@torch.no_grad()
def _check_critic(model: Any, prompts: Samples) -> None:
    """Value the states of some prompts."""
    ids = torch.from_numpy(prompts.arrays["input_ids"]).long()
    mask = torch.from_numpy(prompts.arrays["attention_mask"]).long()
    CriticModel(model)(input_ids=ids, attention_mask=mask, use_cache=False)


def _without_padding(responses: Responses, row: int) -> Responses:
    """Return a response without any padding."""
    all_tokens = responses.attention_mask[row].bool()
    response_tokens = responses.mask[row].bool()
    ids = responses.ids[row][all_tokens][None]
    logprobs = responses.logprobs[row][response_tokens][None]
    has_ended = responses.ended[row : row + 1]
    return Responses(ids, torch.ones_like(ids), torch.ones_like(logprobs), logprobs, has_ended)


def try_environment(
    rl: RL, tokenizer: Any, ends: Collection[int], positions: int | None, prompts: Samples
) -> list[str]:
    """Play an episode of each prompt.

    Args:
        rl: table of the job file, which names an environment.
        tokenizer: tokenizer of the run.
        ends: ids of tokens that end a response.
        positions: number of tokens that the model takes; None if it has no limit.
        prompts: the prompts.

    Returns:
        Notes on what happened in the first episode, and on tools that its opening lacks.

    Raises:
        ConfigError: the environment can't be had; RL032, an episode fails.

    """
    records = records_of(prompts.arrays["reward_data"])
    masks = prompts.arrays["attention_mask"].astype(bool)
    token_ids = [ids[mask].tolist() for ids, mask in zip(prompts.arrays["input_ids"], masks, strict=True)]
    answers: dict[tuple[int, ...], list[int]] = {}
    for key, record in zip(prompts.keys.tolist(), records, strict=True):
        answer = tokenizer(str(record.get("answer", "")), add_special_tokens=False)["input_ids"]
        answers[tuple(key)] = [*answer, min(ends)]

    def respond(ids: Integers, mask: Integers, keys: Integers, sampling: Sampling) -> Responses:
        completions: list[Completion] = []
        for key in keys[:, :3].tolist():
            response = answers[tuple(key)][: sampling.max_tokens]
            completions.append(Completion(tuple(response), (0.0,) * len(response), None))
        return responses_of(torch.from_numpy(ids), torch.from_numpy(mask), completions, ends)

    rollouts = EnvironmentRollouts(rl, tokenizer, ends, positions)
    try:
        sampling = replace(training_sampling(rl), samples=1)
        trajectories = rollouts.play(token_ids, prompts.keys, records, sampling, respond)
    finally:
        rollouts.close()
    for trajectory in trajectories:
        if trajectory.episode.failure:
            _refuse(rl, trajectory)
    notes = [_note(rl, trajectories[0])]
    missing_tools = rollouts.missing_tools(trajectories[0])
    if missing_tools:
        fix = "prepare them with a column tools, or let reset give messages"
        notes.append(f"prompts don't name the environment's tools {', '.join(missing_tools)}: {fix}")
    return notes


def _refuse(rl: RL, trajectory: Trajectory) -> None:
    problem = f"environment {rl.environment} fails in an episode whose responses are the right answer"
    fix = f"mend it, or raise rl.episode.deadline_s; the prompt was {trajectory.prompt_end!r}"
    raise ConfigError("RL032", problem, trajectory.episode.failure, "messages and rewards", fix)


def _note(rl: RL, trajectory: Trajectory) -> str:
    prompt = str(trajectory.episode.record["prompt"])[-80:]
    turns_text = counted(len(trajectory.episode.responses), "response")
    end_text = "was ended by it" if trajectory.done else "was ended by the limits of rl.episode"
    trial = f"environment {rl.environment} was tried with the right answer to {prompt!r}"
    return f"{trial}: the episode {end_text} after {turns_text}, with a reward of {trajectory.reward:g}"
