"""Copies of batches to the device, which don't wait for what it computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class InputCopies:
    """Copies on a stream of their own, from pinned memory; on a CPU there is nothing to copy.

    So a batch comes to the device while the step before it is computed.

    Args:
        device: device of the model.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def of(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors on the device, which may be used on its current stream."""
        if self._stream is None:
            return {name: tensor.to(self._device) for name, tensor in inputs.items()}
        with torch.cuda.stream(self._stream):
            copies = {name: tensor.pin_memory().to(self._device, non_blocking=True) for name, tensor in inputs.items()}
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for copy in copies.values():
            copy.record_stream(computing)  # Its memory is free for other copies once the step is over.
        return copies
