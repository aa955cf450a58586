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
from torch.distributed import Backend, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hypha_ray.errors import CheckpointError
from hypha_ray.kernels import copy
from hypha_ray.model.flat import Array
from hypha_ray.model.layout import array_of, empty, live_tensors, pinned, source_of, view
from hypha_ray.model.staging import copy_in, to_device
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.state import put_state
from hypha_ray.types import Flat, Layout
from hypha_ray.types.layout import dtype_of, is_trained
from hypha_ray.worker.group.collectives import Collectives, gloo
from hypha_ray.worker.interrupts import ProcessLostError

_LOOPBACK = "loopback"
"""Backend that is gloo on the loopback interface: torch's own listens where the host's name leads."""


def connect(store: Store, rank: int, size: int, device: torch.device, deadline_s: float) -> DeviceMesh:
    """Connect this process to all others of its worker; it has one such group at a time.

    Args:
        store: store of `open_store` or `find_store`.
        rank: number of this process.
        size: number of processes.
        device: device of the shards.
        deadline_s: longest wait for the other processes.

    """
    if _LOOPBACK not in Backend.backend_list:
        Backend.register_backend(_LOOPBACK, _made, extended_api=True, devices=["cpu"])
    backend = "nccl" if device.type == "cuda" else _LOOPBACK
    limit = timedelta(seconds=deadline_s)
    dist.init_process_group(backend, store=PrefixStore("shards", store), rank=rank, world_size=size, timeout=limit)
    group: Any = dist.group.WORLD
    return DeviceMesh.from_group(group, device.type)


def disconnect() -> None:
    """Leave the group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_broken(error: Exception) -> bool:
    """Whether an error says no more than that another process is gone or silent."""
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


def _made(options: Any, _: Any) -> Any:
    return gloo(options.store, options.group_rank, options.group_size, options.timeout)


Told = Array | str
"""State that other processes are told of: a scalar itself, or the dtype of a tensor that is cut into shards."""


class Shards:
    """A model's shards in this process, as plain tensors on which an optimizer steps.

    Each element is in one process alone, so optimizers that treat elements by themselves step as on whole tensors.
    Muon gathers its matrices.

    Args:
        model: model, on the CPU; its parameters become sharded ones, on the mesh's device.
        mesh: all processes, from `connect`.

    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model, self._mesh, self._first = model, mesh, mesh.get_rank() == 0
        # Its advice: we change no output in place, and models that do are found out by `sharding_check`.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        for module in [*blocks_of(model), model]:
            sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
            sharded.set_gradient_divide_factor(1.0)  # Gradients are sums.
            sharded.set_force_sum_reduction_for_comms(True)
        self.pieces = nn.ParameterList()
        """This process's shard of each trained parameter; its gradient is complete after a backward pass."""
        self._wholes: dict[Tensor, DTensor] = {}
        self._piece_of: dict[Tensor, Tensor] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                whole: Any = parameter
                piece = nn.Parameter(whole.detach().to_local())
                self.pieces.append(piece)
                self._wholes[piece], self._piece_of[parameter] = whole, piece
                parameter.register_post_accumulate_grad_hook(partial(_take_gradient, piece))

    def piece_of(self, parameter: Tensor) -> Tensor:
        """Return this process's shard of a trained parameter."""
        return self._piece_of[parameter]

    def shape_of(self, piece: Tensor) -> torch.Size:
        """Return the shape of the parameter that a shard is of."""
        return self._wholes[piece].shape

    @torch.no_grad()
    def gather(self, layout: Layout, fragment: int, out: Flat | None = None, gradients: bool = False) -> Flat:
        """Copy a fragment out of the model, as `model.layout.gather`; only the first process gets it."""
        flat: Flat = {}
        if self._first:
            fresh = pinned if self._mesh.device_type == "cuda" else empty
            flat = fresh(layout, fragment) if out is None else out
        for entry, tensor in live_tensors(self._model, layout, fragment):
            whole = tensor.detach()
            if gradients and tensor in self._piece_of:
                piece = self._piece_of[tensor]
                whole = self.whole(torch.zeros_like(piece) if piece.grad is None else piece.grad, piece)
            elif isinstance(whole, DTensor):
                whole = whole.full_tensor()
            if self._first:
                torch.from_numpy(view(entry, flat)).copy_(whole, non_blocking=True)
        if self._mesh.device_type == "cuda":
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
                own = tensor.to_local()
                part = self._part(source, tensor, getattr(torch, dtype_of(entry.group)))
                if mixing and is_trained(entry.group):
                    part = torch.lerp(part, own.to(part.dtype), mixing)
                copy(part, own)
            else:
                if source is not None:
                    copy_in(source, tensor)
                dist.broadcast(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, 0)

    @torch.no_grad()
    def export_state(self, inner: Inner) -> Flat:
        """Return an optimizer's state as `optim.state.export_state`; only the first process gets it."""
        found: Flat = {}
        for key, piece, tensor in self._states(inner):
            whole = self.whole(tensor, piece) if tensor.ndim else tensor
            if self._first:
                found[key] = array_of(whole, copy=True)
        return found

    def require_fit(self, inner: Inner, arrays: Mapping[str, Array]) -> None:
        """Refuse a state of another model or optimizer.

        Raises:
            CheckpointError: OPT005.

        """
        pieces = _pieces_of(inner)
        for key, array in arrays.items():
            number, index, _ = key.split("/")
            fits = int(number) < len(pieces) and int(index) < len(pieces[int(number)])
            if not fits or array.shape not in ((), self._wholes[pieces[int(number)][int(index)]].shape):
                what = "the inner state doesn't fit the model and inner_optimizer"
                raise CheckpointError("OPT005", what, f"{key} of shape {array.shape}")

    def told(self, arrays: Mapping[str, Array]) -> dict[str, Told]:
        """Return what other processes have to know of a state that the first one loads."""
        names = {key: "bfloat16" if array.dtype == np.uint16 else array.dtype.name for key, array in arrays.items()}
        return {key: names[key] if array.ndim else np.array(array) for key, array in arrays.items()}

    @torch.no_grad()
    def load_state(self, inner: Inner, told: Mapping[str, Told], arrays: Mapping[str, Array] | None = None) -> None:
        """Go on from a state that the first process has; the others know of it what `told` gave."""
        pieces = _pieces_of(inner)
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in inner.optimizers]
        for key, kind in told.items():
            number, index, name = key.split("/")
            if isinstance(kind, str):
                dtype = getattr(torch, kind)
                source = None if arrays is None else torch.from_numpy(np.array(arrays[key])).view(dtype)
                tensor = self._part(source, self._wholes[pieces[int(number)][int(index)]], dtype)
            else:
                tensor = torch.from_numpy(np.array(kind))
            states[int(number)].setdefault(int(index), {})[name] = tensor
        for optimizer, state in zip(inner.optimizers, states, strict=True):
            put_state(optimizer, state)

    def _states(self, inner: Inner) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Return each tensor of an optimizer's state, with its key and the shard that it is of."""
        for number, (optimizer, pieces) in enumerate(zip(inner.optimizers, _pieces_of(inner), strict=True)):
            for index, piece in enumerate(pieces):
                for name, tensor in optimizer.state.get(piece, {}).items():
                    if tensor is not None:
                        yield f"{number}/{index}/{name}", piece, tensor

    def whole(self, part: Tensor, piece: Tensor) -> Tensor:
        """Gather a tensor of which each process has a part like its shard of a parameter."""
        like = self._wholes[piece]
        shape: dict[str, Any] = {"shape": like.shape, "stride": like.stride()}
        found: Tensor = DTensor.from_local(part, self._mesh, like.placements, run_check=False, **shape).full_tensor()
        return found

    def part(self, whole: Tensor, piece: Tensor) -> Tensor:
        """Return this process's part of a tensor like a parameter, which all processes have whole."""
        like = self._wholes[piece]
        return distribute_tensor(whole, self._mesh, like.placements, src_data_rank=None).to_local()

    def _part(self, source: Tensor | None, like: DTensor, dtype: torch.dtype) -> Tensor:
        """Return this process's part of a tensor that the first process has."""
        device = like.device
        whole = torch.empty(like.shape, dtype=dtype, device=device) if source is None else to_device(source, device)
        return distribute_tensor(whole, self._mesh, like.placements, src_data_rank=0).to_local()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's repeated blocks: the members of its outermost lists of modules."""
    found: dict[int, nn.Module] = {}
    for child in model.children():
        blocks = _members(child) if isinstance(child, nn.ModuleList) else blocks_of(child)
        found |= {id(block): block for block in blocks if any(True for _ in block.parameters())}
    return list(found.values())


def _members(modules: nn.ModuleList) -> list[nn.Module]:
    """Return the members of a list, and those of lists in it: a list is no block, because it isn't called."""
    return [block for one in modules for block in (_members(one) if isinstance(one, nn.ModuleList) else [one])]


def _pieces_of(inner: Inner) -> list[list[Tensor]]:
    """Return the shards that each optimizer steps on, in the order of its state."""
    return [[piece for group in one.param_groups for piece in group["params"]] for one in inner.optimizers]


def _take_gradient(piece: nn.Parameter, parameter: Any) -> None:
    """Move a gradient that was summed over all processes to the shard that an optimizer knows."""
    piece.data = parameter.detach().to_local()  # FSDP2 may move a shard once, in the first forward pass.
    gradient = parameter.grad.to_local()
    parameter.grad = None
    piece.grad = gradient if piece.grad is None else piece.grad.add_(gradient)
