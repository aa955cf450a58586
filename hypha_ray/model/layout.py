"""Layout of a model's tensors in flat arrays, their partition into fragments, and copies between model and arrays.

One array for each dtype and fragment is copied at memcpy speed, and readers map it from the object store. A dict of
tensors allows neither. 16-bit floats are widened to float32 on the way out, and narrowed again on the way in.

Pass the plain module: the wrapper from `torch.compile` names its tensors differently.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from hypha_ray.errors import ConfigError
from hypha_ray.model.environment import copy_in, to_device
from hypha_ray.model.flat import Array, check, check_names, empty, pack, view, views
from hypha_ray.types import Entry, Flat, Layout
from hypha_ray.types.data import dtype_of, is_trained

_REPLACED = ".original_module."
"""Part of the name of a weight that a trained copy stands in for, so that it has no effect."""


def contiguous(sizes: Mapping[str, int], fragments: int) -> dict[str, int]:
    """Cut parameters, in the model's order, into runs of about equal size.

    Args:
        sizes: bytes of each parameter, by name.
        fragments: number of runs.

    Raises:
        ConfigError: there are fewer parameters than fragments.

    """
    _check(fragments, len(sizes), "its trained tensors", "give a model with parameters that require gradients")
    ends = list(accumulate(sizes.values()))
    starts = [0, *ends]
    cuts = [0]
    for part in range(1, fragments):
        goal = ends[-1] * part / fragments
        index = bisect_left(ends, goal)  # The goal lies within this parameter; the cut is before or after it.
        if ends[index] - goal <= goal - starts[index]:
            index += 1
        earliest = cuts[-1] + 1
        latest_end = len(ends) - (fragments - part)
        cuts.append(min(max(index, earliest), latest_end))
    return {name: bisect_right(cuts, index) - 1 for index, name in enumerate(sizes)}


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
    layer_of = layers_of(sizes)
    layers = sorted(set(layer_of.values()))
    _check(fragments, len(layers), "its layers", "set sync.partition to contiguous")
    fragment_of: dict[str, int] = {}
    fragment_bytes = [0] * fragments
    for name, layer in layer_of.items():
        fragment = layers.index(layer) % fragments
        fragment_of[name] = fragment
        fragment_bytes[fragment] += sizes[name]
    outside = sizes.keys() - layer_of.keys()
    for name in sorted(outside, key=lambda name: (-sizes[name], name)):
        smallest = fragment_bytes.index(min(fragment_bytes))
        fragment_of[name] = smallest
        fragment_bytes[smallest] += sizes[name]
    return fragment_of


def layers_of(names: Iterable[str]) -> dict[str, int]:
    """Find the layer of each parameter within layers, the first number in its name; those outside are left out."""
    layer_of: dict[str, int] = {}
    for name in names:
        match = re.search(r"(?:^|\.)(\d+)\.", name)
        if match:
            layer_of[name] = int(match[1])
    return layer_of


def _check(fragments: int, most_fragments: int, of: str, fix_of_none: str) -> None:
    if most_fragments == 0:
        raise ConfigError("MODEL009", f"the model can't be cut into fragments by {of}", "none", fix=fix_of_none)
    if not 1 <= fragments <= most_fragments:
        allowed = f"1 to {most_fragments}, {of}"
        fix = f"set sync.fragments to {most_fragments} or less"
        raise ConfigError("MODEL009", "sync.fragments doesn't fit the model", str(fragments), allowed, fix)


__all__ = [
    "Array",
    "array_of",
    "empty",
    "gather",
    "layers_of",
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


def layout_of(model: torch.nn.Module, fragments: int = 1, partition: str = "contiguous") -> Layout:
    """Lay out a model's trained parameters and its persistent buffers.

    Fragments consist of whole parameters, see `model.partition`; buffers are in fragment 0. Frozen parameters and
    non-persistent buffers are left out. Below an adapter, frozen parameters are fingerprinted.

    Raises:
        ConfigError: there are fewer parameters or layers than fragments, or a tensor has a dtype that numpy lacks.

    """
    tensors, tied = _untie(model)
    groups = {name: _group(name, tensor) for name, tensor in tensors.items()}
    sizes: dict[str, int] = {}
    for name, group in groups.items():
        if is_trained(group):
            dtype = np.dtype(dtype_of(group))
            sizes[name] = tensors[name].numel() * dtype.itemsize
    divide = strided if partition == "strided" else contiguous
    fragment_of = divide(sizes, fragments)
    ends: dict[tuple[int, str], int] = {}
    entries = []
    for name, tensor in tensors.items():
        fragment = fragment_of.get(name, 0)
        group = groups[name]
        elements = tensor.numel()
        offset = ends.get((fragment, group), 0)
        ends[fragment, group] = offset + elements
        entries.append(Entry(name, _dtype_name(tensor), tuple(tensor.shape), fragment, group, offset, elements))
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
    if out is None:
        out = pinned(layout, fragment) if on_gpu else empty(layout, fragment)
    check(layout, fragment, out)
    for entry, tensor in live_tensors(model, layout, fragment):
        source = tensor.detach()
        if gradients and isinstance(tensor, torch.nn.Parameter):
            source = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        target = torch.from_numpy(view(entry, out))
        target.copy_(source, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    return out


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
                source = torch.lerp(to_device(source, tensor.device), tensor.to(source.dtype), mixing)
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
        first_name = names.setdefault(_memory(tensor), name)
        if first_name == name:
            tensors[name] = tensor
        else:
            tied.append((name, first_name))
    return tensors, tuple(tied)


def _frozen_sha256(model: torch.nn.Module) -> str | None:
    """Return the fingerprint of the weights below an adapter; None without an adapter, and on the meta device."""
    if not hasattr(model, "peft_config"):
        return None
    fingerprint = getattr(model, "base_sha256", None)
    if fingerprint is not None:  # Fingerprint of weights before they were quantized.
        return str(fingerprint)
    sha256 = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or _REPLACED in name:
            continue
        if parameter.is_meta:
            return None
        description = repr((name, str(parameter.dtype), tuple(parameter.shape)))
        sha256.update(description.encode())
        weights = parameter.detach().cpu().contiguous()
        sha256.update(weights.view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def _sent(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return all trained parameters and persistent buffers, with aliases."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            yield name, parameter
    saved_names = model.state_dict().keys()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in saved_names:
            yield name, buffer


def _memory(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors of the same memory."""
    if tensor.is_meta or tensor.numel() == 0 or hasattr(tensor, "device_mesh"):  # A sharded tensor has no address.
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _group(name: str, tensor: torch.Tensor) -> str:
    """Return a tensor's group: its kind, and its dtype or a wider one that numpy has."""
    group_name = "parameters" if isinstance(tensor, torch.nn.Parameter) else "buffers"
    if tensor.is_complex():
        raise ConfigError("MODEL009", f"tensor {name} can't be sent", str(tensor.dtype), "real numbers")
    if tensor.dtype == torch.float64:
        return f"{group_name}/float64"
    if tensor.is_floating_point():
        return f"{group_name}/float32"
    if tensor.dtype == torch.bool:
        return f"{group_name}/uint8"
    return f"{group_name}/{_dtype_name(tensor)}"


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def pinned(layout: Layout, fragment: int) -> Flat:
    """Return arrays like `empty` in page-locked memory, into which a GPU copies several times faster."""
    flat: Flat = {}
    for group, elements in layout.groups(fragment).items():
        dtype: torch.dtype = getattr(torch, dtype_of(group))
        flat[group] = torch.empty(elements, dtype=dtype, pin_memory=True).numpy()
    return flat


def live_tensors(model: torch.nn.Module, layout: Layout, fragment: int) -> Iterator[tuple[Entry, torch.Tensor]]:
    """Return a fragment's entries with the model's tensors."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    for entry in layout.entries:
        if entry.fragment == fragment:
            yield entry, tensors[entry.name]


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
    bits = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        bits = bits.view(torch.uint16)
    if bits.is_cuda:
        host = torch.empty(bits.shape, dtype=bits.dtype, pin_memory=True).copy_(bits)
    else:
        host = bits.to("cpu", copy=copy)
    array: Array = host.numpy()
    return array


def tensor_of(array: Array) -> torch.Tensor:
    """Return the tensor that `array_of` was given, over the array's memory, to copy from."""
    tensor = source_of(array)
    if tensor.dtype == torch.uint16:
        return tensor.view(torch.bfloat16)
    return tensor


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
        self._tensors: list[torch.Tensor] = []
        self._starts: list[int] = []
        for entry, tensor in pairs:
            self._tensors.append(tensor.detach().reshape(-1))
            self._starts.append(entry.offset)
        self.size = layout.groups(fragment)[group]
        """Number of elements."""

    def block(self, part: slice) -> torch.Tensor:
        """Return a range of elements, 1-D: a view if one tensor has them all, which isn't to be written to."""
        pieces: list[torch.Tensor] = []
        for index in range(bisect_right(self._starts, part.start) - 1, len(self._starts)):
            start = self._starts[index]
            if start >= part.stop:
                break
            begin = max(0, part.start - start)
            pieces.append(self._tensors[index][begin : part.stop - start])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model's repeated blocks: the members of its outermost lists of modules."""
    blocks: dict[int, torch.nn.Module] = {}
    for child in model.children():
        child_blocks = _blocks_in_list(child) if isinstance(child, torch.nn.ModuleList) else blocks_of(child)
        for block in child_blocks:
            has_parameters = next(block.parameters(), None) is not None
            if has_parameters:
                blocks[id(block)] = block  # A shared block is one block.
    return list(blocks.values())


def _blocks_in_list(modules: torch.nn.ModuleList) -> list[torch.nn.Module]:
    """Return the blocks in a list and in its lists; a list itself is no block, because it isn't called."""
    blocks: list[torch.nn.Module] = []
    for module in modules:
        if isinstance(module, torch.nn.ModuleList):
            blocks += _blocks_in_list(module)
        else:
            blocks.append(module)
    return blocks
