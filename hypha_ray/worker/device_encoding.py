"""Payloads that are encoded on a worker's GPU: a byte or less of each element crosses to the host instead of four.

For that the GPU keeps a copy of θ beside the weights, and the residuals of the codec: 8 bytes for each parameter. The
first round is encoded on the host, because only after it the memory that a step takes is known.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from hypha_ray.codec import Encoder, Quality, difference_codec, sends_differences
from hypha_ray.codec.feedback import as_rows, blocks
from hypha_ray.codec.formats import Bf16, E3m0, Fp16, Int4, Int8
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.config import Job
from hypha_ray.model.environment import copy_in, free_gpu_bytes, to_device
from hypha_ray.model.layout import LiveGroup, empty, live_tensors, source_of
from hypha_ray.optim.step import WholeModel
from hypha_ray.types import Flat, Layout
from hypha_ray.types.data import dtype_of, is_trained
from hypha_ray.worker.trainer import Trainer

log = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 30
"""Memory of a GPU that is left free beside θ and residuals."""
ELEMENTWISE = (Bf16, Fp16, Int8, Int4, E3m0)
"""Codecs whose payloads are the same on every device, because each element is rounded by itself.

`huffman2`, `huffman3` and `topk` encode on the host: a GPU adds up a chunk, and breaks ties, in another order. So does
`visible`, whose streams are made there.
"""
DEVICE_BLOCK = 1 << 22
"""Number of elements that are encoded at a time: enough for a GPU, and few compared with a model."""


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
            out = as_rows(self._codec, arrays)
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

    def _host_array(self, key: str, elements: int, dtype: str) -> torch.Tensor:
        if key not in self._host_arrays:
            self._host_arrays[key] = self._allocate(elements, getattr(torch, dtype))
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

    def _residual(self, group: str, elements: int, device: torch.device) -> torch.Tensor | None:
        if not self._decay:
            return None
        if group not in self.residual:
            self.residual[group] = torch.zeros(elements, device=device)
        return self.residual[group]


def encodes_on_device(codec: Chunked | None) -> bool:
    """Whether a codec's payloads are the same on every device."""
    return type(codec) in ELEMENTWISE


class DeviceEncoding:
    """Encoding of a worker's results on the device of its model, by one of `ELEMENTWISE`.

    The encoders on the host, one for each fragment, are for payloads that aren't encoded on the device.
    """

    def __init__(
        self,
        trainer: Trainer,
        layout: Layout,
        encoders: list[Encoder],
        codec: str,
        decay: float,
        free_bytes: Callable[[], int],
    ) -> None:
        self._trainer = trainer
        self._layout = layout
        self._host_encoders = encoders
        self._codec = codec
        self._decay = decay
        self._free_bytes = free_bytes
        self._enabled: bool | None = None
        """Whether there is memory for it; None before the first round is over."""
        self._theta: dict[int, dict[str, torch.Tensor]] = {}
        """Global weights by fragment and group, on the device."""
        self._encoders: dict[int, DeviceFeedback] = {}
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}
        """Memory of the host for groups that aren't trained, by fragment."""

    def take(self, fragments: Mapping[int, Flat], mixed: bool) -> None:
        """Keep new global weights; unless they were mixed, the model has them already."""
        if not self._enabled:
            return
        try:
            for fragment, flat in fragments.items():
                theta = self._theta.setdefault(fragment, {})
                for group in filter(is_trained, flat):
                    if group not in theta:
                        dtype = getattr(torch, dtype_of(group))
                        theta[group] = torch.empty(len(flat[group]), dtype=dtype, device=self._trainer.device)
                    if mixed:
                        copy_in(source_of(flat[group]), theta[group])
                    else:
                        self._copy_from_model(fragment, group, theta[group])
        except torch.OutOfMemoryError:
            self._encode_on_host()

    def payload(self, fragment: int, results: dict[int, Flat] | None = None) -> tuple[Flat, Quality] | None:
        """Encode a fragment; return its payload and quality, None if it has to be encoded on the host.

        The arrays are written anew for the next payload of the fragment. `results` has arrays by fragment, into which
        the host copies weights. Those of a fragment's first result aren't pinned, which takes longer than the copy.
        """
        if self._enabled is None:
            self._enabled = self._free_bytes() >= self._needed_bytes() + _SPARE_BYTES
        if not self._enabled or fragment not in self._theta:
            if self._enabled and results is not None:
                results[fragment] = empty(self._layout, fragment)
            return None
        values = {}
        for group in filter(is_trained, self._layout.groups(fragment)):
            values[group] = LiveGroup(self._trainer.model, self._layout, fragment, group)
        try:
            buffers = self._copy_buffers(fragment)
            arrays, quality = self._encoder(fragment).encode(values, self._theta[fragment], self._wait)
        except torch.OutOfMemoryError:
            encoder = self._encoders.get(fragment)
            if encoder is not None:
                encoder.residual.clear()  # Some blocks of it belong to a payload that isn't sent.
            self._encode_on_host()
            return None
        if results is not None:
            results.pop(fragment, None)
        return arrays | buffers, quality

    def forget(self) -> None:
        """Clear the residuals of all fragments."""
        for encoder in self._encoders.values():
            encoder.residual.clear()

    def _copy_from_model(self, fragment: int, group: str, out: torch.Tensor) -> None:
        live = LiveGroup(self._trainer.model, self._layout, fragment, group)
        for part in blocks(live.size, DEVICE_BLOCK):
            out[part] = live.block(part)

    def _encoder(self, fragment: int) -> DeviceFeedback:
        """Return a fragment's encoder; a new one takes over the residuals of the one on the host."""
        encoder = self._encoders.get(fragment)
        if encoder is not None:
            return encoder
        codec = difference_codec(self._codec)
        assert codec is not None
        encoder = DeviceFeedback(codec, self._decay, self._empty_on_host)
        host_encoder = self._host_encoders[fragment]
        for group, residual in host_encoder.residual.items():
            encoder.residual[group] = to_device(source_of(residual), self._trainer.device)
        self._encoders[fragment] = encoder
        host_encoder.residual.clear()
        return encoder

    def _copy_buffers(self, fragment: int) -> Flat:
        """Begin to copy buffers, which aren't trained, to the host; return their arrays."""
        copies = self._buffers.setdefault(fragment, {})
        for group, elements in self._layout.groups(fragment).items():
            if not is_trained(group) and group not in copies:
                copies[group] = self._empty_on_host(elements, getattr(torch, dtype_of(group)))
        for entry, tensor in live_tensors(self._trainer.model, self._layout, fragment):
            if not is_trained(entry.group):
                target = copies[entry.group][entry.offset : entry.offset + entry.size]
                target.copy_(tensor.reshape(-1), non_blocking=True)
        return {group: copy.numpy() for group, copy in copies.items()}

    def _empty_on_host(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        is_pinned = self._trainer.device.type == "cuda"
        return torch.empty(elements, dtype=dtype, pin_memory=is_pinned)

    def _wait(self) -> None:
        if self._trainer.device.type == "cuda":
            torch.cuda.synchronize(self._trainer.device)

    def _needed_bytes(self) -> int:
        """Memory of a GPU that θ and residuals take."""
        needed_bytes = 0
        for entry in self._layout.entries:
            if not is_trained(entry.group):
                continue
            dtype = np.dtype(dtype_of(entry.group))
            needed_bytes += entry.size * dtype.itemsize
            if self._decay:
                needed_bytes += 4 * entry.size  # Residuals have 32 bits.
        return needed_bytes

    def _encode_on_host(self) -> None:
        """Encode on the host from here on, and move the residuals there."""
        log.warning("the GPU has too little memory left for encoding; results are encoded on the host")
        self._enabled = False
        for fragment, encoder in self._encoders.items():
            host_residuals = self._host_encoders[fragment].residual
            for group, residual in encoder.residual.items():
                host_residuals[group] = residual.cpu().numpy()
        self._theta.clear()
        self._encoders.clear()
        self._buffers.clear()


def device_encoding(job: Job, trainer: Trainer, layout: Layout, encoders: list[Encoder]) -> DeviceEncoding | None:
    """Return the encoding on a worker's GPU; None if its results are encoded on the host.

    The host encodes results of a model that is on the CPU, is sharded or has weights of 16 bits. It encodes gradients,
    too, and in replay mode all results, because there a successor takes over the residuals.
    """
    codec = job.sync.codec
    device = trainer.device
    gather: Any = type(trainer).gather
    is_whole = gather is WholeModel.gather
    if device.type != "cuda" or not is_whole or job.run.mode == "replay" or not sends_differences(job.sync):
        return None
    for entry in layout.entries:
        if is_trained(entry.group) and entry.dtype != dtype_of(entry.group):
            return None
    if codec == "fp32" or not encodes_on_device(difference_codec(codec)):
        return None
    free_bytes = partial(free_gpu_bytes, device)
    return DeviceEncoding(trainer, layout, encoders, codec, job.sync.error_feedback, free_bytes)
