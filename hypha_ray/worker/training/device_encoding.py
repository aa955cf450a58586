"""Payloads that are encoded on a worker's GPU: a byte or less of each element crosses to the host instead of four.

θ stays on the GPU for that, as a copy beside the weights, and so does what payloads have left out: 4 and 4 bytes of
each parameter. The memory that a step takes is known after the first round alone, which is encoded on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from hypha_ray.codec import Encoder, Quality, difference_codec, sends_differences
from hypha_ray.codec.blocks import blocks
from hypha_ray.codec.feedback import DEVICE_BLOCK, DeviceFeedback, encodes_on_device
from hypha_ray.config import Job
from hypha_ray.model.environment import free_gpu_bytes
from hypha_ray.model.layout import LiveGroup, live_tensors, source_of
from hypha_ray.model.staging import copy_in, to_device
from hypha_ray.optim.state import WholeModel
from hypha_ray.types import Flat, Layout
from hypha_ray.types.layout import dtype_of, is_trained
from hypha_ray.worker.training.trainer import Trainer

log = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 30
"""Memory of a GPU that is left free beside θ and what was left out."""


class DeviceEncoding:
    """Encoding of a worker's results on the device of its model.

    Args:
        trainer: trainer of the model.
        layout: places of its tensors.
        encoders: encoders on the host, by fragment, which make payloads until this can.
        codec: name of the codec, one of `codec.on_device.ELEMENTWISE`.
        decay: part of what was left out that is made up for.
        free_bytes: function that tells the device's free memory.

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
        self._host = encoders
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
                kept = self._theta.setdefault(fragment, {})
                for group in filter(is_trained, flat):
                    if group not in kept:
                        dtype = getattr(torch, dtype_of(group))
                        kept[group] = torch.empty(len(flat[group]), dtype=dtype, device=self._trainer.device)
                    if mixed:
                        copy_in(source_of(flat[group]), kept[group])
                    else:
                        self._copy_live(fragment, group, kept[group])
        except torch.OutOfMemoryError:
            self._give_up()

    def payload(self, fragment: int) -> tuple[Flat, Quality] | None:
        """Return a fragment's payload and how good it is; None: it has to be encoded on the host.

        The arrays are written anew for the next payload of the fragment.
        """
        if self._enabled is None:
            self._enabled = self._free_bytes() >= self._needed_bytes() + _SPARE_BYTES
        if not self._enabled or fragment not in self._theta:
            return None
        groups = [group for group in self._layout.groups(fragment) if is_trained(group)]
        values = {group: LiveGroup(self._trainer.model, self._layout, fragment, group) for group in groups}
        try:
            buffers = self._copy_buffers(fragment)
            arrays, quality = self._encoder(fragment).encode(values, self._theta[fragment], self._wait)
        except torch.OutOfMemoryError:
            if fragment in self._encoders:
                self._encoders[fragment].residual.clear()  # Of some blocks it is that of a payload that isn't sent.
            self._give_up()
            return None
        return arrays | buffers, quality

    def forget(self) -> None:
        """Forget what payloads have left out."""
        for encoder in self._encoders.values():
            encoder.residual.clear()

    def _copy_live(self, fragment: int, group: str, out: torch.Tensor) -> None:
        live = LiveGroup(self._trainer.model, self._layout, fragment, group)
        for part in blocks(live.size, DEVICE_BLOCK):
            out[part] = live.block(part)

    def _encoder(self, fragment: int) -> DeviceFeedback:
        """Return a fragment's encoder, which begins with what the one on the host has left out."""
        if fragment not in self._encoders:
            codec = difference_codec(self._codec)
            assert codec is not None
            encoder = DeviceFeedback(codec, self._decay, self._room)
            for group, left_out in self._host[fragment].residual.items():
                encoder.residual[group] = to_device(source_of(left_out), self._trainer.device)
            self._encoders[fragment] = encoder
            self._host[fragment].residual.clear()
        return self._encoders[fragment]

    def _copy_buffers(self, fragment: int) -> Flat:
        """Begin to copy what isn't trained to the host; return the arrays."""
        kept = self._buffers.setdefault(fragment, {})
        for group, size in self._layout.groups(fragment).items():
            if not is_trained(group) and group not in kept:
                kept[group] = self._room(size, getattr(torch, dtype_of(group)))
        for entry, tensor in live_tensors(self._trainer.model, self._layout, fragment):
            if not is_trained(entry.group):
                room = kept[entry.group][entry.offset : entry.offset + entry.size]
                room.copy_(tensor.reshape(-1), non_blocking=True)
        return {group: room.numpy() for group, room in kept.items()}

    def _room(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=self._trainer.device.type == "cuda")

    def _wait(self) -> None:
        if self._trainer.device.type == "cuda":
            torch.cuda.synchronize(self._trainer.device)

    def _needed_bytes(self) -> int:
        trained = [entry for entry in self._layout.entries if is_trained(entry.group)]
        theta = sum(entry.size * np.dtype(dtype_of(entry.group)).itemsize for entry in trained)
        return theta + (4 * sum(entry.size for entry in trained) if self._decay else 0)

    def _give_up(self) -> None:
        """Encode on the host from here on, and go on there with what was left out."""
        log.warning("the GPU has too little memory left for encoding; results are encoded on the host")
        self._enabled = False
        for fragment, encoder in self._encoders.items():
            residual = {group: left_out.cpu().numpy() for group, left_out in encoder.residual.items()}
            self._host[fragment].residual.update(residual)
        self._theta.clear()
        self._encoders.clear()
        self._buffers.clear()


def device_encoding(job: Job, trainer: Trainer, layout: Layout, encoders: list[Encoder]) -> DeviceEncoding | None:
    """Return the encoding on a worker's GPU; None if its results are encoded on the host.

    The host encodes results of a model that is on the CPU, is sharded or has weights of 16 bits. It encodes gradients,
    and in replay mode all results: there a successor takes over what a payload has left out.
    """
    codec = job.sync.codec
    device = trainer.device
    gathers: Any = type(trainer).gather
    whole = gathers is WholeModel.gather
    wide = all(entry.dtype == dtype_of(entry.group) for entry in layout.entries if is_trained(entry.group))
    if device.type != "cuda" or not whole or not wide or job.run.mode == "replay" or not sends_differences(job.sync):
        return None
    if codec == "fp32" or not encodes_on_device(difference_codec(codec)):
        return None
    free_bytes = partial(free_gpu_bytes, device)
    return DeviceEncoding(trainer, layout, encoders, codec, job.sync.error_feedback, free_bytes)
