"""Evaluate a saved model on a prepared dataset: loss and perplexity, accuracy, or rewards of its answers to prompts.

Of preferences, the figures are the rewards of chosen and rejected answers, their margin, and the accuracy.

With --lm-eval a language model is scored on tasks of lm-evaluation-harness instead: pip install 'hypha_ray[eval]'.

    python jobs/evaluate.py --model RUN/model --dataset data/stdlib
    python jobs/evaluate.py RUN --round 12 --dataset data/digits --split train --json
    python jobs/evaluate.py --model RUN/model --dataset data/sort2 --reward exact --max-response-tokens 4 --samples 4
    python jobs/evaluate.py --model RUN/model --dataset data/calls --environment calculator --turns 2
    python jobs/evaluate.py --model RUN/model --dataset data/reviews --metrics macro_f1
    python jobs/evaluate.py --model RUN/model --dataset data/preferences
    python jobs/evaluate.py --model RUN/model --lm-eval arc_easy hellaswag
    python jobs/evaluate.py --model RUN/model --lm-eval capitals --include-path tasks     # tasks/capitals.yaml

The last line is for programs: `val_loss 2.4312 perplexity 11.37 tokens 65280`, or the same as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

from hypha_ray.config.entry_point import Phases, print_notes, run
from hypha_ray.config.options import flag_of, parse_options, require_round
from hypha_ray.driver.evaluation import (
    EvaluationRequest,
    ModelSource,
    evaluate_on_dataset,
    find_model_or_folder,
    require_sizes,
)
from hypha_ray.errors import ConfigError

DEFAULTS = EvaluationRequest("")
"""Defaults of the options that are settings of an evaluation."""
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
    "metrics",
    "reference",
)
"""Options that mean nothing to tasks of lm-evaluation-harness."""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a saved model on a prepared dataset: loss and perplexity, accuracy, or rewards of its answers."""

    model: str
    """folder from save_pretrained, such as a run's model, or a run by its name or directory"""
    round: int | None = None
    """round of a run, counted from 1, that has a snapshot; default: the saved model, otherwise the newest snapshot"""
    dataset: str | None = None
    """folder of the prepared dataset, or its name below $HYPHA_RAY_HOME/datasets or among data nodes of the cluster"""
    split: str = DEFAULTS.split
    """split of the dataset"""
    batch_size: int = DEFAULTS.batch_size
    """samples in a batch; the result doesn't depend on it"""
    type: str | None = None
    """task as in model.type; default: the model's own"""
    reward: str | None = None
    """reward function of answers to prompts, as in rl.reward.functions; default: those of the run that --model lies
    in, with that run's limits and samples; for other models exact, or with an environment its own"""
    reward_model: str | None = None
    """folder or hub id of the reward model for --reward model, as rl.reward.model.repository"""
    environment: str | None = None
    """environment that answers to prompts are a conversation with, as rl.environment; default: that of the run that
    --model lies in, if --reward isn't given"""
    turns: int | None = None
    """answers after which such a conversation is over, as rl.episode.turns; default: the run's, otherwise 8"""
    max_response_tokens: int | None = None
    """tokens after which an answer is cut off; default: the run's, otherwise 256"""
    samples: int | None = None
    """answers to each prompt; default: the run's, otherwise 1"""
    temperature: float | None = None
    """divisor of logits, 0: the most probable token each time; default: the run's, otherwise 1"""
    seed: int = DEFAULTS.seed
    """seed of the answers, as run.seed"""
    metrics: list[str] | None = None
    """further figures of predictions, as model.metrics; default: those of the run that --model lies in"""
    reference: str | None = None
    """of preferences: folder or hub id of the model that rewards are relative to, dataset for what prepare --reference
    has stored, or none; default: that of the run that --model lies in"""
    lm_eval: list[str] = field(default_factory=list)
    """tasks of lm-evaluation-harness to score a language model on, instead of a dataset; an extra"""
    include_path: Path | None = None
    """folder with YAML files of further tasks for --lm-eval"""
    json: bool = False
    """print the last line as JSON"""


def main() -> None:
    """Parse first, import later: `--help` and a mistyped flag answer at once."""
    arguments = parse_options(Evaluate, __doc__, sys.argv[1:], position="model")
    check(arguments)
    start = time.monotonic()
    phases = Phases()
    phases.begin("looking for model and data")
    model = find_model_or_folder(arguments.model, None if arguments.round is None else arguments.round - 1)
    print_notes(model.notes())
    evaluate_on = evaluate_on_tasks if arguments.lm_eval else evaluate_on_samples
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
    require_round(arguments.round)
    require_sizes(arguments.batch_size, arguments.seed, None if arguments.lm_eval else arguments.type)
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


def evaluate_on_tasks(arguments: Evaluate, model: ModelSource, phases: Phases) -> tuple[str, dict[str, float]]:
    """Return model and tasks, and the figures of lm-evaluation-harness."""
    from hypha_ray.driver.saved_models import check_harness, score_tasks

    check_harness()
    phases.begin("loading libraries, model and tasks")
    # The harness loads a library of this script's name, which must not be found here.
    scripts = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != scripts]
    tasks = arguments.lm_eval
    with model.opened() as folder:
        architecture, figures = score_tasks(folder, tasks, arguments.include_path, arguments.batch_size, arguments.seed)
    return f"{architecture}  {' '.join(tasks)}", figures


def evaluate_on_samples(arguments: Evaluate, model: ModelSource, phases: Phases) -> tuple[str, dict[str, float]]:
    """Return model, task and split, and the figures of a prepared dataset, as `evaluate_on_dataset`."""
    values = {option.name: getattr(arguments, option.name) for option in fields(EvaluationRequest)}
    return evaluate_on_dataset(EvaluationRequest(**values), model, phases.begin)


if __name__ == "__main__":
    run(main)
