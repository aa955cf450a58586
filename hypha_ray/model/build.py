"""Models built from the table of a job file, and descriptions of models without weights for preflight checks.

Nothing is guessed: pickled weights, and weights that don't fit the task, are errors with a code each.
Below an adapter, frozen weights may have 4 or 8 bits, by bitsandbytes (QLoRA, arXiv 2305.14314; LLM.int8, 2208.07339).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from hypha_ray.config.schema import Model
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.files import uncollected
from hypha_ray.model.checks import max_positions
from hypha_ray.model.configuration import (
    OWN_CLASSES,
    auto_class,
    configuration_of,
    errors_as,
    resolve_task,
    sets_labels,
)
from hypha_ray.model.losses import with_own_loss
from hypha_ray.model.sources import base_of, read_config, remote_code_allowed
from hypha_ray.model.task import Task
from hypha_ray.model.tasks import TASKS, find_task
from hypha_ray.model.weights import (
    LoadingReport,
    is_whole,
    meta_tensors,
    quiet,
    require_fit,
    simulate_loading,
    tensor_shapes,
    weight_files,
)
from hypha_ray.plugins import find

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_SHOWN = 3
"""Number of tensors that a message names."""


def check_quantization() -> None:
    """Refuse quantized weights on a machine without bitsandbytes.

    Raises:
        ConfigError: MODEL008.

    """
    if importlib.util.find_spec("bitsandbytes") is None:
        problem = "model.quantization needs bitsandbytes"
        fix = "pip install 'hypha_ray[quantized]' on each machine, or leave it out"
        raise ConfigError("MODEL008", problem, "it isn't installed", fix=fix)


def loading_options(model: Model, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return options of `from_pretrained` for a job's quantized weights; none if they aren't quantized.

    Args:
        model: table of the job file.
        dtype: dtype of weights that aren't quantized, and of matrices as they are multiplied.
        device: device that the weights will be used on. They are quantized there: int8 of a CPU can't be moved.

    Raises:
        ConfigError: MODEL008, the package is missing.

    """
    if model.quantization is None:
        return {}
    check_quantization()
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # int8 steps warn of each cast.
    if model.quantization == "nf4":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    return {"quantization_config": config, "device_map": {"": str(device)}}


def fingerprint(model: Model, folder: Path) -> str:
    """Return the SHA-256 of a repository's weights as they are in its files, and of their form.

    The last bits of quantized weights may depend on the device that has quantized them.
    """
    quantization_text = repr(model.quantization)
    sha256 = hashlib.sha256(quantization_text.encode())
    file_of = dict[str, Path]()
    for file in weight_files(folder, str(model.repository)):
        with safe_open(file, "pt") as content:
            file_of |= dict.fromkeys(content.keys(), file)
    for name, file in sorted(file_of.items()):
        with safe_open(file, "pt") as content:
            tensor = content.get_tensor(name)
        description = repr((name, str(tensor.dtype), tuple(tensor.shape)))
        sha256.update(description.encode())
        values = tensor.contiguous().flatten()
        sha256.update(values.view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def built_by_factory(model: Model) -> PreTrainedModel:
    """Build a job's model by its factory, on torch's default device.

    Raises:
        ConfigError: PLG002, the factory can't be had; MODEL004, it raises; MODEL026, it returns something else.

    """
    from transformers import PreTrainedModel

    assert model.factory is not None
    factory: Any = find("model_factories", model.factory)
    with errors_as(ConfigError, "MODEL004", f"no model can be built by model.factory {model.factory}"):
        network = factory(dict(model.factory_options or {}))
    if not isinstance(network, PreTrainedModel):
        problem = f"model.factory {model.factory} builds no model that from_pretrained could load"
        fix = "derive the model from PreTrainedModel, and its settings from PretrainedConfig"
        raise ConfigError("MODEL026", problem, type(network).__name__, "a transformers.PreTrainedModel", fix)
    return network


def check_factory(model: Model, network: PreTrainedModel) -> None:
    """Refuse a model that its configuration alone doesn't build again.

    Args:
        model: table of the job file.
        network: model on torch's meta device.

    Raises:
        ConfigError: MODEL026.

    """
    problem = f"model.factory {model.factory}: from_pretrained couldn't load what the run saves"
    with torch.device("meta"), errors_as(ConfigError, "MODEL026", problem):
        saved_config = json.loads(network.config.to_json_string(use_diff=False))
        config = type(network.config).from_dict(saved_config)
        rebuilt = type(network)(config)
    shapes = _shapes(network)
    rebuilt_shapes = _shapes(rebuilt)
    different = [name for name in shapes | rebuilt_shapes if shapes.get(name) != rebuilt_shapes.get(name)]
    if different:
        names = ", ".join(different[:_SHOWN])
        got = f"other tensors by its configuration: {names}"
        allowed = f"{type(network).__name__}(config) with the same tensors"
        fix = "build all of the model in its constructor, from its configuration alone"
        raise ConfigError("MODEL026", problem, got, allowed, fix)


def _shapes(network: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return tensor_shapes(network.state_dict())


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Description of a model without its weights; None for a property that the model lacks."""

    task: str
    architecture: str
    """Name of the model's class."""
    parameters: int
    """Number of parameters."""
    vocab_size: int | None
    positions: int | None
    """Number of tokens of the longest sequence that the model has positions for; None: unlimited."""
    num_labels: int | None
    """Number of classes; None for other tasks, and if the samples determine it."""
    image_size: tuple[int, int] | None
    """Height and width in pixels."""
    channels: int | None
    """Number of an image's channels."""


def build_model(
    model: Model, seed: int, *, needs_all: bool = False, device: torch.device | None = None
) -> PreTrainedModel:
    """Build the model of a job file on the CPU, in training mode.

    A quantized one is built on the device that it will be used on.

    Weights of a repository are converted to float32, unless `[model.config]` sets another `dtype`: bfloat16 would round
    away most of an inner step. Mixed precision is `worker.autocast`. New weights, such as a new head's, depend on
    `seed` alone; torch's global generator is unchanged.

    Args:
        model: table of the job file.
        seed: seed of new weights.
        needs_all: the repository must have all weights, even the head's.
        device: device for quantized weights; None: the CPU.

    Raises:
        ConfigError: task, repository or configuration is wrong, or they don't fit each other.
        AuthenticationError: the hub requires a token, or the repository runs code that isn't trusted.
        HubError: the hub can't be reached.
        CheckpointError: the weights are pickled, damaged, or don't fit.
        CapacityError: there is too little memory.

    """
    task = find_task(model.type)
    if model.factory is not None:
        with seeded(seed):
            return built_by_factory(model).train()
    folder, config = configuration_of(model, task, needs_weights=True)
    _load_class(task, config)
    with seeded(seed):
        if folder is None:
            with errors_as(ConfigError, "MODEL004", "no model can be built from model.config"):
                return auto_class(task).from_config(config, trust_remote_code=False).train()
        base, _ = base_of(model)
        network_class = auto_class(task)
        return _pretrained(base, network_class, folder, config, needs_all, device or torch.device("cpu")).train()


def reopened(model: Model) -> PreTrainedModel:
    """Load what a run with a factory has saved, on the CPU.

    Args:
        model: table with the factory, and with the run's saved model as the repository.

    Raises:
        ConfigError: the factory can't be had.
        CheckpointError: the weights are damaged, or don't fit the factory's model.

    """
    sketch = skeleton(model)
    folder = Path(str(model.repository))
    with errors_as(CheckpointError, "MODEL006", f"the configuration in {folder} can't be loaded"):
        config = type(sketch.config).from_pretrained(folder)
    config.dtype = torch.float32
    return _pretrained(model, type(sketch), folder, config, True, torch.device("cpu"))


def _pretrained(
    model: Model, network_class: Any, folder: Path, config: PretrainedConfig, needs_all: bool, device: torch.device
) -> PreTrainedModel:
    """Load a repository's weights and refuse missing and unknown ones."""
    repository = str(model.repository)
    with errors_as(CheckpointError, "MODEL006", f"weights of {repository} can't be loaded"), quiet():
        shapes = tensor_shapes(meta_tensors(folder, repository))
        network, info = network_class.from_pretrained(
            folder,
            config=config,
            dtype=config.dtype,
            use_safetensors=True,
            trust_remote_code=remote_code_allowed(model.trust_remote_code),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `require_fit` reports them with advice.
            **loading_options(model, config.dtype, device),
        )
    require_fit(network, LoadingReport.of(info), shapes, repository, needs_all=needs_all, relabelled=sets_labels(model))
    if model.quantization is not None:
        network.base_sha256 = fingerprint(model, folder)
    return network


def compare_weights(model: Model, *, needs_all: bool = False) -> list[str]:
    """Compare a repository's weights with its model before anything is loaded, by the headers of its files.

    Returns:
        Notes for the user about a new head and about a dropped one. There are none for a model from `[model.config]`,
        and for weights of a hub that aren't in this machine's cache; workers compare these.

    Raises:
        HyphaError: any error of `build_model`.

    """
    task = find_task(model.type)
    model, _ = base_of(model)
    if not model.repository:
        return []
    local = Path(model.repository).expanduser().is_dir()
    folder, config = configuration_of(model, task, needs_weights=local)
    if folder is None or getattr(config, "transformers_weights", None):
        return []
    if not local and not is_whole(folder):
        return []
    tensors = meta_tensors(folder, model.repository)
    with errors_as(CheckpointError, "MODEL006", f"weights of {model.repository} can't be loaded"):
        network = skeleton(model)
        loading_report = simulate_loading(network, tensors)
    shapes = tensor_shapes(tensors)
    return require_fit(
        network, loading_report, shapes, model.repository, needs_all=needs_all, relabelled=sets_labels(model)
    )


def facts(model: Model) -> Facts:
    """Describe a model by its configuration alone."""
    return describe(skeleton(model), find_task(model.type))


def skeleton(model: Model) -> PreTrainedModel:
    """Build a model on torch's meta device; no weights are fetched, read or allocated.

    Raises:
        HyphaError: any error of `build_model` that doesn't depend on weights.

    """
    task = find_task(model.type)
    if model.factory is not None:
        with torch.device("meta"):
            return built_by_factory(model)
    _, config = configuration_of(model, task, needs_weights=False)
    _load_class(task, config)
    with torch.device("meta"), errors_as(ConfigError, "MODEL004", "the model can't be built from its configuration"):
        return random_model(model, task, config)


def random_model(model: Model, task: Task, config: PretrainedConfig) -> PreTrainedModel:
    """Build a model with random weights from any configuration, on torch's default device.

    A user's own factory builds its model without regard to the configuration.
    """
    if model.factory is not None:
        return built_by_factory(model)
    is_trusted = remote_code_allowed(model.trust_remote_code)
    network: PreTrainedModel = auto_class(task).from_config(config, trust_remote_code=is_trusted)
    return network


def describe(model: PreTrainedModel, task: Task) -> Facts:
    """Describe a model, with or without weights."""
    config = model.config
    text = model.config.get_text_config()
    image_size = getattr(config, "image_size", None)
    if isinstance(image_size, int):
        image_size = (image_size, image_size)
    return Facts(
        task=task.name,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=getattr(text, "vocab_size", None),
        positions=max_positions(model, decoder=False),
        num_labels=_classes(config, task),
        image_size=tuple(image_size) if image_size else None,
        channels=getattr(config, "num_channels", None),
    )


def _classes(config: PretrainedConfig, task: Task) -> int | None:
    """Return the number of classes that a model scores; None if it has none, or one for each choice of a sample."""
    if task.name == "next-sentence-prediction":
        return 2
    if task.name in OWN_CLASSES or not task.classifies:
        return None
    num_labels: int = config.num_labels
    return num_labels


def task_of(model: Model, network: PreTrainedModel, tokenizer: Any | None = None) -> Task:
    """Return the job's task, completed for a model with the mask token of tokenizer or configuration."""
    task = find_task(model.type, model.input_names)
    resolved = resolve_task(task, network, tokenizer, explicit=model.input_names is not None)
    return with_own_loss(resolved, model)


def infer_task(folder: Path) -> Task:
    """Return the task of a saved model's architecture.

    Raises:
        CheckpointError: the folder has no readable `config.json`.
        ConfigError: the architecture belongs to no task.

    """
    settings = read_config(folder)
    architecture = next(iter(settings.get("architectures") or ()), None)
    for task in TASKS.values():
        if task.name == "masked-lm" and settings.get("is_encoder_decoder"):
            continue  # BART's class is of two tasks; it is taken for seq2seq-lm.
        classes = auto_class(task)._model_mapping._model_mapping.get(settings.get("model_type"), ())
        if isinstance(classes, str):
            classes = [classes]
        if architecture in classes:
            return task
    raise ConfigError(
        "MODEL001",
        f"the task of {folder} can't be inferred from its architecture",
        str(architecture),
        fix="give --type",
    )


def _load_class(task: Task, config: PretrainedConfig) -> None:
    """Import the module of the model's class, which takes longer than building a small model."""
    with suppress(Exception), uncollected():  # Building the model reports what is wrong.
        auto_class(task)._model_mapping.get(type(config), None)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's generator, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
