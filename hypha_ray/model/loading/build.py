"""Models built from what a job file says of them, and what a preflight check wants to know about them.

Nothing is guessed: weights that are pickled or don't fit the task are errors, each with its own code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hypha_ray.config.schema import Model
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.garbage import uncollected
from hypha_ray.model.loading.configuration import auto_class, configuration_of, errors_as, read_config, sets_labels
from hypha_ray.model.loading.hub import remote_code_allowed
from hypha_ray.model.loading.weights import LoadingReport, is_whole, meta_tensors, quiet, require_fit, simulate_loading
from hypha_ray.model.positions import max_positions
from hypha_ray.model.tasks.resolve import resolve_task
from hypha_ray.model.tasks.table import TASKS, find_task
from hypha_ray.model.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model without its weights; None where it doesn't apply.

    `image_size` is height and width in pixels, `positions` the longest sequence that the model has positions for.
    """

    task: str
    architecture: str
    parameters: int
    vocab_size: int | None
    positions: int | None
    num_labels: int | None
    image_size: tuple[int, int] | None
    channels: int | None


def build_model(model: Model, seed: int, *, whole: bool = False) -> PreTrainedModel:
    """Build the model that a job file describes, on the CPU and in training mode.

    A repository's weights are held in float32, whatever they were saved in: bf16 would round away most of what an outer
    step changes (mixed precision is `worker.autocast`). `[model.config]` may name another `dtype`. New weights, the
    head of a pretrained model included, depend on `seed` only; torch's global generator is left as it was.

    Args:
        model: table of the job file.
        seed: of new weights.
        whole: the repository must have all weights, those of the task's head too.

    Raises:
        ConfigError: task, repository or configuration are wrong or don't fit each other.
        AuthenticationError: the hub wants a token, or the repository code that isn't trusted.
        HubError: the hub can't be reached.
        CheckpointError: the weights are pickled, damaged or don't fit.
        CapacityError: there isn't memory enough.

    """
    task = find_task(model.type)
    folder, config = configuration_of(model, task, weights=True)
    _load_class(task, config)
    with _seeded(seed):
        if folder is None:
            with errors_as(ConfigError, "MODEL004", "no model can be built from model.config"):
                return auto_class(task).from_config(config, trust_remote_code=False).train()
        return _pretrained(model, task, folder, config, whole).train()


def _pretrained(model: Model, task: Task, folder: Path, config: PretrainedConfig, whole: bool) -> PreTrainedModel:
    """Load a repository's weights, all that are needed and none too many."""
    repository = str(model.repository)
    with errors_as(CheckpointError, "MODEL006", f"weights of {repository} can't be loaded"), quiet():
        shapes = {name: tuple(tensor.shape) for name, tensor in meta_tensors(folder, repository).items()}
        network, info = auto_class(task).from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=remote_code_allowed(model.trust_remote_code),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are judged below, in words that say what to do.
        )
    require_fit(network, LoadingReport.of(info), shapes, repository, whole=whole, relabelled=sets_labels(model))
    return network


def compare_weights(model: Model, *, whole: bool = False) -> list[str]:
    """Hold a repository's weights against its model before anything is loaded, by the headers of its files.

    Returns:
        Notes for the user: of a new head, and of an old one that is dropped. None for a model from `[model.config]`,
        and for a hub's whose weights aren't in this machine's cache; then workers compare them.

    Raises:
        HyphaError: as `build_model`.

    """
    task = find_task(model.type)
    if not model.repository:
        return []
    local = Path(model.repository).expanduser().is_dir()
    folder, config = configuration_of(model, task, weights=local)
    if folder is None or getattr(config, "transformers_weights", None) or not (local or is_whole(folder)):
        return []
    tensors = meta_tensors(folder, model.repository)
    with errors_as(CheckpointError, "MODEL006", f"weights of {model.repository} can't be loaded"):
        network = skeleton(model)
        loaded = simulate_loading(network, tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return require_fit(network, loaded, shapes, model.repository, whole=whole, relabelled=sets_labels(model))


def facts(model: Model) -> Facts:
    """Describe a model by its configuration alone, as `skeleton` does."""
    return describe(skeleton(model), find_task(model.type))


def skeleton(model: Model) -> PreTrainedModel:
    """Build a model on torch's meta device; no weights are read, fetched or allocated.

    Raises:
        HyphaError: as `build_model`, except for what only the weights can show.

    """
    task = find_task(model.type)
    _, config = configuration_of(model, task, weights=False)
    _load_class(task, config)
    with torch.device("meta"), errors_as(ConfigError, "MODEL004", "the model can't be built from its configuration"):
        return auto_class(task).from_config(config, trust_remote_code=remote_code_allowed(model.trust_remote_code))


def describe(model: PreTrainedModel, task: Task) -> Facts:
    """Describe a model that is built."""
    config, text = model.config, model.config.get_text_config()
    size = getattr(config, "image_size", None)
    return Facts(
        task=task.name,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=getattr(text, "vocab_size", None),
        positions=max_positions(model, decoder=False),
        num_labels=_classes(config, task),
        image_size=(size, size) if isinstance(size, int) else tuple(size) if size else None,
        channels=getattr(config, "num_channels", None),
    )


def _classes(config: PretrainedConfig, task: Task) -> int | None:
    """Return how many classes a model gives scores for; None if it has none of its own."""
    if task.name == "next-sentence-prediction":
        return 2
    return config.num_labels if task.classifies and task.name != "multiple-choice" else None


def task_of(model: Model, network: PreTrainedModel, tokenizer: Any | None = None) -> Task:
    """Return the job's task as this model does it; `tokenizer` says which token masks, or else its configuration."""
    task = find_task(model.type, model.input_names)
    return resolve_task(task, network, tokenizer, explicit=model.input_names is not None)


def infer_task(folder: Path) -> Task:
    """Return the task that a saved model's `architectures` were made for.

    Raises:
        CheckpointError: the folder has no readable `config.json`.
        ConfigError: the architecture belongs to no task.

    """
    settings = read_config(folder)
    architecture = next(iter(settings.get("architectures") or ()), None)
    for task in TASKS.values():
        names = auto_class(task)._model_mapping._model_mapping.get(settings.get("model_type"), ())
        if architecture in ([names] if isinstance(names, str) else names):
            return task
    raise ConfigError(
        "MODEL001", f"the task of {folder} can't be told from its architecture", str(architecture), fix="give --type"
    )


def _load_class(task: Task, config: PretrainedConfig) -> None:
    """Load the module that has the model's class, which takes longer than to build a small model."""
    with suppress(Exception), uncollected():  # What is wrong with it is told when the model is built.
        auto_class(task)._model_mapping.get(type(config), None)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's generator, and put it back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
