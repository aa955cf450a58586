"""Layout of a model's tensors in flat arrays, their partition into fragments, and copies between model and arrays.

One array for each dtype and fragment is copied at memcpy speed, and readers map it from the object store. A dict of
tensors allows neither. 16-bit floats are widened to float32 on the way out, and narrowed again on the way in.

Pass the plain module: the wrapper from `torch.compile` names its tensors differently.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from hypha_ray.errors import ConfigError
from hypha_ray.model.flat import Array, check, check_names, empty, pack, view, views
from hypha_ray.model.staging import copy_in, moved
from hypha_ray.types import Entry, Flat, Layout
from hypha_ray.types.layout import dtype_of, is_trained


def contiguous(sizes: Mapping[str, int], fragments: int) -> dict[str, int]:
    """Cut parameters, in the model's order, into runs of about equal size.

    Args:
        sizes: bytes of each parameter, by name.
        fragments: number of runs.

    Raises:
        ConfigError: there are fewer parameters than fragments.

    """
    _check(fragments, len(sizes), "its trained tensors")
    counts = list(sizes.values())
    ends = list(accumulate(counts))
    cuts = [0]
    for part in range(1, fragments):
        goal = ends[-1] * part / fragments
        after = bisect_left(ends, goal)
        near = after + 1 if ends[after] - goal <= goal - (ends[after] - counts[after]) else after
        cuts.append(min(max(near, cuts[-1] + 1), len(counts) - (fragments - part)))
    return {name: bisect_right(cuts, item) - 1 for item, name in enumerate(sizes)}


def strided(sizes: Mapping[str, int], fragments: int) -> dict[str, int]:
    """Put layer ℓ into fragment ℓ mod P, as Streaming DiLoCo does (arXiv 2501.18512, section 2.2).

    Parameters with the same first number in their names form a layer. Parameters outside of layers, such as
    embeddings, go to the smallest fragment one after the other, the largest first.

    Args:
        sizes: bytes of each parameter, by name.
        fragments: P, the number of fragments.

    Raises:
        ConfigError: there are fewer layers than fragments.

    """
    layers = {name: int(found[1]) for name in sizes if (found := re.search(r"(?:^|\.)(\d+)\.", name))}
    _check(fragments, len(set(layers.values())), "its layers")
    rank = {layer: index for index, layer in enumerate(sorted(set(layers.values())))}
    fragment_of = {name: rank[layer] % fragments for name, layer in layers.items()}
    filled = [sum(sizes[name] for name in layers if fragment_of[name] == part) for part in range(fragments)]
    for name in sorted(sizes.keys() - layers.keys(), key=lambda one: (-sizes[one], one)):
        fragment_of[name] = smallest = filled.index(min(filled))
        filled[smallest] += sizes[name]
    return fragment_of


def _check(fragments: int, most: int, of: str) -> None:
    if not 1 <= fragments <= most:
        allowed = f"1 to {most}, {of}"
        fix = f"set sync.fragments to {most} or less"
        raise ConfigError("MODEL009", "sync.fragments doesn't fit the model", str(fragments), allowed, fix)


__all__ = [
    "Array",
    "array_of",
    "empty",
    "gather",
    "layout_of",
    "live_tensors",
    "load",
    "pack",
    "pinned",
    "scatter",
    "source_of",
    "tensor_of",
    "view",
    "views",
]

_REPLACED = ".original_module."
"""Part of the name of a weight that a trained copy stands in for, so that it has no effect."""


def layout_of(model: torch.nn.Module, fragments: int = 1, partition: str = "contiguous") -> Layout:
    """Lay out a model's trained parameters and its persistent buffers.

    Fragments consist of whole parameters, see `model.partition`; buffers are in fragment 0. Frozen parameters and
    non-persistent buffers are left out. Below an adapter, frozen parameters are fingerprinted.

    Raises:
        ConfigError: there are fewer parameters or layers than fragments, or a tensor has a dtype that numpy lacks.

    """
    tensors, tied = _untie(model)
    groups = {name: _group(name, tensor) for name, tensor in tensors.items()}
    parameters = [name for name, group in groups.items() if is_trained(group)]
    sizes = {name: tensors[name].numel() * np.dtype(dtype_of(groups[name])).itemsize for name in parameters}
    fragment_of = (strided if partition == "strided" else contiguous)(sizes, fragments)
    used: dict[tuple[int, str], int] = {}
    entries = []
    for name, tensor in tensors.items():
        fragment = fragment_of.get(name, 0)
        group = groups[name]
        size = tensor.numel()
        offset = used.get((fragment, group), 0)
        used[fragment, group] = offset + size
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, tuple(tensor.shape), fragment, group, offset, size))
    return Layout(tuple(entries), tied, fragments, _frozen_sha256(model))


def gather(
    model: torch.nn.Module, layout: Layout, fragment: int, out: Flat | None = None, gradients: bool = False
) -> Flat:
    """Copy a fragment out of the model.

    Args:
        model: model that the layout was made from, on any device.
        layout: places of the tensors.
        fragment: index of the fragment.
        out: arrays to write into, which is twice as fast as new ones; None: allocate new arrays.
        gradients: copy gradients instead of parameters; zeros stand for a missing gradient.

    Returns:
        One contiguous 1-D array for each group, in pinned memory if the model is on a GPU.

    """
    on_gpu = any(tensor.is_cuda for _, tensor in live_tensors(model, layout, fragment))
    flat = out if out is not None else pinned(layout, fragment) if on_gpu else empty(layout, fragment)
    check(layout, fragment, flat)
    for entry, tensor in live_tensors(model, layout, fragment):
        source = _gradient(tensor) if gradients and isinstance(tensor, torch.nn.Parameter) else tensor.detach()
        torch.from_numpy(view(entry, flat)).copy_(source, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    return flat


def scatter(
    model: torch.nn.Module, layout: Layout, fragment: int, flat: Mapping[str, Array], mixing: float = 0.0
) -> None:
    """Copy a fragment's arrays into the model, in place. The arrays may be read-only and are never written to.

    Args:
        model: model that the layout was made from, on any device.
        layout: places of the tensors.
        fragment: index of the fragment.
        flat: one array for each group.
        mixing: weight of the model's own parameters in the result, 0 … 1.

    Raises:
        CheckpointError: the arrays don't fit the layout; the model is unchanged.

    """
    check(layout, fragment, flat)
    with torch.no_grad():
        for entry, tensor in live_tensors(model, layout, fragment):
            source = source_of(view(entry, flat))
            if mixing and is_trained(entry.group):
                source = torch.lerp(moved(source, tensor.device), tensor.to(source.dtype), mixing)
            copy_in(source, tensor)


def load(model: torch.nn.Module, layout: Layout, tensors: Mapping[str, Array]) -> None:
    """Copy named tensors, such as the result of `views`, into the model in place.

    Raises:
        CheckpointError: names or shapes differ from the layout's; the model is unchanged.

    """
    check_names(layout, tensors)
    with torch.no_grad():
        for fragment in range(layout.fragments):
            for entry, tensor in live_tensors(model, layout, fragment):
                source = source_of(tensors[entry.name])
                if tensor.is_cuda:
                    copy_in(source, tensor)
                else:
                    tensor.copy_(source)


def _untie(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], tuple[tuple[str, str], ...]]:
    """Return the tensors to send by name, and pairs of an alias and the name that it is sent under."""
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


def _frozen_sha256(model: torch.nn.Module) -> str | None:
    """Return the fingerprint of the weights below an adapter; None without an adapter, and on the meta device."""
    if not hasattr(model, "peft_config"):
        return None
    if (known := getattr(model, "base_sha256", None)) is not None:  # Of quantized weights, before they were.
        return str(known)
    sha256 = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or _REPLACED in name:
            continue
        if parameter.is_meta:
            return None
        sha256.update(repr((name, str(parameter.dtype), tuple(parameter.shape))).encode())
        sha256.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def _sent(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return all trained parameters and persistent buffers, with aliases."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            yield name, parameter
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in saved:
            yield name, buffer


def _memory(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors of the same memory."""
    if tensor.is_meta or tensor.numel() == 0 or hasattr(tensor, "device_mesh"):  # One that is sharded has no address.
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _group(name: str, tensor: torch.Tensor) -> str:
    """Return a tensor's group: its kind, and its dtype or a wider one that numpy has."""
    kind = "parameters" if isinstance(tensor, torch.nn.Parameter) else "buffers"
    if tensor.is_complex():
        raise ConfigError("MODEL009", f"tensor {name} can't be sent", str(tensor.dtype), "real numbers")
    if tensor.is_floating_point():
        return f"{kind}/{'float64' if tensor.dtype == torch.float64 else 'float32'}"
    return f"{kind}/{'uint8' if tensor.dtype == torch.bool else str(tensor.dtype).removeprefix('torch.')}"


def pinned(layout: Layout, fragment: int) -> Flat:
    """Return arrays like `empty` in page-locked memory, into which a GPU copies several times faster."""
    return {
        group: torch.empty(size, dtype=getattr(torch, dtype_of(group)), pin_memory=True).numpy()
        for group, size in layout.groups(fragment).items()
    }


def live_tensors(model: torch.nn.Module, layout: Layout, fragment: int) -> Iterator[tuple[Entry, torch.Tensor]]:
    """Return a fragment's entries with the model's tensors."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    return ((entry, tensors[entry.name]) for entry in layout.entries if entry.fragment == fragment)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class _Window:
    """Memory of an array without its read-only flag, about which torch warns even if a tensor is only read."""

    def __init__(self, array: Array) -> None:
        self.array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__: dict[str, Any] = {**array.__array_interface__, "data": (address, False)}


def source_of(array: Array) -> torch.Tensor:
    """Return a tensor over the array's memory, to copy from."""
    return torch.from_numpy(np.asarray(_Window(array)))


def array_of(tensor: torch.Tensor, copy: bool = False) -> Array:
    """Return a tensor's values; bfloat16, which numpy lacks, as its bits.

    Args:
        tensor: tensor on any device.
        copy: whether the array has memory of its own even if the tensor is on the CPU.

    """
    bits = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).detach()
    if bits.is_cuda:
        host = torch.empty(bits.shape, dtype=bits.dtype, pin_memory=True).copy_(bits)
    else:
        host = bits.to("cpu", copy=copy)
    array: Array = host.numpy()
    return array


def tensor_of(array: Array) -> torch.Tensor:
    """Return the tensor that `array_of` was given, over the array's memory, to copy from."""
    tensor = source_of(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


class LiveGroup:
    """A group of a fragment, whose dtype all its tensors have.

    Args:
        model: model that the layout was made from.
        layout: places of the tensors.
        fragment: index of the fragment.
        group: name of the group.

    """

    def __init__(self, model: torch.nn.Module, layout: Layout, fragment: int, group: str) -> None:
        pairs = [pair for pair in live_tensors(model, layout, fragment) if pair[0].group == group]
        pairs.sort(key=lambda pair: pair[0].offset)
        self._tensors = [tensor.detach().reshape(-1) for _, tensor in pairs]
        self._starts = [entry.offset for entry, _ in pairs]
        self.size = layout.groups(fragment)[group]
        """Number of elements."""

    def block(self, part: slice) -> torch.Tensor:
        """Return a range of elements, 1-D: a view if one tensor has them all, which isn't to be written to."""
        pieces: list[torch.Tensor] = []
        for index in range(bisect_right(self._starts, part.start) - 1, len(self._starts)):
            start = self._starts[index]
            if start >= part.stop:
                break
            pieces.append(self._tensors[index][max(0, part.start - start) : part.stop - start])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
