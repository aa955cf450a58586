"""Memory that a training step of a worker takes, found by a step on tensors that have shapes and no memory."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from hypha_ray.config import Job
from hypha_ray.config.resources import WorkerGroup
from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.driver.preflight.trials import scored_samples
from hypha_ray.errors import ConfigError
from hypha_ray.model.execution import set_execution
from hypha_ray.model.layout import blocks_of
from hypha_ray.model.lora import has_adapter, sketch_trained
from hypha_ray.model.loss_check import head_of
from hypha_ray.model.losses import training_losses
from hypha_ray.model.metrics import MASKING_SEED, tensors_of
from hypha_ray.model.preferences.losses import has_frozen_copy
from hypha_ray.model.task import Task
from hypha_ray.optim.optimizers import EIGHT_BITS, Inner, build_optimizer, eight_bits_bytes
from hypha_ray.texts import size_in_memory
from hypha_ray.types import Samples

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Bytes of tensors at the peak of a step after the first, when the optimizer has its state."""

    weights: int
    optimizer: int
    """State of the optimizer."""
    activations: int
    """Activations, gradients, temporary tensors of operations, and weights that processes with shards gather."""
    whole_model: int | None = None
    """Bytes of the whole model, which each process builds before it keeps a part; None if the model isn't sharded."""
    is_upper_bound: bool = False
    """Whether the step takes less, because compiled code computes some activations again instead of keeping them."""

    @property
    def total(self) -> int:
        """Bytes of all tensors of a process."""
        return self.weights + self.optimizer + self.activations

    def of_worker(self, processes: int) -> int:
        """Bytes of all of a worker's processes, of which the first alone steps unless the model is sharded."""
        if self.whole_model is not None:
            return processes * max(self.total, self.whole_model)
        return self.total + (processes - 1) * (self.total - self.optimizer)

    def note(self, processes: int) -> str:
        """Return a line for the user."""
        total = size_in_memory(self.total)
        weights_text = f"weights {size_in_memory(self.weights)}"
        optimizer_text = f"optimizer {size_in_memory(self.optimizer)}"
        parts = f"{weights_text}, {optimizer_text}, activations and gradients {size_in_memory(self.activations)}"
        if processes == 1:
            bound = "at most " if self.is_upper_bound else ""
            return f"a training step of a worker takes {bound}{total}: {parts}"
        step_text = f"a training step of a worker's {processes} processes takes"
        if self.whole_model is not None:
            built_text = f"which builds a model of {size_in_memory(self.whole_model)} first"
            return f"{step_text} {size_in_memory(processes * self.total)}: {total} in each ({parts}), {built_text}"
        followers_text = f"{size_in_memory(self.total - self.optimizer)} in each of the others, which have no optimizer"
        all_text = size_in_memory(self.of_worker(processes))
        return f"{step_text} {all_text}: {total} in the first ({parts}), {followers_text}"


def memory_notes(case: Case, groups: Sequence[WorkerGroup]) -> tuple[list[str], list[str]]:
    """Describe the memory of a step of workers.

    Args:
        case: job, dataset and model; the job's settings are those of the groups.
        groups: groups of workers in Ray.

    Returns:
        A text for each number of processes, and warnings if a step takes more than workers without a GPU reserve.

    """
    job = case.job
    # The size of weights that are dequantized at a time isn't known.
    if job.rl.algorithm is not None or not groups or job.model.quantization is not None:
        return [], []
    notes: list[str] = []
    warnings: list[str] = []
    task, samples = scored_samples(case)
    for processes in sorted({job.processes_in(group) for group in groups}):
        sizes = step_memory(job, task, samples, processes)
        if sizes is None:
            return [], []
        notes.append(sizes.note(processes))
        reserved = []
        for group in groups:
            if job.processes_in(group) == processes and group.memory_gb and not group.gpu:
                reserved.append(group.memory_gb)
        if reserved and sizes.of_worker(processes) > min(reserved) * 1e9:
            problem = f"a training step takes more than the {min(reserved):g} GB that a worker reserves"
            warnings.append(f"{problem}: raise memory_gb, or save memory")
    return notes, warnings


def step_memory(job: Job, task: Task, samples: Samples, processes: int = 1) -> StepSizes | None:
    """Estimate the memory of a step of supervised training, by attention as CPUs compute it.

    Args:
        job: the job file.
        task: task from `resolve_task`.
        samples: some samples of the dataset; they are repeated up to the size of a micro-batch.
        processes: number of processes of a worker, each with a part of the batch; the estimate is of the first.

    Returns:
        None if the model can't be run without values.

    """
    process_batch = math.ceil(job.rounds.max_batch_size / processes)
    micro_batch = math.ceil(process_batch / job.rounds.accumulation)
    rows = [index % len(samples) for index in range(micro_batch)]
    repeated_samples = Samples({name: array[rows] for name, array in samples.arrays.items()}, samples.keys[rows])
    inputs = task.inputs(tensors_of(repeated_samples), repeated_samples.keys, MASKING_SEED)
    try:
        network = sketch_trained(job).train()
        set_execution(network, job.worker)
        with _without_tracebacks(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            _move_to_cpu(network)
            shards = None
            if processes > 1 and job.worker.sharding == "full":
                shards = SketchedShards(network, processes)
            fake_inputs = {name: fake.from_tensor(tensor) for name, tensor in inputs.items()}
            batches = math.ceil(process_batch / micro_batch)
            sizes = _measure_step(job, task, network, shards, fake_inputs, batches)
    except Exception:  # Models branch on values, or call kernels that know no shapes.
        return None
    if not has_frozen_copy(job.preference, has_adapter(job.model)):
        return sizes
    frozen_copy = bytes_of([*network.parameters(), *network.buffers()])
    return replace(sizes, weights=sizes.weights + frozen_copy)


def _move_to_cpu(network: torch.nn.Module) -> None:
    """Replace all tensors by tensors of the fake mode, on a CPU without memory; tied ones stay tied."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # The old ones are kept, so that no id is used again.
    for module in network.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    empty_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, torch.nn.Parameter):
                        empty_tensor = torch.nn.Parameter(empty_tensor, tensor.requires_grad)
                    moved[id(tensor)] = (tensor, empty_tensor)
                _, tensors[name] = moved[id(tensor)]  # type: ignore[assignment]


class _LiveBytes(TorchDispatchMode):
    """Size of all tensors that operations make, as long as they live.

    Args:
        uncounted: tensors that aren't counted, although operations return parts of them.

    """

    def __init__(self, uncounted: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        storages: dict[torch.UntypedStorage, bool] = {tensor.untyped_storage(): True for tensor in uncounted}
        self._known = WeakIdKeyDictionary(storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known[storage] = True
            weakref.finalize(storage, self._remove, storage.nbytes())
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _remove(self, size_bytes: int) -> None:
        self.now -= size_bytes


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep torch from logging operations that know no shapes."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _measure_step(
    job: Job,
    task: Task,
    network: PreTrainedModel,
    shards: SketchedShards | None,
    inputs: Mapping[str, Any],
    batches: int,
) -> StepSizes:
    """Take two steps, and return the peak of the second; AdamW steps for its form with 8 bits, which needs values.

    Gradients of one micro-batch are kept beside all that the next one takes, so a step has two, if it has several.
    """
    inner = job.inner_optimizer
    has_eight_bits = inner.name == EIGHT_BITS
    if has_eight_bits:
        inner = inner.model_copy(update={"name": "adamw"})
    optimizer = build_optimizer(network, inner, None if inner.total_steps else 100, shards=shards)
    tensors = [*network.parameters(), *network.buffers()]
    pieces = shards.pieces if shards else ()
    state = 0
    head = _fused_head(job, task, network)
    compiles = job.worker.compiles
    compiled_logits = 0
    if compiles and head is not None:
        compiled_logits = _compiled_logits(job, head, inputs)
    with _LiveBytes([*tensors, *pieces, *inputs.values()]) as live:
        for _ in range(2):
            live.peak = live.now
            earlier_gradients = _begin_batch(job, optimizer)
            for _ in range(min(2, batches)):
                _add_gradient(job, task, network, head, inputs)
                if shards:
                    shards.end_backward()
            if not job.sync.traits.sends_gradients:
                optimizer.step(torch.ones(()))
            state = sum(_state_bytes(part) for part in optimizer.optimizers)
            del earlier_gradients
        activations = live.peak - state + compiled_logits
        if has_eight_bits:
            state = eight_bits_bytes(optimizer.parameters)
        whole_model = bytes_of(tensors)
        if shards is None:
            return StepSizes(whole_model, state, activations, None, compiles)
        return StepSizes(shards.weights, state, activations, whole_model, compiles)


def _begin_batch(job: Job, optimizer: Inner) -> list[Tensor]:
    """Forget the gradients of the batch before; in synchronous rounds of several batches, return copies of them."""
    is_only_batch = job.rounds.samples_between_updates <= job.num_workers * job.rounds.max_batch_size
    if is_only_batch or not job.sync.traits.sends_gradients:
        optimizer.zero_grad()
        return []
    return [parameter.grad.clone() for parameter in optimizer.parameters if parameter.grad is not None]


def _add_gradient(
    job: Job, task: Task, network: PreTrainedModel, head: nn.Linear | None, inputs: Mapping[str, Any]
) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=job.worker.autocast not in ("none", "auto")):
        losses = training_losses(task, network, inputs, head=head)
    losses.trained.backward()


def _fused_head(job: Job, task: Task, network: PreTrainedModel) -> torch.nn.Linear | None:
    """Return the head whose logits a fused loss or compiled code doesn't keep in 32 bits; None if they are kept."""
    if job.worker.fused_loss is True:
        return head_of(task, network)
    if not job.worker.compiles:
        return None
    try:
        return head_of(task, network)
    except ConfigError:  # Compiled all the same; the logits are counted as without compilation.
        return None


def _compiled_logits(job: Job, head: torch.nn.Linear, inputs: Mapping[str, Any]) -> int:
    """Return the bytes of logits and of their gradient, which compiled code keeps in the dtype of products alone."""
    element_bytes = head.weight.element_size() if job.worker.autocast == "none" else 2
    tokens = int(inputs["input_ids"].numel())
    return 2 * tokens * head.out_features * element_bytes


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                total += value.numel() * value.element_size()
    return total


class SketchedShards:
    """Hooks of a model without values that allocate the same memory as FSDP2, beside the model's own tensors.

    Args:
        network: the model.
        processes: number of processes.

    """

    def __init__(self, network: nn.Module, processes: int) -> None:
        self._pieces: dict[nn.Parameter, nn.Parameter] = {}
        self._shapes: dict[nn.Parameter, torch.Size] = {}
        self.pieces = nn.ParameterList()
        """The first process's parts of trained parameters, on which its optimizer steps."""
        for parameter in network.parameters():
            piece = _piece(parameter, processes)
            self._pieces[parameter] = piece
            self._shapes[piece] = parameter.shape
            if piece.requires_grad:
                self.pieces.append(piece)
        self.weights = bytes_of([*self._pieces.values(), *network.buffers()])
        """Bytes of all parts of weights in the first process."""
        self._gathered: dict[Any, Tensor] = {}
        """Memory of gathered weights by block, and that of the latest copy of gradients by None."""
        blocks = blocks_of(network)
        in_blocks = set[nn.Parameter]()
        # The backward pass gathers the weights of the block before while it computes with those of this block.
        for block, prefetched in zip(blocks, [None, *blocks], strict=False):
            weights = list(block.parameters())
            in_blocks.update(weights)
            backward_weights = list(weights)
            if prefetched is not None:
                backward_weights += prefetched.parameters()
            block.register_forward_pre_hook(partial(self._gather, block, weights))
            block.register_forward_hook(partial(self._free, block))
            block.register_full_backward_pre_hook(partial(self._gather, block, backward_weights))
            self._reduce_gradients(block, weights)
        outside_blocks = [parameter for parameter in self._pieces if parameter not in in_blocks]
        network.register_forward_pre_hook(partial(self._gather, network, outside_blocks))
        self._reduce_gradients(network, outside_blocks)

    def _gather(self, module: nn.Module, parameters: list[nn.Parameter], *_: Any) -> None:
        self._gathered[module] = torch.empty(bytes_of(parameters), dtype=torch.uint8)

    def _free(self, module: nn.Module, *_: Any) -> None:
        self._gathered.pop(module, None)

    def _reduce_gradients(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Reduce a module's gradients as soon as the last one is computed, and free its weights then."""
        trained_parameters = [parameter for parameter in parameters if parameter.requires_grad]
        missing = set(trained_parameters)

        def reduce_if_complete(parameter: nn.Parameter) -> None:
            missing.discard(parameter)
            if missing:
                return
            missing.update(trained_parameters)
            self._gathered[None] = torch.empty(bytes_of(trained_parameters), dtype=torch.uint8)
            for whole in trained_parameters:
                whole.grad = None
                piece = self._pieces[whole]
                piece.grad = torch.empty_like(piece)
            self._free(module)

        for parameter in trained_parameters:
            parameter.register_post_accumulate_grad_hook(reduce_if_complete)

    def piece_of(self, parameter: Tensor) -> Tensor:
        """Return the first process's part of a parameter."""
        return self._pieces[cast("nn.Parameter", parameter)]

    def shape_of(self, piece: Tensor) -> torch.Size:
        """Return the shape of the parameter that a part is of."""
        return self._shapes[cast("nn.Parameter", piece)]

    def whole(self, part: Tensor, piece: Tensor) -> Tensor:
        """Return a tensor of the gathered size."""
        return torch.empty(self.shape_of(piece), dtype=part.dtype, device=part.device)

    def part(self, tensor: Tensor, piece: Tensor) -> Tensor:
        """Return the first process's part of a whole tensor."""
        return tensor[: len(piece)]

    def end_backward(self) -> None:
        """Free the gathered weights and gradients of the backward pass."""
        self._gathered.clear()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; a tensor that occurs twice counts once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


def _piece(parameter: nn.Parameter, processes: int) -> nn.Parameter:
    """The largest part of a parameter that is cut along its first dimension."""
    rows = math.ceil(parameter.shape[0] / processes) if parameter.ndim else 1
    empty_tensor = torch.empty((rows, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty_tensor, parameter.requires_grad)
