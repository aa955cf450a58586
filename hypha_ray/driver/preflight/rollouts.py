"""Checks of a job of reinforcement learning: its model, its prompts, its rewards, and that the model can generate."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from hypha_ray.driver.datasets.data_source import samples_at
from hypha_ray.driver.datasets.job_tokenizer import job_preprocessor
from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.checks.positions import max_positions, require_positions
from hypha_ray.model.checks.small_copies import check_on_copy
from hypha_ray.model.loading.build import random_model
from hypha_ray.model.loading.tokenizer import tokenizer_of
from hypha_ray.rl.check import check_generation
from hypha_ray.rl.environments.trial import try_environment
from hypha_ray.rl.policy import end_tokens
from hypha_ray.rl.reward_data import records_of
from hypha_ray.rl.reward_model import unscored
from hypha_ray.rl.rewards.response import TrainerState
from hypha_ray.rl.scoring import Scorer
from hypha_ray.types import Arrays, Samples, dataset_of, joined

_SAMPLES = 3
"""Number of prompts in the check of generation."""


def check_rollouts(case: Case) -> list[str]:
    """Refuse a job whose model can't be trained on its prompts.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: model, tokenizer, reward functions or environment don't allow it.
        DataError: the dataset has no prompts, or they leave no room for responses.

    """
    _check_kind(case)
    response = case.job.rl.generation.max_response_tokens
    require_positions(case.network, case.task, case.shapes, f"dataset {case.manifest.name!r}", response)
    tokenizer = tokenizer_of(job_preprocessor(case.job, case.source))
    slices = _first_slices(case)
    prompts = joined([_few_prompts(index, arrays) for index, arrays in slices.items()])
    scorer = Scorer(case.job.rl, tokenizer, unscored(case.job.rl.reward, case.job.model))
    notes: list[str] = []
    scorer.check(prompts.arrays, TrainerState.of(case.job.rounds, 0, 0))
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


def _check_kind(case: Case) -> None:
    if case.task.name != "causal-lm":
        problem = "reinforcement learning can't train this model.type"
        fix = "set model.type, or leave rl.algorithm out"
        raise ConfigError("RL001", problem, case.task.name, "causal-lm", fix)
    if case.manifest.modality != "prompts":
        problem = f"dataset {case.manifest.name!r} has no prompts"
        fix = "prepare prompts: --source problems:NAME, or --prompt-column and --answer-column"
        raise DataError("RL002", problem, case.manifest.modality, "prompts", fix)


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
    listed = ", ".join(sorted(tasks))
    return [f"rl.reward.tasks names {', '.join(missing)}, and the first prompts are of {listed} alone"]


def _few_prompts(index: int, arrays: Arrays) -> Samples:
    """Return a few prompts of a slice, the shortest and the longest among them."""
    by_length: Any = np.argsort(arrays["attention_mask"].sum(1), kind="stable")
    positions = np.linspace(0, len(by_length) - 1, _SAMPLES).round().astype(int)
    rows = by_length[np.unique(positions)]
    return samples_at(rows, arrays, index)
