"""Configuration of a job's model, from its repository or from `[model.config]`, and checks of it.

Nothing is guessed: an unknown key of `[model.config]`, a task that the model can't do, and code that isn't allowed are
errors with a code each.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hypha_ray.config.keys import BESIDE_REPOSITORY, LABELS, TOKENS
from hypha_ray.config.schema import Model
from hypha_ray.errors import AuthenticationError, CapacityError, CheckpointError, ConfigError, HyphaError
from hypha_ray.model.loading.folders import read_config
from hypha_ray.model.loading.hub import REMOTE_CODE_VARIABLE, base_of, fetch, remote_code_allowed
from hypha_ray.model.loading.weights import refuse_adapter
from hypha_ray.model.tasks.table import TASKS, UNTRAINABLE
from hypha_ray.model.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_COMMON = (
    frozenset(field for field in vars(transformers.GenerationConfig()) if not field.startswith("_"))
    | {"auto_map", "is_decoder", "tokenizer_class", "task_specific_params", "finetuning_task", "transformers_version"}
    | TOKENS
)
"""Keys that saved configurations have beyond the fields of their class; any `[model.config]` may have them."""
DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes in which a repository's weights can be trained."""
_READ = re.compile(r"config\.([a-z]\w+)|getattr\((?:self\.)?config, \"(\w+)\"")
"""Access to a configuration's key in the code of a model."""


def configuration_of(model: Model, task: Task, *, weights: bool) -> tuple[Path | None, PretrainedConfig]:
    """Return the configuration and its folder; None instead of the folder if it is the job file's.

    Raises:
        ConfigError: repository or configuration is wrong, or doesn't fit the task.
        AuthenticationError: the hub requires a token, or the repository runs code that isn't trusted.
        HubError: the hub can't be reached.
        CheckpointError: the repository's configuration is damaged.

    """
    given = model.config or {}
    whole = not given.keys() <= BESIDE_REPOSITORY
    if bool(model.repository) == (whole if model.repository else model.config is not None):
        raise ConfigError(
            "MODEL002",
            "a model comes from model.repository or from [model.config]",
            "both" if model.repository else "neither",
            "one of them",
        )
    if not model.repository:
        config = _new_configuration(given)
        _check_class(task, config, "[model.config]", trusted=False)
        return None, config
    model, _ = base_of(model)
    repository = str(model.repository)
    trusted = remote_code_allowed(model.trust_remote_code)
    given = model.config or {}
    token = model.token.get_secret_value() if model.token else None
    folder = fetch(repository, model.revision, token, weights=weights, code=trusted)
    refuse_adapter(folder, repository)
    config = _saved_configuration(folder, repository, trusted, given)
    _check_class(task, config, repository, trusted)
    return folder, config


def sets_labels(model: Model) -> bool:
    """Return whether the job sets the model's labels, so that its repository's head may have others."""
    return not LABELS.isdisjoint(model.config or {})


def _new_configuration(settings: dict[str, Any]) -> PretrainedConfig:
    """Make a configuration from `[model.config]`."""
    model_type = settings.get("model_type")
    rest = {k: v for k, v in settings.items() if k != "model_type"}
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise _unknown_model_type("model.config.model_type", model_type)
    with errors_as(ConfigError, "MODEL004", f"[model.config] is no {model_type} configuration"):
        config = transformers.AutoConfig.for_model(model_type, **rest)
        known = _known_keys(config)
    unknown = [key for key in rest if key not in known and key in vars(config)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(known), n=1, cutoff=0)[0]
        raise ConfigError(
            "MODEL004", f"unknown key model.config.{unknown[0]} of a {model_type} model", fix=f"did you mean {near!r}?"
        )
    return config


def _known_keys(config: PretrainedConfig) -> set[str]:
    """Return the keys that a configuration's class or model reads; transformers would ignore any other."""
    fields = {field.name for field in dataclasses.fields(config)}
    try:
        attributes = set(vars(type(config)()))
    except Exception:  # A few classes have no defaults; then every key is accepted.
        attributes = set(vars(config))
    return fields | attributes | set(config.attribute_map) | _COMMON | _read_by_the_model(config)


def _read_by_the_model(config: PretrainedConfig) -> set[str]:
    """Return the keys that a model's code reads from its configuration, such as T5's `decoder_start_token_id`."""
    folder = Path(str(sys.modules[type(config).__module__].__file__)).parent
    code = "".join(file.read_text(encoding="utf-8") for file in folder.glob("modeling_*.py"))
    return {found[1] or found[2] for found in _READ.finditer(code)}


def _saved_configuration(folder: Path, repository: str, trusted: bool, given: dict[str, Any]) -> PretrainedConfig:
    """Read a repository's configuration, and override its labels, special tokens and dtype by the job's.

    Whatever dtype the weights were saved in, they are trained in float32 unless the job names another one.
    """
    settings = read_config(folder)
    if settings.get("model_type") not in transformers.CONFIG_MAPPING and not trusted:
        if "auto_map" in settings:
            raise _untrusted(repository)
        raise _unknown_model_type(f"model_type in {folder / 'config.json'}", settings.get("model_type"))
    with errors_as(CheckpointError, "MODEL005", f"configuration of {repository} can't be used"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    further = {key: value for key, value in given.items() if key != "dtype"}
    if further:
        what = f"labels or special tokens of [model.config] can't be used for {repository}"
        with errors_as(ConfigError, "MODEL004", what):
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trusted, **further)
    config.dtype = _dtype(given.get("dtype", "float32"))
    return config


def _dtype(name: object) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError("MODEL004", "model.config.dtype is unknown", repr(name), ", ".join(DTYPES))
    found: torch.dtype = getattr(torch, str(name))
    return found


def auto_class(task: Task) -> Any:
    """Return transformers' Auto class for a task.

    Raises:
        ConfigError: the installed transformers has none.

    """
    auto = getattr(transformers, task.auto_class, None)
    if auto is None:
        raise ConfigError(
            "MODEL001",
            f"this transformers has no class for {task.name} models",
            transformers.__version__,
            fix="install a newer transformers",
        )
    return auto


def _check_class(task: Task, config: PretrainedConfig, where: str, trusted: bool) -> None:
    """Refuse a configuration for which the task's Auto class has no model."""
    if type(config) in auto_class(task)._model_mapping:
        return
    if task.auto_class in (getattr(config, "auto_map", None) or {}) and where != "[model.config]":
        if trusted:
            return
        raise _untrusted(where)
    fitting = sorted(
        {t.name for t in TASKS.values() if type(config) in auto_class(t)._model_mapping} - UNTRAINABLE.keys()
    )
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
def errors_as(kind: type[HyphaError], code: str, what: str) -> Iterator[None]:
    """Turn any exception of a library into one of our errors.

    Model classes check their values by all means, from assertions to KeyErrors, so nothing narrower would do.
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
