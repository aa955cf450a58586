"""Evaluate a saved model on a prepared dataset: loss and perplexity, accuracy, or rewards of its answers to prompts.

Of preferences, the figures are the rewards of chosen and rejected answers, their margin, and the accuracy.

With --lm-eval a language model is scored on tasks of lm-evaluation-harness instead: pip install 'hypha_ray[eval]'.

    python jobs/evaluate.py --model RUN/model --dataset data/stdlib
    python jobs/evaluate.py --model RUN/model --dataset data/digits --split train --json
    python jobs/evaluate.py --model RUN/model --dataset data/sort2 --reward exact --max-response-tokens 4 --samples 4
    python jobs/evaluate.py --model RUN/model --dataset data/calls --environment calculator --turns 2
    python jobs/evaluate.py --model RUN/model --dataset data/preferences
    python jobs/evaluate.py --model RUN/model --lm-eval arc_easy hellaswag
    python jobs/evaluate.py --model RUN/model --lm-eval capitals --include-path tasks     # tasks/capitals.yaml

The last line is for programs: `val_loss 2.4312 perplexity 11.37 tokens 65280`, or the same as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from hypha_ray import plugins
from hypha_ray.config.cli.entry_point import run
from hypha_ray.config.cli.options import parse_options
from hypha_ray.config.cli.output import Phases
from hypha_ray.config.tables.rewards import ENVIRONMENT, MODEL
from hypha_ray.config.tables.rl import RL
from hypha_ray.driver.trained_models.saved_models import ModelSource, find_model_or_folder
from hypha_ray.errors import CheckpointError, ConfigError, DataError
from hypha_ray.heavy_imports import uncollected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypha_ray.driver.datasets.data_source import DataSource
    from hypha_ray.types import SliceInfo


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a saved model on a prepared dataset: loss and perplexity, accuracy, or rewards of its answers."""

    model: str
    """folder from save_pretrained, such as a run's model, or a run by its name or directory"""
    dataset: str | None = None
    """folder of the prepared dataset, or its name below $HYPHA_RAY_HOME/datasets or among data nodes of the cluster"""
    split: str = "validation"
    """split of the dataset"""
    batch_size: int = 32
    """samples in a batch; the result doesn't depend on it"""
    type: str | None = None
    """task as in model.type; default: the model's own"""
    reward: str | None = None
    """reward function of answers to prompts, as in rl.reward.functions; default: exact, or the environment's"""
    reward_model: str | None = None
    """folder or hub id of the reward model for --reward model, as rl.reward.model.repository"""
    environment: str | None = None
    """environment that answers to prompts are a conversation with, as rl.environment"""
    turns: int = 8
    """answers after which such a conversation is over, as rl.episode.turns"""
    max_response_tokens: int = 256
    """tokens after which an answer is cut off"""
    samples: int = 1
    """answers to each prompt"""
    temperature: float = 1.0
    """divisor of logits; 0: the most probable token each time"""
    seed: int = 0
    """seed of the answers, as run.seed"""
    reference: str | None = None
    """of preferences: folder or hub id of the model that rewards are relative to, dataset for what prepare --reference
    has stored, or none; default: that of the run that --model lies in"""
    lm_eval: list[str] = field(default_factory=list)
    """tasks of lm-evaluation-harness to score a language model on, instead of a dataset; an extra"""
    include_path: Path | None = None
    """folder with YAML files of further tasks for --lm-eval"""
    json: bool = False
    """print the last line as JSON"""


OF_DATASETS = (
    "dataset",
    "split",
    "type",
    "reward",
    "reward_model",
    "environment",
    "turns",
    "max_response_tokens",
    "samples",
    "temperature",
    "reference",
)
"""Options that mean nothing to tasks of lm-evaluation-harness."""


def main() -> None:
    """Parse first, import later: `--help` and a mistyped flag answer at once."""
    arguments = parse_options(Evaluate, __doc__, sys.argv[1:])
    check(arguments)
    start = time.monotonic()
    phases = Phases()
    phases.begin("looking for model and data")
    model = find_model_or_folder(arguments.model)
    evaluate_on = evaluate_on_tasks if arguments.lm_eval else evaluate_on_dataset
    subject, figures = evaluate_on(arguments, model, phases)
    phases.end()
    print(f"{subject}  {time.monotonic() - start:.1f} s")
    if arguments.json:
        print(json.dumps(figures, allow_nan=False))
        return
    texts = []
    for name, value in figures.items():
        text = str(value) if isinstance(value, int) else f"{value:.6g}"
        texts.append(f"{name} {text}")
    print(" ".join(texts))


def check(arguments: Evaluate) -> None:
    """Refuse options that are missing, out of range, or mean nothing beside others.

    Raises:
        ConfigError: CFG003, a number is out of range, or a folder doesn't exist; CFG011, two options exclude each
            other; CFG012, no dataset is given; MODEL001, there is no such task.

    """
    for name, least in (("batch_size", 1), ("seed", 0)):
        value = getattr(arguments, name)
        if value < least:
            raise ConfigError("CFG003", f"{flag_of(name)} is out of range", str(value), f"{least} or more")
    if arguments.lm_eval:
        for name in OF_DATASETS:
            if getattr(arguments, name) != getattr(Evaluate, name):
                problem = f"--lm-eval and {flag_of(name)} exclude each other"
                raise ConfigError("CFG011", problem, fix="leave one out")
        folder = arguments.include_path
        if folder is not None and not folder.is_dir():
            allowed = "a folder with YAML files of tasks"
            raise ConfigError("CFG003", "--include-path is no folder", str(folder), allowed, "name one")
        return
    if arguments.include_path is not None:
        raise ConfigError("CFG011", "--include-path is for --lm-eval alone", fix="name the folder's tasks by --lm-eval")
    if arguments.dataset is None:
        raise ConfigError("CFG012", "--dataset is missing", fix="give a prepared dataset, or tasks by --lm-eval")
    if arguments.type is not None:
        from hypha_ray.model.tasks.table import find_task

        find_task(arguments.type)


def flag_of(name: str) -> str:
    """Flag of an option."""
    return f"--{name.replace('_', '-')}"


def evaluate_on_tasks(arguments: Evaluate, model: ModelSource, phases: Phases) -> tuple[str, dict[str, float]]:
    """Return model and tasks, and the figures of lm-evaluation-harness."""
    from hypha_ray.driver.trained_models.lm_eval_harness import check_harness, score_tasks

    check_harness()
    phases.begin("loading libraries, model and tasks")
    # The harness loads a library of this script's name, which must not be found here.
    scripts = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != scripts]
    tasks = arguments.lm_eval
    with model.opened() as folder:
        architecture, figures = score_tasks(folder, tasks, arguments.include_path, arguments.batch_size, arguments.seed)
    return f"{architecture}  {' '.join(tasks)}", figures


def evaluate_on_dataset(arguments: Evaluate, model: ModelSource, phases: Phases) -> tuple[str, dict[str, float]]:
    """Return model, task and split, and the figures of a prepared dataset.

    Raises:
        ConfigError: RWD003, there is no such reward function; PLG001, there is no such environment.
        DataError: DATA001, there is no such dataset; DATA051, it has no such split.

    """
    assert arguments.dataset is not None, "see check"
    from hypha_ray.data.catalogue import folders_of, resolve_dataset

    dataset = resolve_dataset(arguments.dataset)
    folders_of(dataset)
    phases.begin("loading libraries, model and data")
    from hypha_ray.driver.datasets.data_source import opened

    with opened(dataset) as source:
        manifest = source.manifest
        infos = manifest.of(arguments.split)
        if not infos:
            splits = ", ".join(sorted({info.split for info in manifest.slices}))
            raise DataError("DATA051", f"dataset {manifest.name!r} has no such split", arguments.split, splits)
        if arguments.reference is not None and manifest.modality != "preferences":
            problem = f"--reference has no effect on dataset {manifest.name!r}"
            raise ConfigError("CFG011", problem, manifest.modality, "preferences", "leave it out")
        score = score_samples
        if manifest.modality == "prompts":
            score = score_answers
            from hypha_ray.rl.rewards.calls import require_known

            require_known(rl_of(arguments).reward.loaded_functions)
            if arguments.environment is not None:
                plugins.require_known("environments", arguments.environment)
        with model.opened() as folder:
            require_same_tokens(folder, source)
            subject, figures = score(arguments, folder, source, infos, phases)
    return f"{subject}  {manifest.name}/{arguments.split}", figures


def require_same_tokens(model: Path, source: DataSource) -> None:
    """Refuse a dataset whose numbers are other tokens than those that the model was saved with.

    Raises:
        DataError: DATA023, they are.

    """
    made_by = source.manifest.preprocessor
    if made_by is not None and not source.has_tokens_of(model):
        problem = f"the numbers in dataset {source.manifest.name!r} are other tokens than the model's"
        fix = f"prepare it with --tokenizer {model}"
        raise DataError("DATA023", problem, f"tokens of {made_by.name}", "the model's tokenizer", fix)


def score_samples(
    arguments: Evaluate, model: Path, source: DataSource, infos: Sequence[SliceInfo], phases: Phases
) -> tuple[str, dict[str, float]]:
    """Return model and task, and loss with what it amounts to."""
    with uncollected():
        import torch

        from hypha_ray.driver.datasets.classes import by_number, relabelled
        from hypha_ray.driver.trained_models.preference_scores import preference_task
        from hypha_ray.model.checks.loss_check import check_loss_of
        from hypha_ray.model.checks.positions import require_positions
        from hypha_ray.model.evaluation import batches_of, evaluate, metrics_of
        from hypha_ray.model.loading.build import describe
        from hypha_ray.model.saved_model import open_saved
        from hypha_ray.model.tasks.table import require_trainable

    manifest = source.manifest
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, task = open_saved(model, arguments.type)
    require_trainable(task)
    scored_by = task.name
    if manifest.modality == "preferences":
        task, scored_by = preference_task(task, model, manifest, arguments.reference, device)
    require_positions(network, task, manifest.shapes, manifest.name)
    facts = describe(network, task)
    manifest.require(facts.vocab_size, facts.num_labels)
    id2label = network.config.id2label
    note = by_number(manifest, task, id2label)
    if note:
        print(f"note: {note}", file=sys.stderr)
    slices = relabelled((source.read(info) for info in infos), manifest, task, id2label)
    batches = batches_of(slices, arguments.batch_size, [info.index for info in infos])
    first = next(batches)
    check_loss_of(task, network, first)
    phases.begin("evaluating")
    sums = evaluate(network.to(device), task, chain([first], batches), device)
    loss_sum, count = sums["val_loss"]
    if not count:
        fix = "choose another --split, or prepare the dataset for this task"
        raise DataError("DATA052", f"nothing in {manifest.name}/{arguments.split} can be scored", task.name, fix=fix)
    figures = {name: value for name, value in metrics_of(task, sums).items() if value is not None}
    if "val_loss" not in figures:
        raise CheckpointError("MODEL018", "the model's loss isn't a finite number", f"{loss_sum / count}")
    return f"{facts.architecture}  {scored_by}", figures


def score_answers(
    arguments: Evaluate, model: Path, source: DataSource, infos: Sequence[SliceInfo], phases: Phases
) -> tuple[str, dict[str, float]]:
    """Return the model, and rewards and lengths of its answers; they are those of a run with the same settings."""
    rl = rl_of(arguments)
    with uncollected():
        from hypha_ray.config.schema import Model, Preprocessor
        from hypha_ray.driver.datasets.job_tokenizer import preprocessor_for
        from hypha_ray.model.checks.positions import require_positions
        from hypha_ray.model.environment import device_of
        from hypha_ray.model.evaluation import batches_of
        from hypha_ray.model.loading.build import describe
        from hypha_ray.model.loading.tokenizer import tokenizer_of
        from hypha_ray.model.saved_model import open_saved
        from hypha_ray.model.vocabulary import vocabulary_of
        from hypha_ray.plugins import look_beside_the_job
        from hypha_ray.rl.environments.rollouts import EnvironmentRollouts
        from hypha_ray.rl.island import validate
        from hypha_ray.rl.policy import Policy, end_tokens
        from hypha_ray.rl.reward_model import load_scores
        from hypha_ray.rl.roles.policies import Generator
        from hypha_ray.rl.roles.reward import RewardRole
        from hypha_ray.rl.scoring import Scorer
        from hypha_ray.rl.workers.model_worker import master_of
        from hypha_ray.types.events import means

    look_beside_the_job()
    network, task = open_saved(model, arguments.type)
    if task.name != "causal-lm":
        fix = "evaluate a language model, or another dataset"
        raise ConfigError("RL001", "this model can't answer prompts", task.name, "causal-lm", fix)
    manifest = source.manifest
    require_positions(network, task, manifest.shapes, manifest.name, arguments.max_response_tokens)
    manifest.require(describe(network, task).vocab_size)
    tokenizer = tokenizer_of(preprocessor_for(Preprocessor(), Model(repository=str(model)), source))
    device = device_of("auto")
    policy = Policy(network.to(device), 1.0, None, vocabulary_of(tokenizer))
    ends = end_tokens(network, tokenizer)
    rollouts = EnvironmentRollouts.of(rl, network, tokenizer, ends)
    generator = Generator(rl, arguments.seed, policy, ends, rollouts=rollouts)
    slices = (source.read(info) for info in infos)
    batches = batches_of(slices, arguments.batch_size, [info.index for info in infos])
    scores = load_scores(rl.reward, Model(), device) if MODEL in rl.reward.functions else None
    reward = RewardRole(Scorer(rl, tokenizer, scores))
    phases.begin("answering and scoring")
    master = master_of({"actor": generator, "reward": reward})
    sums = validate(master.traverse, batches, rl)
    generator.close()
    prompts = sum(info.samples for info in infos)
    return type(network).__name__, {**means(sums), "prompts": prompts}


def rl_of(arguments: Evaluate) -> RL:
    """Return the options as a table of the job file.

    Raises:
        ConfigError: CFG003, one of them is out of range; CFG011, no function asks the reward model.

    """
    if arguments.reward_model is not None and arguments.reward != MODEL:
        raise ConfigError("CFG011", "--reward-model is for --reward model alone", fix="give both, or neither")
    if arguments.environment is None and arguments.reward == ENVIRONMENT:
        raise ConfigError("CFG011", "--reward environment is for --environment alone", fix="name an environment")
    default_reward = "exact" if arguments.environment is None else ENVIRONMENT
    evaluation = {"samples": arguments.samples, "temperature": arguments.temperature}
    generation = {"max_response_tokens": arguments.max_response_tokens}
    rewards = {"functions": [arguments.reward or default_reward], "model": {"repository": arguments.reward_model}}
    tables = {
        "reward": rewards,
        "generation": generation,
        "evaluation": evaluation,
        "environment": arguments.environment,
        "episode": {"turns": arguments.turns},
    }
    try:
        return RL.model_validate(tables)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        flag = flag_of(str(first["loc"][-1]))
        raise ConfigError("CFG003", f"{flag} is out of range", repr(first["input"]), first["msg"]) from None


if __name__ == "__main__":
    run(main)
