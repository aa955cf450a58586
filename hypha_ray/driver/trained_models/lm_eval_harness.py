"""Scores of a saved language model on tasks of EleutherAI's lm-evaluation-harness, an optional package."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.errors import ConfigError

_UNKNOWN_CAUSE = "HUB004"


def check_harness() -> None:
    """Refuse an evaluation if the package isn't installed.

    Raises:
        ConfigError: EVL001.

    """
    if importlib.util.find_spec("lm_eval") is None:
        problem = "--lm-eval needs the package lm-eval"
        fix = "pip install 'hypha_ray[eval]', or give a --dataset"
        raise ConfigError("EVL001", problem, "it isn't installed", fix=fix)


def score_tasks(
    folder: Path, tasks: Sequence[str], further: Path | None, batch_size: int, seed: int
) -> tuple[str, dict[str, float]]:
    """Score a language model on tasks.

    Args:
        folder: folder with the model and its tokenizer.
        tasks: names of tasks, or of groups of them.
        further: folder with tasks in YAML files, besides those of the package; None: no further ones.
        batch_size: number of requests that the model answers at once.
        seed: seed of the examples in prompts, and of sampling.

    Returns:
        Name of the model's class, and figures as ``task/metric``, or ``task/metric/filter`` if the task has filters.

    Raises:
        ConfigError: EVL001 no package, EVL002 unknown task, EVL003 a task can't be run, GEN002 no language model.
        HyphaError: the model can't be loaded, or the data of a task can't be fetched.

    """
    check_harness()
    manager = _known_tasks(tasks, further)
    from hypha_ray.model.environment import device_of
    from hypha_ray.model.loading.preprocess import load_preprocessor
    from hypha_ray.model.loading.tokenizer import tokenizer_of
    from hypha_ray.model.saved_model import open_saved
    from hypha_ray.model.vocabulary import settle_generation

    network, task = open_saved(folder)
    if task.name != "causal-lm":
        raise ConfigError("GEN002", "lm-eval scores language models", task.name, "causal-lm")
    tokenizer = tokenizer_of(load_preprocessor(Preprocessor(), None, Model(repository=str(folder))))
    settle_generation(network, tokenizer)
    results = _evaluate(network.to(device_of("auto")), tokenizer, tasks, manager, batch_size, seed)
    return type(network).__name__, dict(figures_of(results))


def _evaluate(
    network: Any, tokenizer: Any, tasks: Sequence[str], manager: Any, batch_size: int, seed: int
) -> dict[str, Any]:
    """Return the "results" of the harness: a table of figures for each task."""
    from hypha_ray.data.preparation.sources.hub_errors import explain
    from hypha_ray.model.loading.configuration import errors_as

    names = " ".join(tasks)
    with errors_as(ConfigError, "EVL003", f"lm-eval can't run {names}"):
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        # Texts of a causal model are encoded without an end, which a few tokenizers add, and the harness would score.
        adds_end = tokenizer.encode("a")[-1:] == [tokenizer.eos_token_id]
        specials = {"add_bos_token": False} if adds_end else {}
        model = HFLM(pretrained=network, tokenizer=tokenizer, batch_size=batch_size, **specials)
        seeds = {f"{name}random_seed": seed for name in ("", "numpy_", "torch_", "fewshot_")}
        try:
            answer = simple_evaluate(model=model, tasks=list(tasks), task_manager=manager, log_samples=False, **seeds)
        except Exception as error:
            explained = explain(error, names, "look at dataset_path in the YAML file of the task")
            if explained.code == _UNKNOWN_CAUSE:
                raise
            raise explained from error
    results: dict[str, Any] = answer["results"]
    return results


def _known_tasks(tasks: Sequence[str], further: Path | None) -> Any:
    """Return the harness' list of tasks, which has these.

    Raises:
        ConfigError: EVL002 unknown task, EVL003 the list can't be made.

    """
    from hypha_ray.model.loading.configuration import errors_as

    with errors_as(ConfigError, "EVL003", f"lm-eval can't run {' '.join(tasks)}"):
        return _task_manager(tasks, further)


def _task_manager(tasks: Sequence[str], further: Path | None) -> Any:
    """Return the harness' list of tasks: of the folder alone if that has them all, which saves many seconds.

    Raises:
        ConfigError: EVL002.

    """
    from lm_eval.tasks import TaskManager

    if further is not None:
        folder_manager = TaskManager(include_path=str(further), include_defaults=False)
        if set(tasks) <= set(folder_manager.all_subtasks):
            return folder_manager
    manager = TaskManager(include_path=None if further is None else str(further))
    refuse_unknown(tasks, manager.all_tasks)
    return manager


def refuse_unknown(tasks: Sequence[str], known_tasks: Sequence[str]) -> None:
    """Refuse names that aren't among all known tasks, groups and tags.

    Raises:
        ConfigError: EVL002.

    """
    for task in tasks:
        if task not in known_tasks:
            similar = get_close_matches(task, known_tasks, n=1)
            fix = "name the folder of its YAML file by --include-path"
            if similar:
                fix = f"did you mean {similar[0]!r}?"
            raise ConfigError(
                "EVL002", "lm-eval has no such task", repr(task), f"{len(known_tasks)} tasks and groups", fix
            )


def figures_of(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Return the finite numbers of all tasks; keys of the harness have the form ``metric,filter``."""
    for task, values in results.items():
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if filter_name and is_number and math.isfinite(value):
                name = f"{task}/{metric}"
                if filter_name != "none":
                    name += f"/{filter_name}"
                yield name, float(value)
