"""Evaluation of a saved model on a prepared dataset: the loss and what follows from it, or rewards of answers.

The model is a folder, or a run by its name or directory.

    find_model ──► ModelSource ──(libraries are loaded)──► ModelSource.opened

Job scripts import this to parse their command line, so heavy modules are imported late: to find a model takes none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from pydantic import ValidationError

from hypha_ray import plugins
from hypha_ray.config.entry_point import print_notes
from hypha_ray.config.options import flag_of
from hypha_ray.config.rl import ENVIRONMENT, MODEL, RL
from hypha_ray.driver.run_folders import find_run
from hypha_ray.errors import CheckpointError, ConfigError, DataError
from hypha_ray.files import uncollected
from hypha_ray.model.sources import IDENTITY, TASK, local_folder, read_config
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import EVENTS, read_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypha_ray.config import Job
    from hypha_ray.data.manifest import Manifest
    from hypha_ray.driver.data_source import DataSource
    from hypha_ray.driver.run import Run
    from hypha_ray.types import SliceInfo


_ADAPTER = "adapter_config.json"
Begin: TypeAlias = Callable[[str], None]
"""Function that is called with each phase as it begins."""
_MODEL = "model"
"""Folder of a run's saved model."""
_OF_ANSWERS: Final = {"environment", "environment_options", "episode", "evaluation", "reward"}
"""Settings of a run's answers; how they are generated is the evaluation's own."""
_TABLES: Final = {
    "turns": "episode",
    "max_response_tokens": "generation",
    "samples": "evaluation",
    "temperature": "evaluation",
}
"""Tables of the options that have their names there."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that exists: a folder, or a snapshot of a run.

    `folder` is None for a snapshot, which `run` and `round` identify.
    """

    folder: Path | None
    run: Run | None = None
    round: int | None = None

    def job(self) -> Job | None:
        """Return the job of the run that saved the model, with its first inputs; None if the model lies in no run.

        Raises:
            HyphaError: the run's job file can't be read.

        """
        directory = self._run_directory()
        if directory is None:
            return None
        from hypha_ray.config.load import job_of_run

        return job_of_run(directory.path).beginning_with(read_json(directory.path / IDENTITY))

    def notes(self) -> Iterator[str]:
        """Yield a note if the run that saved the model has gone on since, as one that was resumed and then ended."""
        directory = self._run_directory()
        if self.folder is None or directory is None:
            return
        from hypha_ray.store.snapshots import rounds

        saved_round = read_json(self.folder / TASK).get("round")
        newest_round = max(rounds(directory.path), default=0)
        if isinstance(saved_round, int) and saved_round < newest_round:
            fix = f"give the run and --round {newest_round + 1}, or save it by jobs/export.py {directory.path.name}"
            problem = (
                f"the saved model is of round {saved_round + 1}, and the run has gone on to round {newest_round + 1}"
            )
            yield f"{problem}: {fix}"

    def _run_directory(self) -> RunDirectory | None:
        if self.run is not None:
            return RunDirectory(self.run.path)
        assert self.folder is not None
        folder = self.folder.absolute()
        if (folder / _ADAPTER).is_file() and folder.parent.name == _MODEL:
            folder = folder.parent
        directory = RunDirectory(folder.parent)
        if folder.name != _MODEL or not (directory.path / EVENTS).is_file():  # Other tools have a config.toml, too.
            return None
        return directory

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Yield the folder of the model; the folder of a snapshot exists until the context ends.

        Raises:
            HyphaError: the snapshot can't be saved as a model.

        """
        if self.folder is not None:
            yield self.folder
            return
        assert self.run is not None and self.round is not None
        with tempfile.TemporaryDirectory() as scratch:
            save_snapshot(self.run, Path(scratch, "model"), self.round)
            yield Path(scratch, "model")


def save_snapshot(run: Run, folder: Path, round: int, compatible: int | None = None, dtype: str | None = None) -> None:
    """Save the weights of a run's snapshot as `Run.export` does, with errors in the words of commands."""
    run.require_snapshot(round)
    from hypha_ray.driver.data_source import run_copy
    from hypha_ray.driver.launch import export_round

    job = run.job.saving(dtype)
    directory = RunDirectory(run.path)
    export_round(job, directory, run_copy(job.dataset, directory), round, folder, compatible)


def find_model(model: str, round: int | None = None) -> ModelSource:
    """Find a model.

    Args:
        model: folder from `save_pretrained` or PEFT, or a run by its name or directory.
        round: round of a run, counted from 0, that has a snapshot; None: the saved model, otherwise the newest one.

    Raises:
        ConfigError: CFG011, a round of a folder that is no run.
        CheckpointError: there is no such run, or no snapshot of the round.

    """
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file() or (folder / _ADAPTER).is_file():
        if round is not None:
            fix = "leave --round out, or give the run"
            raise ConfigError("CFG011", "--round and the folder of a model exclude each other", fix=fix)
        return ModelSource(folder)
    from hypha_ray.driver.run import Run

    fix = "give the folder of a model, or the name or folder of a run"
    run = Run(find_run(model, None, None, fix))
    if round is not None:
        run.require_snapshot(round)
        return ModelSource(None, run, round)
    if run.model.is_dir():
        return ModelSource(run.model)
    return ModelSource(None, run, run.newest_snapshot)


def find_model_or_folder(model: str, round: int | None = None) -> ModelSource:
    """Find a model as `find_model` does; a path that leads to no run has to be the folder of a model.

    Raises:
        HyphaError: there is no such folder or run, or no configuration in the folder.

    """
    folder = Path(model).expanduser()
    if "/" not in model or RunDirectory(folder).begun or round is not None:
        return find_model(model, round)
    local_folder(str(folder.absolute()))
    if not (folder / _ADAPTER).is_file():
        read_config(folder)
    return ModelSource(folder)


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Dataset and settings of an evaluation; those of answers count for prompts alone."""

    dataset: str
    """Folder of the prepared dataset, or its name."""
    split: str = "validation"
    batch_size: int = 32
    """Number of samples in a batch; the result doesn't depend on it."""
    type: str | None = None
    """Task, as `model.type`; None: the model's own."""
    reward: str | None = None
    """Reward function of answers; None: those of the run that saved the model, with what is None below; otherwise
    ``exact``, or with an environment its own, and `RL`'s defaults."""
    reward_model: str | None = None
    """Folder or hub id of the reward model; None: no function asks one."""
    environment: str | None = None
    """Environment that answers are a conversation with; None: that of the run that saved the model, unless `reward`
    is given."""
    turns: int | None = None
    """Number of answers after which such a conversation is over."""
    metrics: list[str] | None = None
    """Further figures, as `model.metrics`; None: those of the run that saved the model."""
    reference: str | None = None
    """Folder of the reference model of preferences; None: none."""
    max_response_tokens: int | None = None
    """Number of tokens after which an answer is cut off."""
    samples: int | None = None
    """Number of answers to each prompt."""
    temperature: float | None = None
    """Divisor of logits; 0: the most probable token each time."""
    seed: int = 0


def require_sizes(batch_size: int, seed: int, type: str | None) -> None:
    """Refuse settings of an evaluation that are out of range.

    Raises:
        ConfigError: CFG003, a number is out of range; MODEL001, there is no such task.

    """
    for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
        if value < least:
            raise ConfigError("CFG003", f"{flag_of(name)} is out of range", str(value), f"{least} or more")
    if type is not None:
        from hypha_ray.model.tasks import find_task

        find_task(type)


def evaluate_on_dataset(request: EvaluationRequest, model: ModelSource, begin: Begin) -> tuple[str, dict[str, float]]:
    """Return model, task and split, and the figures of a prepared dataset.

    Raises:
        ConfigError: as `require_sizes`; RWD003, there is no such reward function; PLG001, there is no such environment.
        DataError: DATA001, there is no such dataset; DATA051, it has no such split.

    """
    require_sizes(request.batch_size, request.seed, request.type)
    from hypha_ray.data.catalogue import folders_of, resolve_dataset

    dataset = resolve_dataset(request.dataset)
    folders_of(dataset)
    begin("loading libraries, model and data")
    from hypha_ray.driver.data_source import opened
    from hypha_ray.driver.preflight.notes import notes_of_saved

    with opened(dataset) as source:
        manifest = source.manifest
        infos = manifest.of(request.split)
        if not infos:
            splits_text = ", ".join(sorted({info.split for info in manifest.slices}))
            raise DataError("DATA051", f"dataset {manifest.name!r} has no such split", request.split, splits_text)
        _require_effect(request, manifest)
        score = score_samples
        if manifest.modality == "prompts":
            score = score_answers
            from hypha_ray.rl.rewards.calls import require_known

            rl = rl_of(request, model.job())
            require_known(rl.reward.loaded_functions)
            if rl.environment is not None:
                plugins.require_known("environments", rl.environment)
        with model.opened() as folder:
            source.require_tokens_of(folder)
            print_notes(notes_of_saved(folder, manifest))
            subject, figures = score(request, ModelCase(folder, model.job()), source, infos, begin)
    return f"{subject}  {manifest.name}/{request.split}", figures


def _require_effect(request: EvaluationRequest, manifest: Manifest) -> None:
    """Refuse settings that mean nothing to a dataset.

    Raises:
        ConfigError: CFG011, one has no effect; PLG001, there is no such metric.

    """
    is_of_preferences = manifest.modality == "preferences"
    if request.reference is not None and not is_of_preferences:
        problem = f"--reference has no effect on dataset {manifest.name!r}"
        raise ConfigError("CFG011", problem, manifest.modality, "preferences", "leave it out")
    if request.metrics and (is_of_preferences or manifest.modality == "prompts"):
        problem = f"--metrics has no effect on dataset {manifest.name!r}, whose figures are rewards"
        raise ConfigError("CFG011", problem, manifest.modality, "samples with labels", "leave it out")
    for name in request.metrics or []:
        plugins.require_known("metrics", name)


class ModelCase(NamedTuple):
    """A saved model, and where it is from."""

    folder: Path
    job: Job | None
    """Job of the run that saved it; None: it isn't in a run directory."""

    def metrics(self, request: EvaluationRequest) -> list[str]:
        """Return the names of further figures: those of a request, otherwise those of the run."""
        if request.metrics is not None:
            return request.metrics
        return [] if self.job is None else self.job.model.metrics


def score_samples(
    request: EvaluationRequest, model: ModelCase, source: DataSource, infos: Sequence[SliceInfo], begin: Begin
) -> tuple[str, dict[str, float]]:
    """Return model and task, and the loss with figures that follow from it."""
    with uncollected():
        from hypha_ray.driver.dataset_settings import by_number, preference_task, relabelled, require_fitting_labels
        from hypha_ray.model.build import describe
        from hypha_ray.model.checks import require_positions
        from hypha_ray.model.environment import device_of
        from hypha_ray.model.loss_check import check_loss_of, check_metrics_of
        from hypha_ray.model.metrics import batches_of, evaluate, metrics_named, metrics_of
        from hypha_ray.model.saved_model import open_saved
        from hypha_ray.model.tasks import require_trainable

    plugins.look_beside_the_job()
    manifest = source.manifest
    device = device_of("auto")
    network, task = open_saved(model.folder, request.type, None if model.job is None else model.job.model)
    require_trainable(task)
    task.require_tensors(manifest.shapes.keys())
    scored_by = task.name
    if manifest.modality == "preferences":
        task, scored_by = preference_task(task, model.job, manifest, request.reference, device)
    require_positions(network, task, manifest.shapes, f"dataset {manifest.name!r}")
    facts = describe(network, task)
    manifest.require(facts.vocab_size, facts.num_labels)
    require_fitting_labels(manifest, task, network.config)
    id2label = network.config.id2label
    slices = relabelled(map(source.read, infos), manifest, task, id2label)
    batches = batches_of(slices, request.batch_size, [info.index for info in infos])
    first_batch = next(batches)
    check_loss_of(task, network, first_batch)
    print_notes(filter(None, [by_number(manifest, task, id2label)]))
    metrics = metrics_named(model.metrics(request))
    if metrics:
        check_metrics_of(metrics, task, first_batch, network)
    begin("evaluating")
    sums = evaluate(network.to(device), task, chain([first_batch], batches), device, metrics=metrics)
    loss_sum, count = sums["val_loss"]
    if not count:
        fix = "choose another --split, or prepare the dataset for this task"
        raise DataError("DATA052", f"nothing in {manifest.name}/{request.split} can be scored", task.name, fix=fix)
    figures = {name: value for name, value in metrics_of(task, sums, metrics).items() if value is not None}
    if "val_loss" not in figures:
        raise CheckpointError("MODEL018", "the model's loss isn't a finite number", f"{loss_sum / count}")
    return f"{facts.architecture}  {scored_by}", figures


def score_answers(
    request: EvaluationRequest, model: ModelCase, source: DataSource, infos: Sequence[SliceInfo], begin: Begin
) -> tuple[str, dict[str, float]]:
    """Return the model, and rewards and lengths of its answers; they are those of a run with the same settings."""
    rl = rl_of(request, model.job)
    with uncollected():
        from hypha_ray.config.schema import Model, Preprocessor
        from hypha_ray.driver.data_source import preprocessor_for
        from hypha_ray.model.build import describe
        from hypha_ray.model.checks import require_positions
        from hypha_ray.model.environment import device_of
        from hypha_ray.model.metrics import batches_of
        from hypha_ray.model.saved_model import open_saved
        from hypha_ray.model.tokenizers import tokenizer_of, vocabulary_of
        from hypha_ray.rl.dataflow.model_worker import master_of
        from hypha_ray.rl.environments.rollouts import EnvironmentRollouts
        from hypha_ray.rl.island import validate
        from hypha_ray.rl.policy import Policy, end_tokens
        from hypha_ray.rl.policy_roles import Generator
        from hypha_ray.rl.reward_model import load_scores
        from hypha_ray.rl.reward_role import RewardRole
        from hypha_ray.rl.scoring import Scorer
        from hypha_ray.types.events import means

    plugins.look_beside_the_job()
    network, task = open_saved(model.folder, request.type)
    if task.name != "causal-lm":
        fix = "evaluate a language model, or another dataset"
        raise ConfigError("RL001", "this model can't answer prompts", task.name, "causal-lm", fix)
    manifest = source.manifest
    require_positions(network, task, manifest.shapes, f"dataset {manifest.name!r}", rl.generation.max_response_tokens)
    manifest.require(describe(network, task).vocab_size)
    tokenizer = tokenizer_of(preprocessor_for(Preprocessor(), Model(repository=str(model.folder)), source))
    device = device_of("auto")
    policy = Policy(network.to(device), 1.0, None, vocabulary_of(tokenizer))
    ends = end_tokens(network, tokenizer)
    rollouts = EnvironmentRollouts.of(rl, network, tokenizer, ends)
    generator = Generator(rl, request.seed, policy, ends, rollouts=rollouts)
    batches = batches_of(map(source.read, infos), request.batch_size, [info.index for info in infos])
    scores = load_scores(rl.reward, Model(), device) if MODEL in rl.reward.functions else None
    reward = RewardRole(Scorer(rl, tokenizer, scores))
    begin("answering and scoring")
    master = master_of({"actor": generator, "reward": reward})
    sums = validate(master.traverse, batches, rl)
    generator.close()
    subject = f"{type(network).__name__}  {', '.join(rl.reward.functions)}"
    if rl.environment is not None:
        subject = f"{subject}  environment {rl.environment}"
    return subject, {**means(sums), "prompts": sum(info.samples for info in infos)}


def rl_of(request: EvaluationRequest, job: Job | None) -> RL:
    """Return the options as a table of the job file, beside the job of the run that saved the model.

    Raises:
        ConfigError: CFG003, one of them is out of range; CFG011, no function asks the reward model.

    """
    if request.reward_model is not None and request.reward != MODEL:
        raise ConfigError("CFG011", "--reward-model is for --reward model alone", fix="give both, or neither")
    tables = _tables_of_run(request, job)
    if request.environment is not None:
        tables["environment"] = request.environment
    if tables["environment"] is None and request.reward == ENVIRONMENT:
        raise ConfigError("CFG011", "--reward environment is for --environment alone", fix="name an environment")
    if request.reward is not None:
        tables["reward"] = {"functions": [request.reward], "model": {"repository": request.reward_model}}
    for name, table in _TABLES.items():
        value = getattr(request, name)
        if value is not None:
            tables[table][name] = value
    try:
        return RL.model_validate(tables)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        flag = flag_of(str(first_error["loc"][-1]))
        raise ConfigError("CFG003", f"{flag} is out of range", repr(first_error["input"]), first_error["msg"]) from None


def _tables_of_run(request: EvaluationRequest, job: Job | None) -> dict[str, Any]:
    """Tables of a run whose answers are meant; otherwise those without any setting."""
    if job is not None and _is_meant(request, job.rl):
        tables = job.rl.model_dump(include=_OF_ANSWERS)
        tables["generation"] = {"max_response_tokens": job.rl.generation.max_response_tokens}
        return tables
    function = "exact" if request.environment is None else ENVIRONMENT
    return {"environment": None, "episode": {}, "generation": {}, "evaluation": {}, "reward": {"functions": [function]}}


def _is_meant(request: EvaluationRequest, rl: RL) -> bool:
    """Whether answers are to be those of a run: it has answers, and the request names nothing that they aren't."""
    if request.environment is not None:
        return request.environment == rl.environment
    own_reward = None if rl.environment is None else ENVIRONMENT
    return rl.algorithm is not None and request.reward in (None, own_reward)
