"""Shards of a model: each process of a worker has a part of each tensor, by PyTorch's FSDP2 (arXiv 2304.11277).

    weights, gradients, optimizer's state    a part in each process, along the first dimension
    a block in forward and backward          whole in all, gathered before it and freed after it

All processes call the same methods in the same order. Weights go to and from the first process tensor by tensor, so no
other has more than one of them whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import (  # type: ignore[attr-defined]
    Backend,
    HashStore,
    PrefixStore,
    Store,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hypha_ray.config.resources import Worker
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.kernels import copy
from hypha_ray.model.checks import Build, check_on_copy
from hypha_ray.model.environment import copy_in, to_device
from hypha_ray.model.execution import set_execution
from hypha_ray.model.flat import Array
from hypha_ray.model.layout import array_of, blocks_of, empty, live_tensors, pinned, source_of, view
from hypha_ray.model.loss_check import choose_samples
from hypha_ray.model.losses import compute_losses
from hypha_ray.model.metrics import MASKING_SEED, tensors_of
from hypha_ray.model.task import Batch, Task
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.step import put_state
from hypha_ray.types import Flat, Layout, Samples
from hypha_ray.types.data import dtype_of, is_trained
from hypha_ray.worker.group.collectives import Collectives, loopback_gloo
from hypha_ray.worker.incarnation import ProcessLostError

_LOOPBACK = "loopback"
"""Backend that is gloo on the loopback interface: torch's own listens where the host's name leads."""
SharedState = Array | str
"""State that the first process sends to the others: a scalar itself, or the dtype of a tensor that is sharded."""
_CLOSE = 1e-5
"""Largest difference of two gradients, relative to the largest value of a tensor's."""
_CONNECT_S = 60.0


def connect(store: Store, rank: int, size: int, device: torch.device, deadline_s: float) -> DeviceMesh:
    """Connect this process to all others of its worker; a process can be in one such group at a time.

    Args:
        store: store of `open_store` or `find_store`.
        rank: number of this process.
        size: number of processes.
        device: device of the shards.
        deadline_s: longest wait for the other processes.

    """
    if _LOOPBACK not in Backend.backend_list:
        Backend.register_backend(_LOOPBACK, _make_loopback, extended_api=True, devices=["cpu"])
    backend = "nccl" if device.type == "cuda" else _LOOPBACK
    shards_store = PrefixStore("shards", store)
    limit = timedelta(seconds=deadline_s)
    dist.init_process_group(backend, store=shards_store, rank=rank, world_size=size, timeout=limit)
    group: Any = dist.group.WORLD
    return DeviceMesh.from_group(group, device.type)


def disconnect() -> None:
    """Leave the group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_broken(error: Exception) -> bool:
    """Whether an error only means that another process is gone or silent."""
    return isinstance(error, ProcessLostError | dist.DistError) or (
        isinstance(error, RuntimeError) and "/gloo/" in str(error)
    )


class SumsOverShards:
    """Sums over all processes of a worker whose model is sharded; FSDP2 has already summed up the gradients.

    Args:
        collectives: counts over gloo, by which a dead process is noticed on GPUs, too.

    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def total(self, count: int) -> int:
        """Return the sum of a number that each process has."""
        return self._collectives.total(count)

    def add_up(self, parameters: Sequence[Tensor], loss: Tensor) -> None:
        """Replace the loss by its sum, in all processes."""
        dist.all_reduce(loss)

    def norm(self, optimizer: Inner) -> Tensor:
        """Return the norm of the gradients of all shards, in all processes."""
        squared = optimizer.norm().square()
        dist.all_reduce(squared)
        return squared.sqrt()


def _make_loopback(options: Any, _: Any) -> Any:
    return loopback_gloo(options.store, options.group_rank, options.group_size, options.timeout)


class Shards:
    """A model's shards in this process, as plain tensors on which an optimizer steps.

    Each element is in one process alone, so elementwise optimizers step as on whole tensors. Muon gathers its
    matrices.

    Args:
        model: model, on the CPU; its parameters become sharded ones, on the mesh's device.
        mesh: all processes, from `connect`.

    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = model
        self._mesh = mesh
        self._is_first = mesh.get_rank() == 0
        # FSDP warns of outputs that are changed in place, which `sharding_check` refuses.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        for module in [*blocks_of(model), model]:
            sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
            sharded.set_gradient_divide_factor(1.0)  # Gradients are sums.
            sharded.set_force_sum_reduction_for_comms(True)
        self.pieces = nn.ParameterList()
        """This process's shard of each trained parameter; its gradient is complete after a backward pass."""
        self._parameter_of: dict[Tensor, DTensor] = {}
        self._piece_of: dict[Tensor, Tensor] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                sharded_parameter: Any = parameter
                local_weights = sharded_parameter.detach().to_local()
                piece = nn.Parameter(local_weights)
                self.pieces.append(piece)
                self._parameter_of[piece] = sharded_parameter
                self._piece_of[parameter] = piece
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, piece))

    def piece_of(self, parameter: Tensor) -> Tensor:
        """Return this process's shard of a trained parameter."""
        return self._piece_of[parameter]

    def shape_of(self, piece: Tensor) -> torch.Size:
        """Return the shape of the parameter that a shard is of."""
        return self._parameter_of[piece].shape

    @torch.no_grad()
    def gather(self, layout: Layout, fragment: int, out: Flat | None = None, gradients: bool = False) -> Flat:
        """Copy a fragment out of the model, as `model.layout.gather`; only the first process gets it."""
        is_on_gpu = self._mesh.device_type == "cuda"
        flat: Flat = {}
        if self._is_first and out is not None:
            flat = out
        elif self._is_first:
            flat = pinned(layout, fragment) if is_on_gpu else empty(layout, fragment)
        for entry, tensor in live_tensors(self._model, layout, fragment):
            full_tensor = tensor.detach()
            if gradients and tensor in self._piece_of:
                piece = self._piece_of[tensor]
                gradient = torch.zeros_like(piece) if piece.grad is None else piece.grad
                full_tensor = self.whole(gradient, piece)
            elif isinstance(full_tensor, DTensor):
                full_tensor = full_tensor.full_tensor()
            if self._is_first:
                target = torch.from_numpy(view(entry, flat))
                target.copy_(full_tensor, non_blocking=True)
        if is_on_gpu:
            torch.cuda.synchronize()
        return flat

    @torch.no_grad()
    def scatter(
        self, layout: Layout, fragment: int, flat: Mapping[str, Array] | None = None, mixing: float = 0.0
    ) -> None:
        """Copy a fragment's arrays, which the first process has, into the model, as `model.layout.scatter`."""
        for entry, tensor in live_tensors(self._model, layout, fragment):
            source = None if flat is None else source_of(view(entry, flat))
            if isinstance(tensor, DTensor):
                local_weights = tensor.to_local()
                part = self._receive_part(source, tensor, getattr(torch, dtype_of(entry.group)))
                if mixing and is_trained(entry.group):
                    part = torch.lerp(part, local_weights.to(part.dtype), mixing)
                copy(part, local_weights)
                continue
            if source is not None:
                copy_in(source, tensor)
            is_bool = tensor.dtype == torch.bool  # Backends don't know it.
            dist.broadcast(tensor.view(torch.uint8) if is_bool else tensor, 0)

    @torch.no_grad()
    def export_state(self, inner: Inner) -> Flat:
        """Return an optimizer's state as `optim.step.export_state`; only the first process gets it."""
        arrays: Flat = {}
        for key, piece, tensor in self._state_tensors(inner):
            full_tensor = self.whole(tensor, piece) if tensor.ndim else tensor
            if self._is_first:
                arrays[key] = array_of(full_tensor, copy=True)
        return arrays

    def require_fit(self, inner: Inner, arrays: Mapping[str, Array]) -> None:
        """Refuse a state of another model or optimizer.

        Raises:
            CheckpointError: OPT005.

        """
        pieces = _pieces_of(inner)
        for key, array in arrays.items():
            optimizer, index, _ = _parse_key(key)
            fits = optimizer < len(pieces) and index < len(pieces[optimizer])
            if not fits or array.shape not in ((), self.shape_of(pieces[optimizer][index])):
                problem = "the inner state doesn't fit the model and inner_optimizer"
                raise CheckpointError("OPT005", problem, f"{key} of shape {array.shape}")

    def shared_state(self, arrays: Mapping[str, Array]) -> dict[str, SharedState]:
        """Return the part of a state that the other processes need when the first one loads it."""
        shared_states: dict[str, SharedState] = {}
        for key, array in arrays.items():
            if array.ndim == 0:
                shared_states[key] = np.array(array)
            elif array.dtype == np.uint16:
                shared_states[key] = "bfloat16"
            else:
                shared_states[key] = array.dtype.name
        return shared_states

    @torch.no_grad()
    def load_state(
        self, inner: Inner, shared_states: Mapping[str, SharedState], arrays: Mapping[str, Array] | None = None
    ) -> None:
        """Load an optimizer's state; all processes have `shared_state` of it, and the first one its arrays."""
        pieces = _pieces_of(inner)
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in inner.optimizers]
        for key, shared_value in shared_states.items():
            optimizer, index, name = _parse_key(key)
            if isinstance(shared_value, str):
                dtype = getattr(torch, shared_value)
                source = None
                if arrays is not None:
                    source = torch.from_numpy(np.array(arrays[key])).view(dtype)
                parameter = self._parameter_of[pieces[optimizer][index]]
                tensor = self._receive_part(source, parameter, dtype)
            else:
                tensor = torch.from_numpy(np.array(shared_value))
            states[optimizer].setdefault(index, {})[name] = tensor
        for inner_optimizer, state in zip(inner.optimizers, states, strict=True):
            put_state(inner_optimizer, state)

    def _state_tensors(self, inner: Inner) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each tensor of an optimizer's state, with its key and its shard."""
        for number, (optimizer, pieces) in enumerate(zip(inner.optimizers, _pieces_of(inner), strict=True)):
            for index, piece in enumerate(pieces):
                for name, tensor in optimizer.state.get(piece, {}).items():
                    if tensor is not None:
                        yield f"{number}/{index}/{name}", piece, tensor

    def whole(self, part: Tensor, piece: Tensor) -> Tensor:
        """Gather a tensor that is sharded like a parameter, such as its gradient."""
        parameter = self._parameter_of[piece]
        shape: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
        sharded = DTensor.from_local(part, self._mesh, parameter.placements, run_check=False, **shape)
        return sharded.full_tensor()

    def part(self, tensor: Tensor, piece: Tensor) -> Tensor:
        """Return this process's part of a tensor like a parameter, which all processes have whole."""
        parameter = self._parameter_of[piece]
        return distribute_tensor(tensor, self._mesh, parameter.placements, src_data_rank=None).to_local()

    def _receive_part(self, source: Tensor | None, parameter: DTensor, dtype: torch.dtype) -> Tensor:
        """Return this process's part of a tensor that the first process has."""
        if source is None:
            full_tensor = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        else:
            full_tensor = to_device(source, parameter.device)
        return distribute_tensor(full_tensor, self._mesh, parameter.placements, src_data_rank=0).to_local()


def _pieces_of(inner: Inner) -> list[list[Tensor]]:
    """Return the shards that each optimizer steps on, in the order of its state."""
    pieces: list[list[Tensor]] = []
    for optimizer in inner.optimizers:
        pieces.append([piece for group in optimizer.param_groups for piece in group["params"]])
    return pieces


def _parse_key(key: str) -> tuple[int, int, str]:
    """Split the key of a state's tensor: number of the optimizer, index of the shard, and name."""
    optimizer, index, name = key.split("/")
    return int(optimizer), int(index), name


def _move_gradient(piece: nn.Parameter, parameter: Any) -> None:
    """Move a parameter's summed gradient to its shard, on which the optimizer steps."""
    piece.data = parameter.detach().to_local()  # FSDP2 may move a shard once, in the first forward pass.
    gradient = parameter.grad.to_local()
    parameter.grad = None
    if piece.grad is None:
        piece.grad = gradient
    else:
        piece.grad.add_(gradient)


def check_sharding_on_copy(
    worker: Worker, task: Task, samples: Samples, config: Any, build: Build, parameters: int
) -> bool:
    """Compare gradients of a small copy with those of its sharded self, in one process.

    FSDP2 gathers weights in hooks of modules. A model that bypasses the hooks, or changes an output in place, may fail
    or compute something else; so each model is tried.

    Args:
        worker: settings by which workers compute.
        task: task from `resolve_task`.
        samples: samples of the dataset.
        config: configuration of the model.
        build: function that makes a model from a configuration.
        parameters: number of the model's parameters.

    Returns:
        Whether a copy could be built and checked.

    Raises:
        ConfigError: MODEL023, the gradients differ, or the sharded copy can't be run.

    """
    return check_on_copy(lambda network: _check(worker, task, network, samples), config, build, parameters)


def sharding_error(network: Any, reason: str) -> ConfigError:
    """Return the error for a model that mayn't be sharded."""
    name = type(network).__name__.removeprefix("FSDP")
    problem = f'worker.sharding = "full": {name} can\'t be shared out to processes'
    return ConfigError("MODEL023", problem, reason, fix="leave worker.sharding out, or choose another model")


def _check(worker: Worker, task: Task, network: Any, samples: Samples) -> None:
    reason = _reason_not_to_shard(network)
    if reason is not None:
        raise sharding_error(network, reason)
    set_execution(network, worker)
    network.train(worker.gradient_checkpointing)  # Checkpointing needs the training mode.
    few_samples = choose_samples(task, samples)
    inputs = task.inputs(tensors_of(few_samples), few_samples.keys, MASKING_SEED)
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    _backward(task, network, inputs)
    for name, buffer in network.named_buffers():
        if not torch.equal(buffer, buffers[name]):
            raise sharding_error(network, f"each process would have its own {name}, which a forward pass changes")
    gradients = [parameter.grad for parameter in network.parameters() if parameter.requires_grad]
    network.zero_grad()
    sharded_gradients = _sharded_gradients(task, network, inputs)
    for name, gradient, sharded_gradient in zip(names, gradients, sharded_gradients, strict=True):
        if not _is_close(gradient, sharded_gradient):
            raise sharding_error(network, f"the gradient of {name} is another one")


def _reason_not_to_shard(network: Any) -> str | None:
    """Reason why processes would use different parameters in a step, which FSDP2 can't sum; None without one."""
    for name, value in vars(network.config).items():
        if name.endswith("layerdrop") and value:
            return f"{name} = {value} skips other blocks in each process"
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict) and name.endswith("experts"):
            return f"of {name} each process may use other ones"
    return None


def _sharded_gradients(task: Task, network: Any, inputs: Batch) -> list[torch.Tensor | None]:
    """Return the gradients of a model that is sharded over this process alone."""
    mesh = connect(HashStore(), 0, 1, torch.device("cpu"), _CONNECT_S)
    try:
        shards = Shards(network, mesh)
        _backward(task, network, inputs)
        return [piece.grad for piece in shards.pieces]
    except Exception as error:  # FSDP2 and models raise anything.
        text = " ".join(str(error).split())
        raise sharding_error(network, f"{type(error).__name__}: {text}"[:300]) from error
    finally:
        disconnect()


def _backward(task: Task, network: Any, inputs: Batch) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        compute_losses(task, network, inputs).trained.backward()


def _is_close(gradient: torch.Tensor | None, sharded_gradient: torch.Tensor | None) -> bool:
    if gradient is None or sharded_gradient is None:
        return gradient is sharded_gradient
    largest = 0.0
    if gradient.numel():
        largest = float(gradient.abs().max())
    return torch.allclose(gradient, sharded_gradient, rtol=0, atol=_CLOSE * largest)
