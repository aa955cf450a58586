"""Models from a repository or from a configuration, and what a preflight check wants to know about them.

Nothing is guessed: an unknown key of `[model.config]`, a task that the model can't do, pickled weights and code that
nobody allowed are errors, each with its own code.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hypha_ray.config.schema import Model
from hypha_ray.errors import AuthenticationError, CapacityError, CheckpointError, ConfigError, HyphaError
from hypha_ray.garbage import uncollected
from hypha_ray.model.hub import REMOTE_CODE_VARIABLE, code_allowed, fetch
from hypha_ray.model.tasks import TASKS, Masking, Task, find_task

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_ALWAYS_KNOWN = frozenset({"auto_map", "mask_token_id"})
"""Keys that any `[model.config]` may have though its class doesn't name them."""


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


def build_model(model: Model, seed: int) -> PreTrainedModel:
    """Build the model that a job file describes, on the CPU and in training mode.

    A repository's weights are held in float32, whatever they were saved in: bf16 would round away most of what an outer
    step changes (mixed precision is `worker.autocast`). `[model.config]` may name another `dtype`. New weights, the
    head of a pretrained model included, depend on `seed` only; torch's global generator is left as it was.

    Raises:
        ConfigError: task, repository or configuration are wrong or don't fit each other.
        AuthenticationError: the hub wants a token, or the repository code that isn't trusted.
        HubError: the hub can't be reached.
        CheckpointError: the weights are pickled, damaged or don't fit.
        CapacityError: there isn't memory enough.

    """
    task = find_task(model.type)
    folder, config = _configuration(model, task, weights=True)
    _load_class(task, config)
    auto = _auto_class(task)
    with _seeded(seed):
        if folder is None:
            with _errors_as(ConfigError, "MODEL004", "no model can be built from model.config"):
                return auto.from_config(config, trust_remote_code=False).train()
        with _errors_as(CheckpointError, "MODEL006", f"weights of {model.repository} can't be loaded"):
            return auto.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=code_allowed(model.trust_remote_code),
            ).train()


def facts(model: Model) -> Facts:
    """Describe a model by its configuration alone, as `skeleton` does."""
    return describe(skeleton(model), find_task(model.type))


def skeleton(model: Model) -> PreTrainedModel:
    """Build a model on torch's meta device; no weights are read, fetched or allocated.

    Raises:
        HyphaError: as `build_model`, except for what only the weights can show.

    """
    task = find_task(model.type)
    _, config = _configuration(model, task, weights=False)
    _load_class(task, config)
    with torch.device("meta"), _errors_as(ConfigError, "MODEL004", "the model can't be built from its configuration"):
        return _auto_class(task).from_config(config, trust_remote_code=code_allowed(model.trust_remote_code))


def describe(model: PreTrainedModel, task: Task) -> Facts:
    """Describe a model that is built."""
    config, text = model.config, model.config.get_text_config()
    size = getattr(config, "image_size", None)
    return Facts(
        task=task.name,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=getattr(text, "vocab_size", None),
        positions=getattr(text, "max_position_embeddings", None),
        num_labels=config.num_labels if task.classifies else None,
        image_size=(size, size) if isinstance(size, int) else tuple(size) if size else None,
        channels=getattr(config, "num_channels", None),
    )


def task_of(model: Model, network: PreTrainedModel, tokenizer: Any | None = None) -> Task:
    """Return the job's task, complete with what masking needs to know of the tokenizer or the model's configuration."""
    task = find_task(model.type, model.input_names)
    config = network.config.get_text_config()
    mask_id = getattr(tokenizer, "mask_token_id", None)
    special_ids = tuple(getattr(tokenizer, "all_special_ids", ()))
    if mask_id is None:
        mask_id = getattr(config, "mask_token_id", None)
    if task.labels != "masked" or mask_id is None:
        return task
    return dataclasses.replace(task, masking=Masking(mask_id, config.vocab_size, special_ids))


def infer_task(folder: Path) -> Task:
    """Return the task that a saved model's `architectures` were made for.

    Raises:
        CheckpointError: the folder has no readable `config.json`.
        ConfigError: the architecture belongs to no task.

    """
    settings = _settings(folder)
    architecture = next(iter(settings.get("architectures") or ()), None)
    for task in TASKS.values():
        names = _auto_class(task)._model_mapping._model_mapping.get(settings.get("model_type"), ())
        if architecture in ([names] if isinstance(names, str) else names):
            return task
    raise ConfigError(
        "MODEL001", f"the task of {folder} can't be told from its architecture", str(architecture), fix="give --type"
    )


def _configuration(model: Model, task: Task, *, weights: bool) -> tuple[Path | None, PretrainedConfig]:
    """Return the configuration, and the folder that it lies in unless it is the job file's."""
    if bool(model.repository) == (model.config is not None):
        raise ConfigError(
            "MODEL002",
            "a model comes from model.repository or from [model.config]",
            "both" if model.repository else "neither",
            "one of them",
        )
    if model.config is not None:
        config = _new_configuration(model.config)
        _check_class(task, config, "[model.config]", trusted=False)
        return None, config
    repository, trusted = str(model.repository), code_allowed(model.trust_remote_code)
    token = model.token.get_secret_value() if model.token else None
    folder = fetch(repository, model.revision, token, weights=weights, code=trusted)
    config = _saved_configuration(folder, repository, trusted)
    _check_class(task, config, repository, trusted)
    return folder, config


def _new_configuration(settings: dict[str, Any]) -> PretrainedConfig:
    """Make a configuration from the job file's table."""
    model_type, rest = settings.get("model_type"), {k: v for k, v in settings.items() if k != "model_type"}
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise _unknown_model_type("model.config.model_type", model_type)
    with _errors_as(ConfigError, "MODEL004", f"[model.config] is no {model_type} configuration"):
        config = transformers.AutoConfig.for_model(model_type, **rest)
        known = _known_keys(config)
    unknown = [key for key in rest if key not in known and key in vars(config)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0)[0]
        raise ConfigError(
            "MODEL004", f"unknown key model.config.{unknown[0]} of a {model_type} model", fix=f"did you mean {near!r}?"
        )
    return config


def _known_keys(config: PretrainedConfig) -> set[str]:
    """Keys that mean something to this kind of configuration; others, transformers would keep and ignore."""
    fields = {field.name for field in dataclasses.fields(config)}
    try:
        attributes = set(vars(type(config)()))
    except Exception:  # a few kinds can't be made of defaults; then anything goes
        attributes = set(vars(config))
    return fields | attributes | set(config.attribute_map) | _ALWAYS_KNOWN


def _saved_configuration(folder: Path, repository: str, trusted: bool) -> PretrainedConfig:
    """Read the configuration of a repository."""
    settings = _settings(folder)
    if settings.get("model_type") not in transformers.CONFIG_MAPPING and not trusted:
        if "auto_map" in settings:
            raise _untrusted(repository)
        raise _unknown_model_type(f"model_type in {folder / 'config.json'}", settings.get("model_type"))
    with _errors_as(CheckpointError, "MODEL005", f"configuration of {repository} can't be used"):
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trusted)


def _settings(folder: Path) -> dict[str, Any]:
    """Read `config.json` as it stands."""
    file = folder / "config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError("MODEL005", f"{file} can't be read", str(error), "a folder with a saved model") from None
    if not isinstance(settings, dict):
        raise CheckpointError("MODEL005", f"{file} is no model configuration", type(settings).__name__, "an object")
    return settings


def _auto_class(task: Task) -> Any:
    auto = getattr(transformers, task.auto_class, None)
    if auto is None:
        raise ConfigError(
            "MODEL001",
            f"this transformers has no class for {task.name} models",
            transformers.__version__,
            fix="install a newer transformers",
        )
    return auto


def _load_class(task: Task, config: PretrainedConfig) -> None:
    """Load the module that has the model's class, which takes longer than to build a small model."""
    with suppress(Exception), uncollected():  # What is wrong with it is told when the model is built.
        _auto_class(task)._model_mapping.get(type(config), None)


def _check_class(task: Task, config: PretrainedConfig, where: str, trusted: bool) -> None:
    """Make sure that the task's Auto class has a model for this configuration."""
    if type(config) in _auto_class(task)._model_mapping:
        return
    if task.auto_class in (getattr(config, "auto_map", None) or {}) and where != "[model.config]":
        if trusted:
            return
        raise _untrusted(where)
    fitting = sorted({t.name for t in TASKS.values() if type(config) in _auto_class(t)._model_mapping})
    raise ConfigError(
        "HUB004",
        f"model.type doesn't fit the {config.model_type} model of {where}",
        task.name,
        ", ".join(fitting) or "none",
    )


def _unknown_model_type(where: str, model_type: object) -> ConfigError:
    near = difflib.get_close_matches(str(model_type), transformers.CONFIG_MAPPING, n=1, cutoff=0)[0]
    return ConfigError(
        "MODEL003",
        f"{where} is not a model of transformers {transformers.__version__}",
        repr(model_type),
        "such as gpt2, llama, vit, resnet",
        f"did you mean {near!r}?" if model_type else "name one",
    )


def _untrusted(repository: str) -> AuthenticationError:
    return AuthenticationError(
        "SEC004",
        f"model repository {repository} wants to run its own Python code (auto_map in config.json)",
        fix=f"choose another, or trust it: model.trust_remote_code = true, and {REMOTE_CODE_VARIABLE}=1 on the nodes",
    )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's generator, and put it back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def _errors_as(kind: type[HyphaError], code: str, what: str) -> Iterator[None]:
    """Turn whatever a library raises about a user's model into one of our errors.

    Model classes check their values by any means from assertions to KeyErrors, so nothing narrower would do.
    """
    try:
        yield
    except HyphaError:
        raise
    except ImportError as error:
        raise ConfigError("MODEL008", f"{what}: a package is missing", _line(error), fix="install it") from error
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise CapacityError("MODEL014", f"{what}: too little memory", _line(error)) from error
        raise kind(code, what, _line(error)) from error


def _line(error: Exception) -> str:
    """Return an exception as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
