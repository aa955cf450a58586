"""Models that a run has saved: their cards, their upload to a hub, and their scores on tasks of lm-evaluation-harness.

A card has nothing of persons, machines or folders. A model is uploaded only if a job asks for it by `checkpoint.push`.
The harness of EleutherAI is an optional package.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from hypha_ray.config import Job
from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.data.manifest import Manifest
from hypha_ray.errors import AuthenticationError, ConfigError, first_line
from hypha_ray.figures import METRIC
from hypha_ray.files import make_private
from hypha_ray.model.sources import BASE, TASK, base_of
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import METRICS, read_jsonl
from hypha_ray.texts import counted

CARD: Final = "README.md"
_FIGURES: Final = ("loss", "val_loss", "perplexity", "accuracy", "reward", "pass@1")
"""Names of figures of rounds and evaluations that a card shows."""
_PIPELINES: Final = {
    "causal-lm": "text-generation",
    "seq2seq-lm": "text2text-generation",
    "masked-lm": "fill-mask",
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "image-classification": "image-classification",
}
"""Names of tasks on a hub."""
TOKEN = "HF_TOKEN"
"""Environment variable of the token: the only source of it."""
_DESCRIPTION = "adapter/adapter_config.json"
"""File of a model's folder that names the base of its adapter."""
_TASK = f"adapter/{TASK}"
_UNKNOWN_CAUSE = "HUB004"


def write_cards(folder: Path, job: Job, manifest: Manifest, directory: RunDirectory, round: int) -> None:
    """Write the card of a model that was saved after a round, and that of its adapter.

    Raises:
        OSError: the folder can't be written.

    """
    from hypha_ray.model.saved_model import ADAPTER

    figures = _figures(directory, round)
    base = _base(job)
    for saved_folder in (folder, folder / ADAPTER):
        if saved_folder.is_dir():
            text = card(job, manifest, round, figures, base, has_adapter=saved_folder != folder)
            path = saved_folder / CARD
            path.write_text(text, encoding="utf-8")
            make_private(path)


def card(
    job: Job, manifest: Manifest, round: int, figures: Mapping[str, float], base: str | None, *, has_adapter: bool
) -> str:
    """Return the text of a card.

    Args:
        job: job file of the run.
        manifest: dataset that it was trained on.
        round: round of the weights, counted from 0.
        figures: figures after this round, by name.
        base: hub id of the model that it begins with; None: it is on no hub.
        has_adapter: the card is that of an adapter alone.

    """
    tags = ["hypha_ray", job.rl.algorithm or job.preference.loss or job.sync.strategy]
    if job.model.lora.rank:
        tags.append("lora")
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=base,
        library_name="peft" if has_adapter else "transformers",
        license="unknown",  # A base model's licence holds for models made of it, and isn't known here.
        pipeline_tag=_PIPELINES.get(job.model.type),
        tags=tags,
    )
    sections = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {'Adapter' if has_adapter else 'Model'} trained on {manifest.name}\n",
        "Trained by hypha_ray. The licence of its base model and the terms of its data hold; fill in `license`.\n",
        _table("", _facts(job, manifest, round, base)),
        _table("## Settings\n\n", _settings(job)),
    ]
    if figures:
        rounded = ((name, f"{value:.6g}") for name, value in figures.items())
        sections.append(_table(f"## Figures after round {round + 1}\n\n", rounded))
    return "\n".join(sections)


def _facts(job: Job, manifest: Manifest, round: int, base: str | None) -> Iterator[tuple[str, str]]:
    is_new = job.model.factory is not None or (job.model.config and not job.model.repository)
    begins = "random weights" if is_new else "weights that are on no hub"
    yield "begins with", base or begins
    samples = format(manifest.samples("train"), ",")
    yield "dataset", f"{manifest.name}, {counted(samples, 'sample')}"
    yield "hash of the dataset", manifest.identity
    if job.rounds.counted:
        yield "rounds", f"{round + 1} of {job.rounds.update_rounds}"
    else:
        yield "rounds", str(round + 1)
    if job.rounds.epochs is not None:
        yield "epochs of the whole run", str(job.rounds.epochs)


def _settings(job: Job) -> Iterator[tuple[str, str]]:
    sync = job.sync
    rounds = job.rounds
    inner = job.inner_optimizer
    outer = job.outer_optimizer
    lora = job.model.lora
    yield "task", job.model.type
    yield "exchange", f"{sync.strategy}, {sync.codec}, {counted(job.num_workers, 'worker')}"
    yield "samples of a round", f"{rounds.samples_between_updates:,}"
    yield "largest batch", str(rounds.max_batch_size)
    yield "inner optimizer", f"{inner.name}, learning rate {inner.learning_rate:g}, {inner.schedule}"
    yield "outer optimizer", f"{outer.name}, learning rate {outer.learning_rate:g}, momentum {outer.momentum:g}"
    yield "seed", str(job.run.seed)
    if lora.rank is not None:
        yield "adapter", f"LoRA of rank {lora.rank}"
    preference = job.preference
    if preference.loss is not None:
        yield "preferences", f"{preference.loss}, beta {preference.beta:g}, reference {preference.reference}"
    rl = job.rl
    if rl.algorithm is not None:
        generation = rl.generation
        yield "reinforcement learning", f"{rl.algorithm}, {counted(rl.group_size, 'response')} to a prompt"
        yield "responses", f"up to {generation.max_response_tokens} tokens, temperature {generation.temperature:g}"


def _table(title: str, rows: Iterator[tuple[str, str]]) -> str:
    """Return a table with a title."""
    lines = [f"| {name} | {value.replace('|', ' ')} |\n" for name, value in rows]
    return f"{title}| | |\n|---|---|\n{''.join(lines)}"


def _figures(directory: RunDirectory, round: int) -> dict[str, float]:
    """Return the last figures of training and of evaluation up to a round."""
    records = read_jsonl(directory.path / METRICS, ["round", "eval"])
    figures: dict[str, float] = {}
    for record in records:
        if record.get("round", 0) > round:
            continue
        metrics = [name for name in record if name.startswith(METRIC)]
        for name in (*_FIGURES, *metrics):
            value = record.get(name)
            if isinstance(value, int | float):
                figures[name] = float(value)
    return figures


def _base(job: Job) -> str | None:
    """Return the hub id of the model that a job begins with; None if it is on no hub."""
    if not job.model.repository:
        return None
    model, _ = base_of(job.model)
    repository = str(model.repository)
    is_local = repository.startswith(("/", ".", "~")) or Path(repository).is_dir()
    return None if is_local else repository


def check_upload(repository: str) -> list[str]:
    """Refuse an upload that can't succeed, before a job starts.

    Returns:
        A note if the hub can't be reached now.

    Raises:
        AuthenticationError: HUB006 without a token, HUB002 with a token that the hub refuses.
        ConfigError: CFG011 if the hub isn't asked at all.

    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    fix = f"export {TOKEN} with a token that may write, or leave checkpoint.push out"
    token = os.environ.get(TOKEN)
    if token is None:
        raise AuthenticationError("HUB006", f"checkpoint.push = {repository!r} needs a token", f"no {TOKEN}", fix=fix)
    if constants.HF_HUB_OFFLINE:
        fix = "unset HF_HUB_OFFLINE, or leave checkpoint.push out"
        raise ConfigError("CFG011", "checkpoint.push and HF_HUB_OFFLINE exclude each other", fix=fix)
    try:
        HfApi(token=token).whoami()
    except Exception as error:  # Clients raise anything from OSError to errors of their HTTP library.
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403):
            raise AuthenticationError("HUB002", f"the hub refuses {TOKEN}", f"HTTP {status}", fix=fix) from None
        return [f"the hub can't be reached now ({first_line(error)}); the upload to {repository} is tried at the end"]
    return []


def upload(folder: Path, repository: str, message: str) -> str:
    """Upload a model; a repository that doesn't exist is created, and is private.

    Returns:
        Result for the user; a failure costs nothing but the upload.

    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    retry = "the same command tries again"
    token = os.environ.get(TOKEN)
    if token is None:
        return f"the model isn't uploaded to {repository}, since {TOKEN} isn't set; {retry}"
    try:
        api = HfApi(token=token)
        api.create_repo(repository, private=True, exist_ok=True)
        changed_files = _without_paths(folder)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message, ignore_patterns=list(changed_files)
        )
        for name, content in changed_files.items():
            api.upload_file(path_or_fileobj=content, path_in_repo=name, repo_id=repository, commit_message=message)
    except Exception as error:  # Clients raise anything from OSError to errors of their HTTP library.
        return f"the model isn't uploaded to {repository}: {first_line(error.__cause__ or error)}; {retry}"
    return f"the model is uploaded to {repository}"


def _without_paths(folder: Path) -> dict[str, bytes]:
    """Return files of an adapter that tell a path of its base model, with the last part of it alone."""
    file = folder / _DESCRIPTION
    if not file.is_file():
        return {}
    settings = json.loads(file.read_bytes())
    base = str(settings.get("base_model_name_or_path"))
    if not base.startswith(("/", ".", "~")):
        return {}
    settings["base_model_name_or_path"] = Path(base).name
    changed_files = {_DESCRIPTION: json.dumps(settings, indent=2).encode()}
    if (folder / _TASK).is_file():
        task = json.loads((folder / _TASK).read_bytes())
        task.pop(BASE, None)
        changed_files[_TASK] = json.dumps(task, indent=1).encode()
    return changed_files


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
    folder: Path, tasks: Sequence[str], task_folder: Path | None, batch_size: int, seed: int
) -> tuple[str, dict[str, float]]:
    """Score a language model on tasks.

    Args:
        folder: folder with the model and its tokenizer.
        tasks: names of tasks, or of groups of them.
        task_folder: folder with tasks in YAML files, besides those of the package; None: no further ones.
        batch_size: number of requests that the model answers at once.
        seed: seed of the examples in prompts, and of sampling.

    Returns:
        Name of the model's class, and figures as ``task/metric``, or ``task/metric/filter`` if the task has filters.

    Raises:
        ConfigError: EVL001 no package, EVL002 unknown task, EVL003 a task can't be run, GEN002 no language model.
        HyphaError: the model can't be loaded, or the data of a task can't be fetched.

    """
    check_harness()
    manager = _known_tasks(tasks, task_folder)
    from hypha_ray.model.environment import device_of
    from hypha_ray.model.saved_model import open_saved
    from hypha_ray.model.tokenizers import load_preprocessor, settle_generation, tokenizer_of

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
    from hypha_ray.data.sources.documents import explain
    from hypha_ray.model.configuration import errors_as

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


def _known_tasks(tasks: Sequence[str], task_folder: Path | None) -> Any:
    """Return the harness' list of tasks, which has these.

    Raises:
        ConfigError: EVL002 unknown task, EVL003 the list can't be made.

    """
    from hypha_ray.model.configuration import errors_as

    with errors_as(ConfigError, "EVL003", f"lm-eval can't run {' '.join(tasks)}"):
        return _task_manager(tasks, task_folder)


def _task_manager(tasks: Sequence[str], task_folder: Path | None) -> Any:
    """Return the harness' list of tasks: of the folder alone if that has them all, which saves many seconds.

    Raises:
        ConfigError: EVL002.

    """
    from lm_eval.tasks import TaskManager

    if task_folder is not None:
        folder_manager = TaskManager(include_path=str(task_folder), include_defaults=False)
        if set(tasks) <= set(folder_manager.all_subtasks):
            return folder_manager
    manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
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
