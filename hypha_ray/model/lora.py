"""Low-rank adapters by PEFT (LoRA, arXiv 2106.09685): attached to a model, loaded, saved, and merged into its weights.

Only the adapter and the head of a task other than language modelling are trained. The weights below are frozen, and so
are left out of layouts, deltas and snapshots.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hypha_ray.config.schema import Model
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.model.loading.build import seeded
from hypha_ray.model.loading.configuration import errors_as
from hypha_ray.model.loading.hub import CONFIGURATION, base_of
from hypha_ray.model.loading.weights import is_of_head
from hypha_ray.model.tasks.table import find_task
from hypha_ray.model.tasks.task import Task

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Prefix of all names in a file of weights, from the classes in which PEFT wraps a model."""
_NAME = "default"
_TASKS: Final = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
}
"""PEFT's names of tasks."""


def has_adapter(model: Model) -> bool:
    """Return whether a job trains an adapter: a new one, or that of its repository."""
    return model.lora.rank is not None or base_of(model)[1] is not None


def needs_whole(model: Model) -> bool:
    """Return whether a job's repository has to have all weights: a new head would stay random below an adapter."""
    return has_adapter(model) and not trains_head(find_task(model.type))


def trains_head(task: Task) -> bool:
    """Return whether the head is trained as a whole: that of a language model is part of what was pretrained."""
    return not task.perplexity


def adapted(network: PreTrainedModel, model: Model, seed: int, *, weights: bool = True) -> PreTrainedModel:
    """Return the network with a job's adapter attached, if the job trains one.

    Raises:
        HyphaError: any error of `attach_adapter`.

    """
    return attach_adapter(network, model, seed, weights=weights) if has_adapter(model) else network


def attach_adapter(network: PreTrainedModel, model: Model, seed: int, *, weights: bool = True) -> PreTrainedModel:
    """Attach a job's adapter to its base model, in place, and freeze all other weights.

    Args:
        network: base model; on torch's meta device, the adapter has no weights either.
        model: table of the job file, for which `has_adapter` holds.
        seed: seed of a new adapter's weights.
        weights: load the weights of an adapter in a repository.

    Returns:
        The network.

    Raises:
        ConfigError: MODEL019, adapter and model don't fit each other.
        CheckpointError: the adapter's folder is damaged.

    """
    _, folder = base_of(model)
    if folder is not None and model.lora.rank is not None:
        what = f"{model.repository} is an adapter, which has a rank of its own"
        fix = "leave [model.lora] out to go on training it, or give its base model for a new one"
        raise ConfigError("MODEL019", what, f"model.lora.rank = {model.lora.rank}", "no [model.lora]", fix)
    _refuse_statistics(network)
    config = _new_config(network, model) if folder is None else _saved_config(folder)
    from peft import LoraModel
    from peft.tuners.tuners_utils import cast_adapter_dtype

    names = "[model.lora]" if folder is None else str(model.repository)
    targets = [] if isinstance(config.target_modules, str) else config.target_modules or ()
    _refuse_tied(network, [*targets, *(config.modules_to_save or ())])
    with seeded(seed), _silent(), errors_as(ConfigError, "MODEL019", f"{names} can't be attached to the model"):
        LoraModel(network, config, _NAME)
        cast_adapter_dtype(network, _NAME)  # An adapter below weights of 16 bits is of 32.
    if folder is not None and weights:
        _load(network, folder)
    return network.train()


def merge_adapter(network: Any) -> Any:
    """Add an adapter to its base model's weights, in place; the network is a plain model of transformers again."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    done: tuple[str, ...] = ()
    for name, module in list(network.named_modules()):
        if name.startswith(done):  # Layers of adapters may be nested, as those of experts are.
            continue
        if hasattr(module, "unload_and_optionally_merge_module"):
            plain = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        elif isinstance(module, BaseTunerLayer):
            module.merge()
            plain = module.get_base_layer()
        else:
            continue
        parent, _, last = name.rpartition(".")
        setattr(network.get_submodule(parent), last, plain)
        done = (*done, f"{name}.")
    del network.peft_config
    return network


def save_adapter(network: Any, model: Model, folder: Path, final: Path | None = None) -> None:
    """Write the adapter of a network as PEFT does: configuration and safetensors.

    A base model of this machine is named by its path from the adapter's folder, so both can be moved together.

    Args:
        network: the network.
        model: table of the job file.
        folder: folder to write.
        final: folder that the adapter is moved to; None: it stays.

    """
    from peft import get_peft_model_state_dict

    config: LoraConfig = network.peft_config[_NAME]
    base, _ = base_of(model)
    path = Path(str(base.repository)).expanduser()
    beside = path.is_dir() and os.path.relpath(path.resolve(), (final or folder).resolve())
    config.base_model_name_or_path = beside or base.repository
    config.revision, config.task_type = base.revision, _TASKS.get(find_task(model.type).name)
    config.save_pretrained(folder)
    tensors = get_peft_model_state_dict(network, save_embedding_layers=False)
    save_file({_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)


def _new_config(network: PreTrainedModel, model: Model) -> LoraConfig:
    """Return PEFT's configuration of a new adapter.

    Raises:
        ConfigError: a name fits no module of the model, or is tied to another.

    """
    from peft import LoraConfig

    lora = model.lora
    rank = model.lora.rank
    assert rank is not None
    heads = _heads(network) if trains_head(find_task(model.type)) else []
    _check_names(network, "targets", [name for name in lora.targets if name != "all-linear"])
    _check_names(network, "modules_to_save", lora.modules_to_save)
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear" if "all-linear" in lora.targets else lora.targets,
        modules_to_save=sorted({*heads, *lora.modules_to_save}) or None,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
    )


def _heads(network: PreTrainedModel) -> list[str]:
    """Return the names of the head's outermost modules."""
    names = {name for name, _ in network.named_parameters() if is_of_head(network, name)}
    return sorted({_outermost(network, name) for name in names})


def _outermost(network: PreTrainedModel, name: str) -> str:
    """Return the name of the outermost module that has a parameter and nothing of the base model."""
    parts = name.split(".")[:-1]
    others = [other for other, _ in network.named_parameters() if not is_of_head(network, other)]
    prefixes = (".".join(parts[:size]) for size in range(1, len(parts) + 1))
    return next(one for one in prefixes if not any(other.startswith(f"{one}.") for other in others))


def _check_names(network: PreTrainedModel, key: str, wanted: list[str]) -> None:
    """Refuse names that are no module's: PEFT passes over some of them."""
    modules = [name for name, _ in network.named_modules() if name]
    for name in wanted:
        if not any(module == name or module.endswith(f".{name}") for module in modules):
            leaves = sorted({module.rpartition(".")[2] for module in modules} - set(map(str, range(1000))))
            allowed = "such as " + ", ".join(leaves[:12])
            raise ConfigError("MODEL019", f"model.lora.{key} names no module of the model", repr(name), allowed)


def _refuse_tied(network: PreTrainedModel, names: list[str]) -> None:
    """Refuse to adapt a module whose weights another one shares: merged, that one would change, too."""
    places: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    for modules in places.values():
        for name in names:
            if len(modules) > 1 and any(module == name or module.endswith(f".{name}") for module in modules):
                what = f"an adapter can't train a module whose weights are tied: {' and '.join(modules)}"
                raise ConfigError("MODEL019", what, repr(name), "modules with weights of their own")


def _refuse_statistics(network: PreTrainedModel) -> None:
    """Refuse batch statistics, which go on changing below a frozen model and are no part of an adapter."""
    for name, module in network.named_modules():
        if getattr(module, "track_running_stats", False):
            what = f"an adapter can't be trained on {type(network).__name__}, which has batch statistics"
            raise ConfigError("MODEL019", what, name, fix="leave [model.lora] out, and train all weights")


def _saved_config(folder: Path) -> LoraConfig:
    """Read the configuration of a saved adapter.

    Raises:
        ConfigError: the adapter isn't LoRA, or begins in a way that changes the base model.
        CheckpointError: the configuration is damaged, or the weights are pickled or missing.

    """
    from peft import LoraConfig, PeftConfig

    with _silent(), errors_as(CheckpointError, "MODEL006", f"{folder / CONFIGURATION} can't be used"):
        config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig) or _untrainable(config):
        got = _untrainable(config) if isinstance(config, LoraConfig) else str(config.peft_type)
        fix = "merge it into its base model (peft: merge_and_unload()), and give the folder where that is saved"
        raise ConfigError("MODEL019", f"adapter {folder} isn't of a kind that can be trained", got, "LORA", fix)
    if not (folder / WEIGHTS).is_file():
        found = ", ".join(sorted(file.name for file in folder.glob("adapter_model.*"))) or "no weights"
        raise CheckpointError("SEC003", f"adapter {folder} has no safetensors weights", found, WEIGHTS)
    config.inference_mode = False
    return config


def _untrainable(config: LoraConfig) -> str:
    """Return the setting of an adapter that can't be trained or merged here; empty if there is none."""
    if config.init_lora_weights not in (True, False, "gaussian"):
        return str(config.init_lora_weights)
    return "lora_bias" if config.lora_bias else ""  # PEFT merges none into a layer without a bias.


def _load(network: PreTrainedModel, folder: Path) -> None:
    """Load an adapter's weights; exactly those that the network has."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    try:
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError("MODEL006", f"{folder / WEIGHTS} can't be loaded", str(error)) from None
    own = get_peft_model_state_dict(network, save_embedding_layers=False)
    wanted, found = ({name: tuple(one.shape) for name, one in part.items()} for part in (own, tensors))
    if wanted != found:
        wrong = sorted(dict(wanted.items() ^ found.items()))
        got = f"{len(wrong)} tensors are missing, unknown or of another shape ({', '.join(wrong[:3])})"
        fix = "copy the whole folder, and check that base_model_name_or_path is the model that it was made for"
        raise CheckpointError("MODEL006", f"weights of adapter {folder} aren't those of its model", got, fix=fix)
    with _silent():
        set_peft_model_state_dict(network, tensors)


@contextmanager
def _silent() -> Iterator[None]:
    """Silence PEFT's remarks, such as one about GPT-2's transposed matrices, of which it takes care."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
