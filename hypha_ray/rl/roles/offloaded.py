"""Weights outside of the memory of their device, until they are needed again."""

from __future__ import annotations

import tempfile
from typing import Any

import torch


class OffloadedWeights:
    """Parameters of a model, which are empty meanwhile: in pinned memory if it is on a GPU, otherwise in a file.

    The module and its parameters stay the same objects, so tied ones stay tied. Buffers stay where they are.

    Args:
        model: the model; it can't compute until `load`.

    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        tensors = [one.data for one in self._parameters]
        self._pinned: list[torch.Tensor] | None = None
        self._file: Any = None
        if tensors[0].is_cuda:
            self._pinned = [one.cpu().pin_memory() for one in tensors]
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed when the weights are back.
            torch.save(tensors, self._file)
        self._device = tensors[0].device
        for parameter in self._parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)

    def load(self) -> None:
        """Bring the weights back, to the bit."""
        tensors = self._pinned
        if tensors is None:
            with self._file:
                self._file.seek(0)
                tensors = torch.load(self._file, weights_only=True)
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor.to(self._device)
