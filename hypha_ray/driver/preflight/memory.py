"""Memory that a training step of a worker takes, found by a step on tensors that have shapes and no memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from hypha_ray.config import Job
from hypha_ray.config.tables.resources import WorkerGroup
from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.driver.preflight.loss_on_samples import scored_samples
from hypha_ray.errors import ConfigError
from hypha_ray.model.checks.fused_check import head_of
from hypha_ray.model.evaluation import MASKING_SEED, tensors_of
from hypha_ray.model.execution import set_execution
from hypha_ray.model.losses import compute_losses
from hypha_ray.model.tasks.task import Task
from hypha_ray.model.trained import sketch_trained
from hypha_ray.optim.optimizers import EIGHT_BITS, build_optimizer, eight_bits_bytes
from hypha_ray.types import Samples
from hypha_ray.worker.group.shards import blocks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Bytes of tensors at the peak of a step after the first, when the optimizer has its state."""

    weights: int
    optimizer: int
    """State of the optimizer."""
    rest: int
    """Activations, gradients, what single operations need, and what processes with shards gather."""
    built: int | None = None
    """Bytes of the whole model, which each process builds before it keeps a part; None if the model isn't sharded."""
    bounds: bool = False
    """Whether the step takes less, because compiled code computes some activations again instead of keeping them."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.optimizer + self.rest

    def of_worker(self, processes: int) -> int:
        """All of a worker's processes, of which the first alone steps unless the model is sharded."""
        if self.built is not None:
            return processes * max(self.total, self.built)
        return self.total + (processes - 1) * (self.total - self.optimizer)

    def note(self, processes: int) -> str:
        """Return a line for the user."""
        parts = (("weights", self.weights), ("optimizer", self.optimizer), ("activations and gradients", self.rest))
        listed = ", ".join(f"{name} {_shown(size)}" for name, size in parts)
        if processes == 1:
            least = "at most " if self.bounds else ""
            return f"a training step of a worker takes {least}{_shown(self.total)}: {listed}"
        every = self.of_worker(processes) if self.built is None else processes * self.total
        whole = f"a training step of a worker's {processes} processes takes {_shown(every)}"
        if self.built is not None:
            each = f"{_shown(self.total)} in each ({listed})"
            return f"{whole}: {each}, which builds a model of {_shown(self.built)} first"
        others = f"{_shown(self.total - self.optimizer)} in each of the others, which have no optimizer"
        return f"{whole}: {_shown(self.total)} in the first ({listed}), {others}"


def memory_notes(case: Case, of_groups: Sequence[WorkerGroup]) -> list[str]:
    """Return a note with the memory of a step, and another one if it is more than workers without a GPU reserve.

    Args:
        case: job, dataset and model; the job's settings are those of the groups.
        of_groups: groups of workers in Ray.

    """
    job = case.job
    groups = [(job.processes_in(group), group) for group in of_groups]
    # What is dequantized at a time isn't known.
    if job.rl.algorithm is not None or not groups or job.model.quantization is not None:
        return []
    notes, (task, samples) = list[str](), scored_samples(case)
    for processes in sorted({count for count, _ in groups}):
        found = step_memory(job, task, samples, processes)
        if found is None:
            return []
        notes.append(found.note(processes))
        reserved = [one.memory_gb for count, one in groups if count == processes and one.memory_gb and not one.gpu]
        short = min(reserved, default=None)
        if short is not None and found.of_worker(processes) > short * 1e9:
            what = f"that is more than the {short:g} GB that a worker reserves"
            notes.append(f"{what}: raise memory_gb, or save memory")
    return notes


def step_memory(job: Job, task: Task, samples: Samples, processes: int = 1) -> StepSizes | None:
    """Estimate the memory of a step of supervised training, by attention as CPUs compute it.

    Args:
        job: the job file.
        task: task from `resolve_task`.
        samples: some samples of the dataset; they are repeated up to the size of a micro-batch.
        processes: number of processes of a worker, of which the first is meant; each has a part of the batch.

    Returns:
        None if the model can't be run without values.

    """
    part = -(-job.rounds.max_batch_size // processes)
    size = -(-part // job.rounds.accumulation)
    rows = [index % len(samples) for index in range(size)]
    repeated = Samples({name: array[rows] for name, array in samples.arrays.items()}, samples.keys[rows])
    inputs = task.inputs(tensors_of(repeated), repeated.keys, MASKING_SEED)
    try:
        network = sketch_trained(job).train()
        set_execution(network, job.worker)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            _move_to_cpu(network)
            shards = SketchedShards(network, processes) if processes > 1 and job.worker.sharding == "full" else None
            return _measured(job, task, network, shards, {name: fake.from_tensor(one) for name, one in inputs.items()})
    except Exception:  # Models branch on values, or call kernels that know no shapes.
        return None


def _move_to_cpu(network: torch.nn.Module) -> None:
    """Replace all tensors by those of a mode that has CPUs without memory; tied ones stay tied."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # The old ones are kept, so that no id is used again.
    for module in network.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    trained = isinstance(tensor, torch.nn.Parameter)
                    moved[id(tensor)] = tensor, torch.nn.Parameter(empty, tensor.requires_grad) if trained else empty
                tensors[name] = moved[id(tensor)][1]  # type: ignore[assignment]


class _LiveBytes(TorchDispatchMode):
    """Size of all tensors that operations make, as long as they live.

    Args:
        others: tensors that aren't counted, although operations return parts of them.

    """

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        known: dict[torch.UntypedStorage, bool] = {one.untyped_storage(): True for one in others}
        self._known = WeakIdKeyDictionary(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known[storage] = True
            weakref.finalize(storage, self._remove, storage.nbytes())
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _remove(self, size: int) -> None:
        self.now -= size


def _measured(
    job: Job, task: Task, network: PreTrainedModel, shards: SketchedShards | None, inputs: Mapping[str, Any]
) -> StepSizes:
    """Take two steps, and return the peak of the second; AdamW steps for its form with 8 bits, which needs values."""
    inner = job.inner_optimizer
    narrow = job.inner_optimizer.name == EIGHT_BITS
    inner = inner.model_copy(update={"name": "adamw"}) if narrow else inner
    optimizer = build_optimizer(network, inner, None if inner.total_steps else 100, shards=shards)
    tensors = [*network.parameters(), *network.buffers()]
    state = 0
    head = _fused_head(job, task, network)
    compiles = job.worker.compile is True
    kept = _compiled_logits(job, head, inputs) if compiles and head is not None else 0
    with _LiveBytes([*tensors, *(shards.pieces if shards else ()), *inputs.values()]) as live:
        for _ in range(2):
            live.peak = live.now
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=job.worker.autocast not in ("none", "auto")):
                losses = compute_losses(task, network, inputs, head)
            losses.trained.backward()
            del losses
            if shards:
                shards.end_backward()
            optimizer.step(torch.ones(()))
            state = sum(_state_bytes(one) for one in optimizer.optimizers)
        weights = shards.weights if shards else bytes_of(tensors)
        rest = live.peak - state + kept
        state = eight_bits_bytes(optimizer.parameters) if narrow else state
        return StepSizes(weights, state, rest, bytes_of(tensors) if shards else None, compiles)


def _fused_head(job: Job, task: Task, network: PreTrainedModel) -> torch.nn.Linear | None:
    """Return the head whose logits aren't there in 32 bits, by a fused loss or by compiled code; None otherwise."""
    if job.worker.fused_loss is True:
        return head_of(task, network)
    if job.worker.compile is not True:
        return None
    try:
        return head_of(task, network)
    except ConfigError:  # Compiled all the same; its logits are counted as they are without.
        return None


def _compiled_logits(job: Job, head: torch.nn.Linear, inputs: Mapping[str, Any]) -> int:
    """Return the bytes of logits and of their gradient, which compiled code keeps in the dtype of products alone."""
    width = head.weight.element_size() if job.worker.autocast == "none" else 2
    return 2 * int(inputs["input_ids"].numel()) * head.out_features * width


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = (one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor))
    return sum(one.numel() * one.element_size() for one in tensors)


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.0f} MiB"


class SketchedShards:
    """Hooks of a model without values that take what FSDP2 takes, beside the model's own tensors.

    Args:
        network: the model.
        processes: number of processes.

    """

    def __init__(self, network: nn.Module, processes: int) -> None:
        self._pieces = {one: _piece(one, processes) for one in network.parameters()}
        self._shapes = {piece: one.shape for one, piece in self._pieces.items()}
        self.pieces = nn.ParameterList(piece for piece in self._pieces.values() if piece.requires_grad)
        """The first process's parts of trained parameters, on which its optimizer steps."""
        self.weights = bytes_of([*self._pieces.values(), *network.buffers()])
        """Bytes of all parts of weights in the first process."""
        self._held: dict[Any, Tensor] = {}
        """Memory of gathered weights by block, and that of the latest copy of gradients by None."""
        blocks = blocks_of(network)
        inside = set[nn.Parameter]()
        for block, following in zip(blocks, [None, *blocks], strict=False):
            own = list(block.parameters())
            inside.update(own)
            ahead = [] if following is None else list(following.parameters())
            block.register_forward_pre_hook(partial(self._gather, block, own))
            block.register_forward_hook(partial(self._free, block))
            block.register_full_backward_pre_hook(partial(self._gather, block, [*own, *ahead]))
            self._sum_up(block, own)
        outside = [one for one in self._pieces if one not in inside]
        network.register_forward_pre_hook(partial(self._gather, network, outside))
        self._sum_up(network, outside)

    def _gather(self, module: nn.Module, parameters: list[nn.Parameter], *_: Any) -> None:
        self._held[module] = torch.empty(bytes_of(parameters), dtype=torch.uint8)

    def _free(self, module: nn.Module, *_: Any) -> None:
        self._held.pop(module, None)

    def _sum_up(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Have gradients summed up as soon as the last one of a module is there, and its weights freed."""
        trained = [one for one in parameters if one.requires_grad]
        missing = set(trained)

        def arrived(parameter: nn.Parameter) -> None:
            missing.discard(parameter)
            if not missing:
                missing.update(trained)
                self._held[None] = torch.empty(bytes_of(trained), dtype=torch.uint8)
                for one in trained:
                    one.grad = None
                    self._pieces[one].grad = torch.empty_like(self._pieces[one])
                self._free(module)

        for one in trained:
            one.register_post_accumulate_grad_hook(arrived)

    def piece_of(self, parameter: Tensor) -> Tensor:
        """Return the first process's part of a parameter."""
        return self._pieces[cast("nn.Parameter", parameter)]

    def shape_of(self, piece: Tensor) -> torch.Size:
        """Return the shape of the parameter that a part is of."""
        return self._shapes[cast("nn.Parameter", piece)]

    def whole(self, part: Tensor, piece: Tensor) -> Tensor:
        """Return a tensor of the size that is gathered."""
        return torch.empty(self.shape_of(piece), dtype=part.dtype, device=part.device)

    def part(self, whole: Tensor, piece: Tensor) -> Tensor:
        """Return the first process's part of a whole tensor."""
        return whole[: len(piece)]

    def end_backward(self) -> None:
        """Free what the backward pass held."""
        self._held.clear()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; those that are there twice count once."""
    return sum(one.numel() * one.element_size() for one in {id(one): one for one in tensors}.values())


def _piece(parameter: nn.Parameter, processes: int) -> nn.Parameter:
    """The largest part of a parameter that is cut along its first dimension."""
    first = -(-parameter.shape[0] // processes) if parameter.ndim else 1
    empty = torch.empty((first, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty, parameter.requires_grad)
