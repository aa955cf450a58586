"""The modules that a job trains: a whole model, or low-rank adapters by PEFT (LoRA, arXiv 2106.09685) in one.

Adapters are attached to a model, loaded, saved, and merged into its weights. Of such a model only the adapter and the
head of a task other than language modelling are trained. The weights below are frozen, and so are left out of layouts,
deltas and snapshots.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hypha_ray.config import Job
from hypha_ray.config.schema import Model
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.model.build import build_model, seeded, skeleton
from hypha_ray.model.configuration import errors_as
from hypha_ray.model.sources import CONFIGURATION, base_of
from hypha_ray.model.task import Task
from hypha_ray.model.tasks import find_task
from hypha_ray.model.weights import is_of_head, tensor_shapes

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
    task = find_task(model.type)
    return has_adapter(model) and not trains_head(task)


def trains_head(task: Task) -> bool:
    """Return whether the head is trained as a whole: that of a language model is part of what was pretrained."""
    return not task.perplexity


def with_adapter(network: PreTrainedModel, model: Model, seed: int, *, needs_weights: bool = True) -> PreTrainedModel:
    """Return the network with a job's adapter attached, if the job trains one.

    Raises:
        HyphaError: any error of `attach_adapter`.

    """
    if not has_adapter(model):
        return network
    return attach_adapter(network, model, seed, needs_weights=needs_weights)


def attach_adapter(network: PreTrainedModel, model: Model, seed: int, *, needs_weights: bool = True) -> PreTrainedModel:
    """Attach a job's adapter to its base model, in place, and freeze all other weights.

    Args:
        network: base model; on torch's meta device, the adapter has no weights either.
        model: table of the job file, for which `has_adapter` holds.
        seed: seed of a new adapter's weights.
        needs_weights: load the weights of an adapter in a repository.

    Returns:
        The network.

    Raises:
        ConfigError: MODEL019, adapter and model don't fit each other.
        CheckpointError: the adapter's folder is damaged.

    """
    _, folder = base_of(model)
    if folder is not None and model.lora.rank is not None:
        problem = f"{model.repository} is an adapter, which has a rank of its own"
        got = f"model.lora.rank = {model.lora.rank}"
        fix = "leave [model.lora] out to go on training it, or give its base model for a new one"
        raise ConfigError("MODEL019", problem, got, "no [model.lora]", fix)
    _refuse_statistics(network)
    if folder is None:
        source = "[model.lora]"
        config = _new_config(network, model)
    else:
        source = str(model.repository)
        config = _saved_config(folder)
    from peft import LoraModel
    from peft.tuners.tuners_utils import cast_adapter_dtype

    trained_modules = list(config.modules_to_save or ())
    if not isinstance(config.target_modules, str):
        trained_modules = [*(config.target_modules or ()), *trained_modules]
    _refuse_tied(network, trained_modules)
    with seeded(seed), _silent(), errors_as(ConfigError, "MODEL019", f"{source} can't be attached to the model"):
        LoraModel(network, config, _NAME)
        cast_adapter_dtype(network, _NAME)  # An adapter of 16-bit weights is float32.
    if folder is not None and needs_weights:
        _load(network, folder)
    return network.train()


@contextmanager
def without_adapter(network: Any) -> Iterator[None]:
    """Context in which a network is its base model, as if it had no adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers = [module for module in network.modules() if isinstance(module, kinds)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_adapter(network: Any) -> Any:
    """Add an adapter to its base model's weights, in place; the network is a plain model of transformers again."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    merged: tuple[str, ...] = ()
    for name, module in list(network.named_modules()):
        if name.startswith(merged):  # Layers of adapters may be nested, as those of experts are.
            continue
        if hasattr(module, "unload_and_optionally_merge_module"):
            plain_network = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        elif isinstance(module, BaseTunerLayer):
            module.merge()
            plain_network = module.get_base_layer()
        else:
            continue
        parent, _, last_name = name.rpartition(".")
        setattr(network.get_submodule(parent), last_name, plain_network)
        merged = (*merged, f"{name}.")
    del network.peft_config
    return network


def save_adapter(network: Any, model: Model, folder: Path, final_folder: Path | None = None) -> dict[str, str] | None:
    """Write the adapter of a network as PEFT does: configuration and safetensors.

    A base model of this machine is named by its absolute path, with which PEFT loads the adapter from any folder.

    Args:
        network: the network.
        model: table of the job file.
        folder: folder to write.
        final_folder: folder that the adapter is moved to; None: it stays.

    Returns:
        Path of such a base model from the final folder, by its absolute one; None for a base model of the hub.

    """
    from peft import get_peft_model_state_dict

    config: LoraConfig = network.peft_config[_NAME]
    base, _ = base_of(model)
    config.base_model_name_or_path = base.repository
    path = Path(str(base.repository)).expanduser().resolve()
    relative_paths = None
    if path.is_dir():
        config.base_model_name_or_path = str(path)
        relative_paths = {str(path): os.path.relpath(path, (final_folder or folder).resolve())}
    config.revision = base.revision
    config.task_type = _TASKS.get(find_task(model.type).name)
    config.save_pretrained(folder)
    tensors = get_peft_model_state_dict(network, save_embedding_layers=False)
    save_file({_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return relative_paths


def _new_config(network: PreTrainedModel, model: Model) -> LoraConfig:
    """Return PEFT's configuration of a new adapter.

    Raises:
        ConfigError: a name fits no module of the model, or is tied to another.

    """
    from peft import LoraConfig

    lora = model.lora
    rank = model.lora.rank
    assert rank is not None
    saved_modules = set(lora.modules_to_save)
    if trains_head(find_task(model.type)):
        saved_modules.update(_heads(network))
    _check_names(network, "targets", [name for name in lora.targets if name != "all-linear"])
    _check_names(network, "modules_to_save", lora.modules_to_save)
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear" if "all-linear" in lora.targets else lora.targets,
        modules_to_save=sorted(saved_modules) or None,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
    )


def _heads(network: PreTrainedModel) -> list[str]:
    """Return the names of the head's outermost modules."""
    head_parameters: list[str] = []
    body_parameters: list[str] = []
    for name, _ in network.named_parameters():
        if is_of_head(network, name):
            head_parameters.append(name)
        else:
            body_parameters.append(name)
    return sorted({_outermost(name, body_parameters) for name in head_parameters})


def _outermost(parameter: str, body_parameters: list[str]) -> str:
    """Return the name of the outermost module that has a parameter and none of the base model's."""
    parts = parameter.split(".")[:-1]
    for size in range(1, len(parts) + 1):
        module = ".".join(parts[:size])
        if not any(name.startswith(f"{module}.") for name in body_parameters):
            return module
    return ".".join(parts)


def _is_named(module: str, name: str) -> bool:
    """Return whether a name of the job file means a module: its whole name, or the end of it."""
    return module == name or module.endswith(f".{name}")


def _check_names(network: PreTrainedModel, key: str, names: list[str]) -> None:
    """Refuse names that are no module's: PEFT ignores some of them."""
    modules = [name for name, _ in network.named_modules() if name]
    for name in names:
        if not any(_is_named(module, name) for module in modules):
            leaves = {module.rpartition(".")[2] for module in modules}
            examples = sorted(module_name for module_name in leaves if not module_name.isdigit())
            allowed = "such as " + ", ".join(examples[:12])
            raise ConfigError("MODEL019", f"model.lora.{key} names no module of the model", repr(name), allowed)


def _refuse_tied(network: PreTrainedModel, names: list[str]) -> None:
    """Refuse to adapt a module whose weights another one shares: merging would change the other one, too."""
    modules_by_parameter: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        modules_by_parameter.setdefault(id(parameter), []).append(module)
    for modules in modules_by_parameter.values():
        if len(modules) == 1:
            continue
        for name in names:
            if any(_is_named(module, name) for module in modules):
                problem = f"an adapter can't train a module whose weights are tied: {' and '.join(modules)}"
                raise ConfigError("MODEL019", problem, repr(name), "modules with weights of their own")


def _refuse_statistics(network: PreTrainedModel) -> None:
    """Refuse batch statistics, which go on changing below a frozen model and are no part of an adapter."""
    for name, module in network.named_modules():
        if getattr(module, "track_running_stats", False):
            problem = f"an adapter can't be trained on {type(network).__name__}, which has batch statistics"
            raise ConfigError("MODEL019", problem, name, fix="leave [model.lora] out, and train all weights")


def _saved_config(folder: Path) -> LoraConfig:
    """Read the configuration of a saved adapter.

    Raises:
        ConfigError: the adapter isn't LoRA, or begins in a way that changes the base model.
        CheckpointError: the configuration is damaged, or the weights are pickled or missing.

    """
    from peft import LoraConfig, PeftConfig

    with _silent(), errors_as(CheckpointError, "MODEL006", f"{folder / CONFIGURATION} can't be used"):
        config = PeftConfig.from_pretrained(str(folder))
    unsupported = _untrainable(config) if isinstance(config, LoraConfig) else str(config.peft_type)
    if unsupported:
        fix = "merge it into its base model (peft: merge_and_unload()), and give the folder where that is saved"
        raise ConfigError("MODEL019", f"adapter {folder} isn't of a kind that can be trained", unsupported, "LORA", fix)
    if not (folder / WEIGHTS).is_file():
        files = sorted(file.name for file in folder.glob("adapter_model.*"))
        got = ", ".join(files) or "no weights"
        raise CheckpointError("SEC003", f"adapter {folder} has no safetensors weights", got, WEIGHTS)
    config.inference_mode = False
    return config


def _untrainable(config: LoraConfig) -> str:
    """Return the setting of an adapter that can't be trained or merged here; empty if there is none."""
    if config.init_lora_weights not in (True, False, "gaussian"):
        return str(config.init_lora_weights)
    if config.lora_bias:  # PEFT can't merge it into a layer without a bias.
        return "lora_bias"
    return ""


def _load(network: PreTrainedModel, folder: Path) -> None:
    """Load an adapter's weights, and refuse missing and unknown ones."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    try:
        saved_tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError("MODEL006", f"{folder / WEIGHTS} can't be loaded", str(error)) from None
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in saved_tensors.items()}
    expected_shapes = tensor_shapes(get_peft_model_state_dict(network, save_embedding_layers=False))
    shapes = tensor_shapes(tensors)
    if shapes != expected_shapes:
        differences = dict(expected_shapes.items() ^ shapes.items())
        wrong = sorted(differences)
        got = f"{len(wrong)} tensors are missing, unknown or of another shape ({', '.join(wrong[:3])})"
        fix = "copy the whole folder, and check that base_model_name_or_path is the model that it was made for"
        raise CheckpointError("MODEL006", f"weights of adapter {folder} aren't those of its model", got, fix=fix)
    with _silent():
        set_peft_model_state_dict(network, tensors)


@contextmanager
def _silent() -> Iterator[None]:
    """Silence PEFT's remarks, such as one about GPT-2's transposed matrices, which it handles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class CriticModel(torch.nn.Module):
    """Body of a language model under a head of one number, which is 0 before any training.

    Args:
        network: the language model, whose own head is left out.

    Raises:
        ConfigError: RL014, body and head of the model can't be told apart.

    """

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        output = network.get_output_embeddings()
        if network.base_model is network or output is None:
            fix = "choose an algorithm without a critic, or another model"
            raise ConfigError("RL014", "no critic can be made of the model", type(network).__name__, fix=fix)
        self.base_model: Any = network.base_model
        self.head = torch.nn.Linear(output.weight.shape[1], 1, device=network.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, **inputs: Any) -> torch.Tensor:
        """Return values, [sequences, positions]; the inputs are those of the body."""
        hidden: torch.Tensor = self.base_model(**inputs).last_hidden_state
        values: torch.Tensor = self.head(hidden)[..., 0]
        return values


class ActorCritic(torch.nn.Module):
    """Policy and critic, which are trained and exchanged together.

    Args:
        actor: the policy.
        critic: another copy of the model, to be made a critic.

    """

    def __init__(self, actor: PreTrainedModel, critic: PreTrainedModel) -> None:
        super().__init__()
        self.actor = actor
        self.critic = CriticModel(critic)


def build_trained(job: Job, device: torch.device | None = None) -> Any:
    """Build all modules that are trained and exchanged, on the CPU and with initial weights.

    Args:
        job: the job file.
        device: device that they will be used on, for quantized weights, which are made there; None: the CPU.

    Returns:
        The model of transformers, or `ActorCritic` if the job has a critic.

    Raises:
        HyphaError: any error of `build_model`.

    """
    seed = job.run.seed
    needs_all = needs_whole(job.model)

    def build() -> PreTrainedModel:
        network = build_model(job.model, seed, needs_all=needs_all, device=device)
        return with_adapter(network, job.model, seed)

    return _with_critic(job, build)


def sketch_trained(job: Job) -> Any:
    """Build the same modules on torch's meta device, without weights.

    Raises:
        HyphaError: any error of `skeleton`.

    """

    def build() -> PreTrainedModel:
        return with_adapter(skeleton(job.model), job.model, job.run.seed, needs_weights=False)

    return _with_critic(job, build)


def exported(trained_model: Any) -> PreTrainedModel:
    """Return the part of the trained modules that is exported: the model without a critic."""
    if isinstance(trained_model, ActorCritic):
        return trained_model.actor
    return cast("PreTrainedModel", trained_model)


def _with_critic(job: Job, build: Callable[[], PreTrainedModel]) -> Any:
    if job.rl.has_critic:
        return ActorCritic(build(), build())
    return build()
