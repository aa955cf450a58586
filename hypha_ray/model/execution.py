"""Execution of a model by a worker: attention, known masks, compiled code, operations, and ``auto`` settings.

`config.automatic` chooses those settings by facts about a device and a model, which are collected here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hypha_ray.config import Job
from hypha_ray.config.automatic import DeviceFacts, ModelFacts, automatic, chosen_job, find_card, left_off
from hypha_ray.config.resources import Worker, WorkerGroup
from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.model.build import random_model, task_of
from hypha_ray.model.configuration import errors_as
from hypha_ray.model.environment import device_of
from hypha_ray.model.lora import exported, has_adapter, sketch_trained
from hypha_ray.model.loss_check import check_fused_on_copy, head_of
from hypha_ray.model.losses import Losses, token_cross_entropy
from hypha_ray.model.preferences.losses import has_frozen_copy
from hypha_ray.model.tasks import find_task
from hypha_ray.types import Samples

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Compute: TypeAlias = Callable[[Mapping[str, Tensor]], Losses]
Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Function that compiles another one, for one shape of its tensors at a time."""
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
ADMITTED_AFTER: Final = 3
"""Number of successive batches of a new shape after which that is compiled; a round's short last batch comes alone."""
_COMPILERS: Final = {"cpu": ("CXX", ("g++", "clang++")), "cuda": ("CC", ("cc", "gcc", "clang"))}
"""Environment variable and names of compilers that torch.compile needs for a device: of C++ or of C."""
_TRIED_TOKENS: Final = 16
"""Number of tokens of a sequence on which the fused loss is tried."""
_PLAIN_DECODERS: Final = frozenset(
    {
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "m2m_100",
        "marian",
        "mbart",
        "pegasus",
        "plbart",
        "whisper",
    }
)
"""Model types whose decoder has all positions in order and hides none, unless it is given others."""
_OF_DECODERS: Final = frozenset({"decoder_attention_mask", "decoder_position_ids"})
_PACKED: Final = "find_packed_sequence_indices"
_EXPORTED: Final = "is_torchdynamo_exporting"
_MASK: Final = "attention_mask"
_OF_TEXTS: Final = frozenset({"input_ids", _MASK, "labels"})
_COUNTED: Final = ("causal-lm", "masked-lm", "sequence-classification", "token-classification")
"""Tasks of models that all tokens go through, and all parameters with each of them."""
_RECURRENT: Final = "create_recurrent_attention_mask"


def check_execution(network: PreTrainedModel, worker: Worker) -> None:
    """Refuse settings that the model's class doesn't know; packages on the workers' machines aren't checked.

    Raises:
        ConfigError: MODEL020.

    """
    name = type(network).__name__
    if worker.gradient_checkpointing and not network.supports_gradient_checkpointing:
        problem = f"worker.gradient_checkpointing: {name} can't compute its activations again"
        raise ConfigError("MODEL020", problem, fix="leave it out, and set rounds.accumulation to save memory")
    implementations = {
        "sdpa": network._supports_sdpa,
        "flex_attention": network._supports_flex_attn,
        "flash_attention_2": network._supports_flash_attn,
        "flash_attention_3": network._supports_flash_attn,
    }
    if not implementations.get(worker.attention, True):
        supported = [implementation for implementation, is_supported in implementations.items() if is_supported]
        problem = f"worker.attention: {name} lacks this implementation"
        raise ConfigError("MODEL020", problem, str(worker.attention), ", ".join(["eager", *supported]))


def set_execution(network: PreTrainedModel, worker: Worker) -> None:
    """Set up a model as a worker is to compute it.

    Raises:
        ConfigError: MODEL020, the model doesn't know a setting, or MODEL008, a package is missing on this machine.

    """
    check_execution(network, worker)
    if worker.attention not in ("auto", "none"):
        with errors_as(ConfigError, "MODEL020", f"worker.attention = {worker.attention!r} can't be used"):
            network.set_attn_implementation(worker.attention)
    if worker.gradient_checkpointing:
        network.activation_checkpointing_enable()


class KnownMasks:
    """Answers by the host to what transformers asks of a model's masks: whether they hide anything.

    Otherwise it asks the device in each forward pass, which waits for all that the device has to do before. Masks of
    other shapes are asked as always, and so are all of them in a version of transformers that asks in another way.

    In compiled code it can't ask, and makes a mask of all pairs of positions, with which torch takes a slow kernel. So
    compiled texts without padding have no mask, as if they were computed without compiling.

    Args:
        model: the model that is run.
        compiled: whether all of it is compiled.

    """

    def __init__(self, model: torch.nn.Module, compiled: bool = False) -> None:
        config: Any = model.config
        self._compiled = compiled
        self._has_sdpa = getattr(config, "_attn_implementation", None) == "sdpa"
        self._has_two_masks = bool(getattr(config, "is_encoder_decoder", False))
        self._has_plain_decoder = self._has_two_masks and config.model_type in _PLAIN_DECODERS
        modules = [sys.modules[type(part).__module__] for part in model.modules()]
        self._recurrent = {module.__name__: module for module in modules if hasattr(module, _RECURRENT)}

    @contextmanager
    def of(self, inputs: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """Context in which the host answers for these keyword arguments of a model on the CPU; it has those to pass."""
        if self._needs_no_mask(inputs):
            inputs = {name: tensor for name, tensor in inputs.items() if name != _MASK}
        with ExitStack() as stack:
            for owner, name, answer in self._answers(inputs):
                asks = getattr(owner, name, None)
                if asks is not None:
                    stack.callback(setattr, owner, name, asks)
                    setattr(owner, name, partial(answer, asks))
            yield inputs

    def _needs_no_mask(self, inputs: Mapping[str, Tensor]) -> bool:
        """Whether compiled code computes the same without the mask."""
        mask = inputs.get(_MASK)
        if not self._compiled or not self._has_sdpa or self._has_two_masks or self._recurrent:
            return False
        return mask is not None and inputs.keys() <= _OF_TEXTS and bool(mask.all())

    def _answers(self, inputs: Mapping[str, Tensor]) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Modules, names of functions in them, and functions of these functions and their arguments."""
        from transformers import masking_utils

        if self._has_plain_decoder and not inputs.keys() & _OF_DECODERS:
            yield masking_utils, "fast_all", _hides_nothing
            yield masking_utils, _PACKED, _is_in_order
        elif not self._has_two_masks and "position_ids" not in inputs:
            yield masking_utils, _PACKED, _ask_unless_in_order
        if self._compiled:
            yield masking_utils, _EXPORTED, _is_not_exported
        mask = inputs.get(_MASK)
        if mask is None or mask.ndim < 2 or self._compiled:  # Its code holds for all masks.
            return
        rows = mask.flatten(0, -2)  # The model gets pairs and choices as rows.
        yield masking_utils, "_ignore_bidirectional_mask_sdpa", partial(_ask_host, rows.bool())
        if not self._has_two_masks:
            yield masking_utils, "fast_all", partial(_ask_host, rows.bool())
        for module in self._recurrent.values():
            yield module, _RECURRENT, partial(_mask_recurrent, rows)


def _ask_host(host_mask: Tensor, ask: Any, mask: Tensor | None, *arguments: Any) -> Any:
    """Call a function of a mask with the host's copy, if the mask has its shape."""
    if mask is not None and mask.shape == host_mask.shape:
        mask = host_mask
    return ask(mask, *arguments)


def _mask_recurrent(host_mask: Tensor, ask: Any, *arguments: Any, **named: Any) -> Any:
    """Return the mask of layers with recurrence; None if the host's copy hides nothing."""
    mask = named.get(_MASK)
    if mask is None or mask.shape != host_mask.shape:
        return ask(*arguments, **named)
    answer = ask(*arguments, **named | {_MASK: host_mask})
    if answer is None:
        return None
    return mask[:, -answer.shape[1] :].contiguous()


def _hides_nothing(ask: Any, mask: Tensor) -> bool:
    """Answer for a decoder's own mask, which is of ones."""
    return True


def _is_in_order(ask: Any, positions: Tensor) -> None:
    """Answer for a decoder's own positions: no sequence is packed."""


def _is_not_exported(ask: Any) -> bool:
    """Answer for compiled code, which torch before 2.14 takes for exported code."""
    return False


def _ask_unless_in_order(ask: Any, positions: Tensor) -> Any:
    """Answer for positions that a model made for all rows at once, as one range; ask about others."""
    if len(positions) > 1 and positions.stride(0) == 0:
        return None
    return ask(positions)


def resolved_job(job: Job) -> Job:
    """Return the job with the settings that this process is to compute with; none of them is ``auto``."""
    if not automatic(job):
        return job
    device = device_facts(device_of(job.worker.device))
    if left_off(job, device) is not None:
        return chosen_job(job, device)
    return chosen_job(job, device, model_facts(job, exported(sketch_trained(job))))


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the facts about a device of this machine that settings depend on."""
    if device.type != "cuda":
        return DeviceFacts(device.type)
    capability = None
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
    return DeviceFacts("cuda", torch.cuda.get_device_name(device), capability, can_compile())


def can_compile() -> bool:
    """Whether torch.compile can build kernels for a GPU here."""
    return not missing_to_compile("cuda")


def missing_to_compile(device_type: str) -> list[str]:
    """Return what torch.compile lacks here to build kernels for a device, in words."""
    missing_parts: list[str] = []
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        missing_parts.append("Triton")
    variable, compilers = _COMPILERS[device_type]
    if not os.environ.get(variable) and not any(map(shutil.which, compilers)):
        missing_parts.append(f"a compiler ({', '.join(compilers)}, or {variable})")
    # The folders that torch's compiler for CPUs includes; the last one is that of frameworks of macOS.
    include_folders = [sysconfig.get_path("include"), sysconfig.get_path("include", scheme="posix_prefix")]
    include_folders.append(str(Path(sysconfig.get_path("stdlib")).parents[1] / "Headers"))
    if not any(Path(folder, "Python.h").is_file() for folder in include_folders):
        missing_parts.append("Python's headers")
    return missing_parts


def require_compiler(worker: Worker, device: torch.device) -> None:
    """Refuse `worker.compile` on a machine that can't compile.

    Raises:
        ConfigError: MODEL008.

    """
    missing_parts = missing_to_compile(device.type) if worker.compiles else []
    if missing_parts:
        problem = f"worker.compile: torch.compile can't build kernels for {device.type} on this machine"
        fix = "install what is missing, or leave worker.compile out"
        raise ConfigError("MODEL008", problem, f"no sign of {', '.join(missing_parts)}", fix=fix)


def model_facts(job: Job, network: PreTrainedModel) -> ModelFacts:
    """Return the facts about a job's model, which may be on torch's meta device, that settings depend on."""
    config = network.config.get_text_config()
    is_narrow = any(
        parameter.is_floating_point() and parameter.element_size() == 2 for parameter in network.parameters()
    )
    return ModelFacts(
        task=find_task(job.model.type).name,
        parameters=_parameters(network),
        layers=_number(config, "num_hidden_layers"),
        features=_number(config, "hidden_size"),
        vocabulary=_number(config, "vocab_size"),
        narrow=is_narrow,
        foreign=not type(network).__module__.startswith("transformers."),
        routed=is_routed(config),
        adapted=has_adapter(job.model),
        has_sdpa=network.config._attn_implementation == "sdpa",
        fuses=_fuses(job, network),
    )


def is_routed(config: Any) -> bool:
    """Whether a configuration, or a table of it such as DBRX's ``ffn_config``, has several experts."""
    tables: list[dict[str, Any]] = [config.to_dict()]
    for table in tables:
        for name, value in table.items():
            if isinstance(value, dict) and name.endswith("_config"):
                tables.append(value)
            elif "expert" in name and isinstance(value, int) and value > 1:
                return True
    return False


def _parameters(network: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


def _fuses(job: Job, network: PreTrainedModel) -> bool:
    """Whether a language model's loss can be fused with its head, tried on a small copy of the model."""
    vocabulary = _number(network.config.get_text_config(), "vocab_size")
    if find_task(job.model.type).name != "causal-lm" or job.model.input_names is not None or not vocabulary:
        return False
    ids = np.arange(2 * _TRIED_TOKENS, dtype=np.int64) % vocabulary
    samples = Samples({"input_ids": ids.reshape(2, -1)}, np.zeros((2, 3), np.int64))
    try:
        task = task_of(job.model, network)
        head_of(task, network)
        build = partial(random_model, job.model, task)
        return check_fused_on_copy(task, samples, network.config, build, _parameters(network))
    except HyphaError:
        return False


def token_operations(job: Job, model: Any, parameters: int) -> float | None:
    """Return the operations of training on a token: 6 for each parameter (arXiv 2204.02311, appendix B).

    A frozen copy of the model, a reference for preferences, takes 2 more. Embeddings count. Attention doesn't, and
    neither does what is computed twice to save memory.

    Returns:
        None for adapters, whose frozen weights have no gradients, and for models with experts, some of which a token
        passes through. None for encoders with decoders, too, and for other tasks than those of texts.

    """
    if job.rl.algorithm is not None or find_task(job.model.type).name not in _COUNTED or has_adapter(job.model):
        return None
    config = model.config
    if job.model.input_names is not None or config.is_encoder_decoder or is_routed(config.get_text_config()):
        return None
    if has_frozen_copy(job.preference, adapted=False):
        return 8.0 * parameters
    return 6.0 * parameters


def peak_operations(group: WorkerGroup, device: torch.device) -> float | None:
    """Return the dense operations of 16 bits in a second that a worker's GPUs, or its part of one, are made for.

    Returns:
        None without a GPU, and for a card that isn't listed in `config.automatic`.

    """
    if device.type != "cuda":
        return None
    card = find_card(torch.cuda.get_device_name(device))
    if card is None or not group.gpu:
        return None
    return card.tflops * 1e12 * group.gpu


def compile_by_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for each shape of its tensors by itself."""
    return torch.compile(function, dynamic=False)


def compile_layers(
    layers: Sequence[torch.nn.Module], compute: Callable[..., Losses], compiler: Compiler = compile_by_shape
) -> Compute:
    """Return a function with compiled layers and a compiled loss of tokens; the rest of it stays as it is.

    Layers of one class share their code, so it is compiled in the time of one layer. They are the model's own before
    and after a call, so evaluations and copies of the model know nothing of it.

    Args:
        layers: layers of the model, from `blocks_of`.
        compute: function of a batch and of ``token_loss``, such as `training_losses` for a model.
        compiler: function that compiles another one.

    """
    # The compiler looks at gradients of a layer's inputs, which have none (torch 2.13).
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf Tensor")
    forward_of = {layer_class: compiler(layer_class.forward) for layer_class in {type(layer) for layer in layers}}
    token_loss = compiler(token_cross_entropy)

    def compute_compiled(inputs: Mapping[str, Tensor]) -> Losses:
        for layer in layers:
            layer.forward = partial(forward_of[type(layer)], layer)
        try:
            return compute(inputs, token_loss=token_loss)
        finally:
            for layer in layers:
                del layer.forward

    return compute_compiled


def try_gradients(compute: Callable[[], Losses], model: torch.nn.Module, device: torch.device) -> None:
    """Compute a model's first gradients and drop them: what computes them is compiled with the first ones."""
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            compute().trained.backward()
    finally:
        model.zero_grad()


class CompiledByShape:
    """A compiled function for batches of frequent shapes; others are computed by the plain function.

    Code for any number of samples is slower, so each shape is compiled by itself, which takes some ten seconds.

    Args:
        compute: function to compile.
        compiler: function that compiles it, for one shape at a time.

    """

    def __init__(self, compute: Compute, compiler: Compiler = compile_by_shape) -> None:
        self._plain = compute
        self._compiled: Compute = compiler(compute)
        self._admitted: set[Shapes] = set()
        self._latest: Shapes | None = None
        self._in_a_row = 0
        """Number of batches of the latest shape, one after the other."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> Losses:
        """Return the losses of a batch."""
        names = sorted(inputs.keys() - {_MASK})  # Batches of a usual size may have none.
        shapes = tuple((name, tuple(inputs[name].shape)) for name in names)
        if shapes != self._latest:
            self._latest = shapes
            self._in_a_row = 0
        self._in_a_row += 1
        if not self._admitted or self._in_a_row >= ADMITTED_AFTER:
            self._admitted.add(shapes)
        if shapes in self._admitted:
            return self._compiled(inputs)
        return self._plain(inputs)
