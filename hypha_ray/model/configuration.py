"""Configuration of a job's model, from its repository or from `[model.config]`, and checks of it.

Nothing is guessed: an unknown key of `[model.config]`, a task that the model can't do, and code that isn't allowed are
errors with a code each.
A task is completed for the model by the tensors of its forward, its labels and its vocabulary.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from hypha_ray.config.keys import BESIDE_REPOSITORY, LABELS, TOKENS
from hypha_ray.config.schema import Model
from hypha_ray.errors import AuthenticationError, CapacityError, CheckpointError, ConfigError, HyphaError, reason_of
from hypha_ray.model.sources import (
    REMOTE_CODE_VARIABLE,
    base_of,
    fetch,
    hub_token,
    read_config,
    remote_code_allowed,
)
from hypha_ray.model.task import Task, masking_of
from hypha_ray.model.tasks import TASKS, UNTRAINABLE
from hypha_ray.model.weights import refuse_adapter

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
_ALTERNATIVES = {
    "input_values": ("input_features",),
    "input_features": ("input_values",),
    "pixel_values": ("pixel_values_videos",),
}
"""Other keywords of a tensor, by the keyword in the table."""
_PADDING = {"rnnt": "blank_token_id", "tdt": "pad_token_id"}
"""Configuration key of the label that pads, for tasks whose losses don't ignore -100."""

OWN_CLASSES = ("multiple-choice", "next-sentence-prediction")
"""Tasks whose classes don't depend on the configuration's labels."""


def configuration_of(model: Model, task: Task, *, needs_weights: bool) -> tuple[Path | None, PretrainedConfig]:
    """Return the configuration and its folder; None instead of the folder if it is the job file's.

    Raises:
        ConfigError: repository or configuration is wrong, or doesn't fit the task.
        AuthenticationError: the hub requires a token, or the repository runs code that isn't trusted.
        HubError: the hub can't be reached.
        CheckpointError: the repository's configuration is damaged.

    """
    settings = model.config or {}
    if not model.repository:
        if model.config is None:
            raise _source_error("neither")
        config = _new_configuration(settings)
        _check_class(task, config, "[model.config]", is_trusted=False)
        return None, config
    if not settings.keys() <= BESIDE_REPOSITORY:
        raise _source_error("both")
    model, _ = base_of(model)
    repository = str(model.repository)
    is_trusted = remote_code_allowed(model.trust_remote_code)
    folder = fetch(repository, model.revision, hub_token(model), needs_weights=needs_weights, needs_code=is_trusted)
    refuse_adapter(folder, repository)
    config = _saved_configuration(folder, repository, is_trusted, model.config or {})
    _check_class(task, config, repository, is_trusted)
    return folder, config


def _source_error(got: str) -> ConfigError:
    problem = "a model comes from model.repository or from [model.config]"
    return ConfigError("MODEL002", problem, got, "one of them")


def sets_labels(model: Model) -> bool:
    """Return whether the job sets the model's labels, so that its repository's head may have others."""
    return not LABELS.isdisjoint(model.config or {})


def _new_configuration(settings: dict[str, Any]) -> PretrainedConfig:
    """Make a configuration from `[model.config]`."""
    keys = dict(settings)
    model_type = keys.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise _unknown_model_type("model.config.model_type", model_type)
    with errors_as(ConfigError, "MODEL004", f"[model.config] is no {model_type} configuration"):
        config = transformers.AutoConfig.for_model(model_type, **keys)
        model_keys = _keys_of(config)
    for key in keys:
        if key not in model_keys and key in vars(config):
            similar = difflib.get_close_matches(key, sorted(model_keys), n=1)
            problem = f"unknown key model.config.{key} of a {model_type} model"
            fix = f"did you mean {similar[0]!r}?" if similar else "remove it"
            raise ConfigError("MODEL004", problem, fix=fix)
    return config


def _keys_of(config: PretrainedConfig) -> set[str]:
    """Return the keys that a configuration's class or model reads; transformers would ignore any other."""
    keys = {field.name for field in dataclasses.fields(config)}
    try:
        keys.update(vars(type(config)()))
    except Exception:  # A few classes have no defaults; then every key is accepted.
        keys.update(vars(config))
    keys.update(config.attribute_map, _COMMON, _read_by_the_model(config))
    return keys


def _read_by_the_model(config: PretrainedConfig) -> set[str]:
    """Return the keys that a model's code reads from its configuration, such as T5's `decoder_start_token_id`."""
    module = sys.modules[type(config).__module__]
    folder = Path(str(module.__file__)).parent
    keys: set[str] = set()
    for file in folder.glob("modeling_*.py"):
        for match in _READ.finditer(file.read_text(encoding="utf-8")):
            keys.add(match[1] or match[2])
    return keys


def _saved_configuration(
    folder: Path, repository: str, is_trusted: bool, job_settings: dict[str, Any]
) -> PretrainedConfig:
    """Read a repository's configuration, and override its labels, special tokens and dtype by the job's.

    Whatever dtype the weights were saved in, they are trained in float32 unless the job names another one.
    """
    settings = read_config(folder)
    if settings.get("model_type") not in transformers.CONFIG_MAPPING and not is_trusted:
        if "auto_map" in settings:
            raise _untrusted(repository)
        raise _unknown_model_type(f"model_type in {folder / 'config.json'}", settings.get("model_type"))
    with errors_as(CheckpointError, "MODEL005", f"configuration of {repository} can't be used"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=is_trusted)
    overrides = dict(job_settings)
    dtype = overrides.pop("dtype", "float32")
    if overrides:
        problem = f"labels or special tokens of [model.config] can't be used for {repository}"
        with errors_as(ConfigError, "MODEL004", problem):
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=is_trusted, **overrides)
    config.dtype = _dtype(dtype)
    return config


def _dtype(name: object) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError("MODEL004", "model.config.dtype is unknown", repr(name), ", ".join(DTYPES))
    dtype: torch.dtype = getattr(torch, str(name))
    return dtype


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


def _check_class(task: Task, config: PretrainedConfig, source: str, is_trusted: bool) -> None:
    """Refuse a configuration for which the task's Auto class has no model."""
    if type(config) in auto_class(task)._model_mapping:
        return
    custom_classes = getattr(config, "auto_map", None) or {}
    if task.auto_class in custom_classes and source != "[model.config]":
        if is_trusted:
            return
        raise _untrusted(source)
    fitting_types: set[str] = set()
    for candidate in TASKS.values():
        if candidate.name not in UNTRAINABLE and type(config) in auto_class(candidate)._model_mapping:
            fitting_types.add(candidate.name)
    problem = f"model.type doesn't fit the {config.model_type} model of {source}"
    raise ConfigError("HUB004", problem, task.name, ", ".join(sorted(fitting_types)) or "none")


def _unknown_model_type(source: str, model_type: object) -> ConfigError:
    fix = "name one"
    if model_type:
        similar = difflib.get_close_matches(str(model_type), transformers.CONFIG_MAPPING, n=1, cutoff=0.7)
        fix = f"did you mean {similar[0]!r}?" if similar else fix
    return ConfigError(
        "MODEL003",
        f"{source} is not a model of transformers {transformers.__version__}",
        repr(model_type),
        "such as gpt2, llama, vit, resnet",
        fix,
    )


def _untrusted(repository: str) -> AuthenticationError:
    return AuthenticationError(
        "SEC004",
        f"model repository {repository} wants to run its own Python code (auto_map in config.json)",
        fix=f"choose another, or trust it: model.trust_remote_code = true, and {REMOTE_CODE_VARIABLE}=1 on the nodes",
    )


@contextmanager
def errors_as(error_type: type[HyphaError], code: str, problem: str) -> Iterator[None]:
    """Turn any exception of a library or of users' code into one of our errors.

    Model classes raise anything for a wrong value, from AssertionError to KeyError, so every exception is caught.
    """
    try:
        yield
    except HyphaError:
        raise
    except ImportError as error:
        missing_text = f"{problem}: a package is missing"
        raise ConfigError("MODEL008", missing_text, reason_of(error), fix="install it") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise CapacityError("MODEL014", f"{problem}: too little memory", reason_of(error)) from error
        raise error_type(code, problem, reason_of(error)) from error


def resolve_task(task: Task, network: Any, preprocessor: Any | None, explicit: bool) -> Task:
    """Complete a task for a model.

    Args:
        task: entry of the table.
        network: model with or without weights.
        preprocessor: tokenizer with the mask token, or None.
        explicit: the job chooses the task's tensors, and no others are fed.

    Raises:
        ConfigError: the mask token is outside of the model's vocabulary.

    """
    config = network.config
    parameter_names = parameters(network)
    task = replace(task, caches=_caches(network))
    if not explicit:
        task = replace(task, tensors=_pairs(task, parameter_names), accepts=parameter_names)
    if task.labels == "masked":
        task = replace(task, masking=masking_of(config, preprocessor))
    if task.labels == "pixels":
        task = replace(task, ignored=getattr(config, "semantic_loss_ignore_index", task.ignored))
    if task.name in _PADDING:
        task = replace(task, ignored=getattr(config, _PADDING[task.name]))
    if task.name == "ctc":
        task = replace(task, summed=getattr(config, "ctc_loss_reduction", None) == "sum")
    if task.name == "pretraining" and type(network) in AutoModelForCausalLM._model_mapping.values():
        task = replace(task, labels="shifted", optional=task.optional | {"labels"})
    problem = getattr(config, "problem_type", None)
    if task.labels == "samples" and task.classifies and task.name not in OWN_CLASSES:
        measures = problem in ("regression", "multi_label_classification") or (not problem and config.num_labels == 1)
        task = replace(task, measures=measures, classifies=not measures)
    return task


def parameters(network: Any) -> frozenset[str]:
    """Return the names of a forward's parameters."""
    signature = inspect.signature(network.forward)
    return frozenset(signature.parameters) - {"self", "args", "kwargs"}


def _caches(network: Any) -> bool:
    """Return whether a forward takes `use_cache`, itself or to pass on to its base model."""
    arguments = inspect.signature(network.forward).parameters
    if "use_cache" in arguments:
        return True
    return "kwargs" in arguments and "use_cache" in parameters(network.base_model)


def _pairs(task: Task, parameter_names: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Return the tensors that the model takes, with its keywords; all of them if its forward names none."""
    pairs: list[tuple[str, str]] = []
    for name, keyword in task.tensors:
        for alternative in (keyword, *_ALTERNATIVES.get(keyword, ())):
            if alternative in parameter_names:
                pairs.append((name, alternative))
                break
    if not pairs:
        return task.tensors
    for pair in task.tensors:
        if pair[1] == "labels" and pair not in pairs:
            pairs.append(pair)
    return tuple(pairs)
