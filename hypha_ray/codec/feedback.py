"""Blocks of arrays, and encoders with error feedback that go through them: of deltas and of steps of weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
import torch

from hypha_ray.codec.base import Quality
from hypha_ray.codec.formats import Bf16, Chunked, E3m0, Fp16, Int4, Int8
from hypha_ray.types import Flat
from hypha_ray.types.data import is_trained

BLOCK = 1 << 18
"""Number of elements that are worked on at a time and fit into caches: a multiple of every codec's chunk."""
_LAG = "momentum/"
"""Prefix of a group's name in an encoder's residual: the momentum that the receiver lacks for postponed changes."""
ELEMENTWISE = (Bf16, Fp16, Int8, Int4, E3m0)
"""Codecs whose payloads are the same on every device, because each element is rounded by itself.

`huffman2`, `huffman3` and `topk` encode on the host: a GPU adds up a chunk, and breaks ties, in another order. So does
`visible`, whose streams are made there.
"""
DEVICE_BLOCK = 1 << 22
"""Number of elements that are encoded at a time: enough for a GPU, and few compared with a model."""


def blocks(size: int, block: int = BLOCK) -> Iterator[slice]:
    """Cut a range of elements into blocks."""
    for start in range(0, size, block):
        yield slice(start, min(start + block, size))


def tensors(flat: Flat) -> dict[str, torch.Tensor]:
    """View arrays as tensors, without a copy.

    Ray's arrays are read-only and shared by all readers on a node. Torch has no read-only tensors: it warns, and would
    write all the same. So the caller must not write into tensors of arrays that aren't its own.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return {group: torch.from_numpy(array) for group, array in flat.items()}


class Feedback:
    """Encoder of one fragment's results with error feedback (Karimireddy et al., arXiv 1901.09847).

    The encoding error of each payload, times a decay, is added to the next payload before it is encoded. So with a
    decay of 1, all decoded payloads and the last encoding error add up to all values that were to be sent.

    Args:
        codec: codec of the payloads.
        decay: part of the encoding error that is made up for in the next round; 0: none of it.
        momentum: μ of the receiver's outer steps, if the last payload makes up for the momentum of postponed changes;
            otherwise 0.

    """

    def __init__(self, codec: Chunked, decay: float, momentum: float = 0.0) -> None:
        self._codec = codec
        self._decay = decay
        self._momentum = momentum
        self.residual: Flat = {}
        """Encoding error so far, by group, and lacking momentum; empty before the first round, and without feedback."""

    def encode(self, values: Flat, theta: Flat | None, last: bool = False) -> tuple[Flat, Quality]:
        """Encode a round's result; the payload's buffers share memory with `values`."""
        codec = self._codec.last() if last else self._codec
        payload: Flat = {}
        quality = Quality()
        sources = tensors(values)
        bases = {} if theta is None else tensors(theta)
        for group, array in values.items():
            if not is_trained(group):
                payload[group] = array
                continue
            arrays = codec.allocate(array.size)
            out = _as_rows(codec, tensors(arrays))
            residual = self._array(group, array.size) if self._decay else None
            lag = self._array(_LAG + group, array.size) if self._momentum else None
            for part in blocks(array.size):
                target = sources[group][part]
                base = None
                if theta is not None:
                    base = bases[group][part]
                    target = target - base
                delta = target.float()
                target = delta
                if residual is not None:
                    postponed = residual[part]
                    if last and lag is not None:
                        postponed = self._late_effect(postponed, lag[part])
                    target = torch.add(target, postponed, alpha=self._decay)
                decoded = codec.encode_change(target, base, out, part.start)
                difference = target - decoded
                if residual is not None:
                    residual[part] = difference
                if lag is not None:
                    lag[part].mul_(self._momentum).add_(delta).sub_(decoded)
                quality.add_block(target, decoded, difference)
            for name, packed in codec.pack(arrays).items():
                payload[f"{group}/{name}"] = packed
        if not math.isfinite(quality.difference):
            self.residual.clear()  # A damaged result is rejected, and must not damage the next ones.
        return payload, quality

    def _array(self, name: str, size: int) -> torch.Tensor:
        """Return an array of the residual, which begins as zeros."""
        if name not in self.residual:
            self.residual[name] = np.zeros(size, np.float32)
        return torch.from_numpy(self.residual[name])

    def _late_effect(self, residual: torch.Tensor, lag: torch.Tensor) -> torch.Tensor:
        """Return what changes the weights in one step as postponed changes would have done in time.

        Outer steps are v ← μv + Δ and θ ← θ + η(Δ + μv). So with time a change Δ moves the weights by ηΔ / (1 − μ),
        but a new one by η(1 + μ)Δ. With e for the encoding error and l for the lacking momentum,
        (e − μ³l) / (1 − μ²) has the effect of all that is left out.
        """
        mu = self._momentum
        return (residual - mu**3 * lag) / (1 - mu**2)


def _as_rows(codec: Chunked, arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """View the arrays of a group with one row for each chunk."""
    return {name: arrays[name].view(-1, columns) for name, (_, columns) in codec.arrays.items()}


class Elements(Protocol):
    """Elements of a group on the device."""

    size: int

    def block(self, part: slice) -> torch.Tensor:
        """Return a range of elements, 1-D, which must not be written to."""


class DeviceFeedback:
    """Encoder of one fragment's parameters on their device, so that payloads are copied to the host instead of weights.

    Payloads are those of `Feedback` to the bit, except for the bits of NaNs.

    Args:
        codec: codec of a class in `ELEMENTWISE`.
        decay: part of the encoding error that is made up for in the next round; 0: none of it.
        allocate: function of size and dtype that allocates memory of the host, into which the device copies.
        block: number of elements that are encoded at a time, a multiple of the codec's chunk.

    """

    def __init__(
        self,
        codec: Chunked,
        decay: float,
        allocate: Callable[[int, torch.dtype], torch.Tensor],
        block: int = DEVICE_BLOCK,
    ) -> None:
        self._codec = codec
        self._decay = decay
        self._allocate = allocate
        self._block = block
        self._host_arrays: dict[str, torch.Tensor] = {}
        """Arrays of the payload by name, which are overwritten in each round."""
        self.residual: dict[str, torch.Tensor] = {}
        """Encoding error so far, by group, on the device; empty before the first round, and without feedback."""

    def encode(
        self, values: Mapping[str, Elements], theta: Mapping[str, torch.Tensor], wait: Callable[[], None]
    ) -> tuple[Flat, Quality]:
        """Encode differences of trained groups to θ on their device; `wait` waits for all copies to the host.

        Returns:
            Arrays of these groups for the payload, which the next call overwrites, and their quality.

        """
        block_sums: list[torch.Tensor] = []
        payload: dict[str, torch.Tensor] = {}
        for group, elements in values.items():
            arrays: dict[str, torch.Tensor] = {}
            for key, form in self._codec.form({group: elements.size}).items():
                payload[key] = self._host_array(key, form.size, form.dtype)
                arrays[key.removeprefix(f"{group}/")] = payload[key]
            out = _as_rows(self._codec, arrays)
            for part in blocks(elements.size, self._block):
                block_sums.append(self._encode_block(group, elements, theta[group], part, out))
        quality = Quality()
        if block_sums:
            sums = torch.stack(block_sums).sum(0)
            quality = Quality(*sums.tolist())
        wait()
        if not math.isfinite(quality.difference):
            self.residual.clear()  # A damaged result is rejected, and must not damage the next ones.
        return {key: array.numpy() for key, array in payload.items()}, quality

    def _host_array(self, key: str, size: int, dtype: str) -> torch.Tensor:
        if key not in self._host_arrays:
            self._host_arrays[key] = self._allocate(size, getattr(torch, dtype))
        return self._host_arrays[key]

    def _encode_block(
        self, group: str, elements: Elements, theta: torch.Tensor, part: slice, out: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Encode a block; return the sums of `Quality`, on the device."""
        delta = elements.block(part) - theta[part]
        target = delta.float()
        residual = self._residual(group, elements.size, target.device)
        if residual is not None:
            target = torch.add(target, residual[part], alpha=self._decay)
        decoded = self._codec.encode_block(target, out, part.start)
        difference = target - decoded
        if residual is not None:
            residual[part] = difference
        target = target.double()
        decoded = decoded.double()
        difference = difference.double()
        return torch.stack([target.dot(target), decoded.dot(decoded), target.dot(decoded), difference.dot(difference)])

    def _residual(self, group: str, size: int, device: torch.device) -> torch.Tensor | None:
        if not self._decay:
            return None
        if group not in self.residual:
            self.residual[group] = torch.zeros(size, device=device)
        return self.residual[group]


def encodes_on_device(codec: Chunked | None) -> bool:
    """Whether a codec's payloads are the same on every device."""
    return type(codec) in ELEMENTWISE


def advance(codec: Chunked, theta: Flat, payload: Flat, out: Flat | None = None) -> Flat:
    """Add a decoded difference to weights, block by block. Sender and receivers get the same bits.

    `theta`, the weights before, is never written to. Without `out`, new arrays are made.
    """
    if out is None:
        out = {group: np.empty_like(array) for group, array in theta.items()}
    before = tensors(theta)
    encoded = tensors(payload)
    after = tensors(out)
    for group, old in before.items():
        if is_trained(group):
            for part in blocks(len(old)):
                codec.advance_block(encoded, group, part, old[part], after[group][part])
        else:
            after[group].copy_(encoded[group])
    return out


def publish(codec: Chunked, decay: float, theta: Flat, new: Flat, residual: Flat) -> tuple[Flat, Flat]:
    """Encode a step of the global weights, and set the new weights to what receivers decode.

    `theta` are the weights before the step, which all workers have. `new` is overwritten, `residual` is never written
    to.

    Returns:
        The payload, whose buffers share memory with the new weights, and the new residual.

    """
    sender = Feedback(codec, decay)
    sender.residual = {group: array.copy() for group, array in residual.items()}
    payload, _ = sender.encode(new, theta)
    advance(codec, theta, payload, out=new)
    return payload, sender.residual
