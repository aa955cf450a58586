"""A model's tensors as flat arrays: where each lies, out of the live model, and back into it.

One array a dtype and fragment travels at memcpy speed and is read in place from the object store; a dict of tensors
does neither. 16-bit floats are widened to float32 on the way out and narrowed again on the way in.

Call these with the plain module: `torch.compile` gives a wrapper whose tensors have other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hypha_ray.errors import ConfigError
from hypha_ray.groups import dtype_of, is_trained
from hypha_ray.kernels import copy
from hypha_ray.model.flat import Array, check, check_names, empty, pack, view, views
from hypha_ray.model.partition import contiguous, strided
from hypha_ray.types import Entry, Flat, Layout

__all__ = ["Array", "empty", "gather", "layout_of", "load", "pack", "scatter", "view", "views"]


def layout_of(model: torch.nn.Module, fragments: int = 1, partition: str = "contiguous") -> Layout:
    """Lay out a model's trained parameters and its persistent buffers.

    Parameters are cut into fragments of whole tensors, see `model.partition`; buffers go with fragment 0. Frozen
    parameters, and buffers that aren't saved with a model, are left out.

    Raises:
        ConfigError: there are fewer parameters or layers than fragments, or one of a dtype that numpy lacks.

    """
    tensors, tied = _untie(model)
    groups = {name: _group(name, tensor) for name, tensor in tensors.items()}
    parameters = [name for name, group in groups.items() if is_trained(group)]
    sizes = {name: tensors[name].numel() * np.dtype(dtype_of(groups[name])).itemsize for name in parameters}
    fragment_of = (strided if partition == "strided" else contiguous)(sizes, fragments)
    used: dict[tuple[int, str], int] = {}
    entries = []
    for name, tensor in tensors.items():
        fragment, group, size = fragment_of.get(name, 0), groups[name], tensor.numel()
        offset = used.get((fragment, group), 0)
        used[fragment, group] = offset + size
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, tuple(tensor.shape), fragment, group, offset, size))
    return Layout(tuple(entries), tied, fragments)


def gather(
    model: torch.nn.Module, layout: Layout, fragment: int, out: Flat | None = None, gradients: bool = False
) -> Flat:
    """Copy a fragment out of the live model.

    Args:
        model: the model that the layout was made of, on any device.
        layout: where the tensors lie.
        fragment: which part of them.
        out: arrays of an earlier call to write into, twice as fast as fresh ones; None: make some.
        gradients: copy the parameters' gradients instead of them, zeros where there is none.

    Returns:
        One contiguous 1-D array a group; of a model on a GPU, in pinned memory.

    """
    on_gpu = any(tensor.is_cuda for _, tensor in _live(model, layout, fragment))
    flat = out if out is not None else _pinned(layout, fragment) if on_gpu else empty(layout, fragment)
    check(layout, fragment, flat)
    for entry, tensor in _live(model, layout, fragment):
        source = _gradient(tensor) if gradients and isinstance(tensor, torch.nn.Parameter) else tensor.detach()
        torch.from_numpy(view(entry, flat)).copy_(source, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    return flat


def scatter(
    model: torch.nn.Module, layout: Layout, fragment: int, flat: Mapping[str, Array], mixing: float = 0.0
) -> None:
    """Copy a fragment's arrays into the live model, in place; the arrays may be read-only and are never written to.

    Args:
        model: the model that the layout was made of, on any device.
        layout: where the tensors lie.
        fragment: which part of them.
        flat: one array a group.
        mixing: part of what is in the model's parameters that stays there.

    Raises:
        CheckpointError: the arrays don't fit the layout; the model is then as it was.

    """
    check(layout, fragment, flat)
    with torch.no_grad():
        for entry, tensor in _live(model, layout, fragment):
            source = _source(view(entry, flat))
            if mixing and is_trained(entry.group):
                source = torch.lerp(source.to(tensor.device), tensor.to(source.dtype), mixing)
            copy(source, tensor)


def load(model: torch.nn.Module, layout: Layout, tensors: Mapping[str, Array]) -> None:
    """Copy tensors by name, as `views` gives them, into the live model, in place.

    Raises:
        CheckpointError: the names or shapes aren't exactly the layout's; the model is then as it was.

    """
    check_names(layout, tensors)
    with torch.no_grad():
        for fragment in range(layout.fragments):
            for entry, tensor in _live(model, layout, fragment):
                tensor.copy_(_source(tensors[entry.name]))


def _untie(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], tuple[tuple[str, str], ...]]:
    """Return what is sent, by name, and the pairs of alias and name of what shares its memory with it."""
    tensors: dict[str, torch.Tensor] = {}
    tied: list[tuple[str, str]] = []
    names: dict[object, str] = {}
    for name, tensor in _sent(model):
        first = names.setdefault(_memory(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            tied.append((name, first))
    return tensors, tuple(tied)


def _sent(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All trained parameters and saved buffers, aliases included."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            yield name, parameter
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in saved:
            yield name, buffer


def _memory(tensor: torch.Tensor) -> object:
    """Return a key that two tensors share if a write to one is a write to the other."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _group(name: str, tensor: torch.Tensor) -> str:
    """Return the group that a tensor travels in: its kind, and its dtype or a wider one that numpy has."""
    kind = "parameters" if isinstance(tensor, torch.nn.Parameter) else "buffers"
    if tensor.is_complex():
        raise ConfigError("MODEL009", f"tensor {name} can't be sent", str(tensor.dtype), "real numbers")
    if tensor.is_floating_point():
        return f"{kind}/{'float64' if tensor.dtype == torch.float64 else 'float32'}"
    return f"{kind}/{'uint8' if tensor.dtype == torch.bool else str(tensor.dtype).removeprefix('torch.')}"


def _pinned(layout: Layout, fragment: int) -> Flat:
    """Return arrays like `empty`, in page-locked memory, into which a GPU copies several times faster."""
    return {
        group: torch.empty(size, dtype=getattr(torch, dtype_of(group)), pin_memory=True).numpy()
        for group, size in layout.groups(fragment).items()
    }


def _live(model: torch.nn.Module, layout: Layout, fragment: int) -> Iterator[tuple[Entry, torch.Tensor]]:
    """Return a fragment's entries with the tensors of the model that they stand for."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    return ((entry, tensors[entry.name]) for entry in layout.entries if entry.fragment == fragment)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class _Window:
    """An array's memory without its read-only mark, which torch warns of even where a tensor is only read from."""

    def __init__(self, array: Array) -> None:
        self.array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__: dict[str, Any] = {**array.__array_interface__, "data": (address, False)}


def _source(array: Array) -> torch.Tensor:
    """Return a tensor to copy from, over the array's own memory."""
    return torch.from_numpy(np.asarray(_Window(array)))
