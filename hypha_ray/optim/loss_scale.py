"""Scale of the loss in training with float16, by which small gradients don't vanish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from hypha_ray.model.flat import Array
from hypha_ray.types import Flat

INITIAL = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
INTERVAL = 2000
"""Steps in a row with finite gradients after which the scale grows."""
_SCALE = "loss_scale"
_STEPS = "loss_scale_steps"


class LossScale:
    """`torch.amp.GradScaler` (Micikevicius et al., arXiv 1710.03740), with no number that the host has to wait for.

    The loss is multiplied by the scale. Gradients that overflow by it are left out, and the scale is halved; it is
    doubled after some steps without.

    Args:
        device: device of the gradients.

    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL, device=device)
        """Factor of the next loss, a scalar on the device."""
        self._steps = torch.zeros((), dtype=torch.int32, device=device)
        """Steps since the scale was changed."""
        self.interval = INTERVAL

    def unscale(self, parameters: Iterable[Tensor], times: int = 1) -> None:
        """Divide gradients by the scale, and multiply them by this."""
        inverse = (self.scale.double().reciprocal() * times).float()
        ignored = torch.zeros((), device=self.scale.device)
        groups: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                groups.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in groups.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, ignored, inverse)

    def update(self, overflows: Tensor) -> None:
        """Change the scale after a gradient.

        Args:
            overflows: float32 scalar on the device: 0 if the gradient was finite, otherwise 1.

        """
        torch._amp_update_scale_(self.scale, self._steps, overflows, GROWTH, BACKOFF, self.interval)

    @contextmanager
    def without(self) -> Iterator[None]:
        """Context in which losses aren't scaled."""
        scale = self.scale.clone()
        self.scale.fill_(1.0)
        try:
            yield
        finally:
            self.scale.copy_(scale)

    def state(self) -> Flat:
        """Copy what a successor needs."""
        return {name: tensor.reshape(1).cpu().numpy().copy() for name, tensor in self._tensors().items()}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from what `state` gave; what isn't there stays as it is."""
        for name, tensor in self._tensors().items():
            if name in state:
                tensor.copy_(torch.from_numpy(np.array(state[name])).reshape(()))

    def _tensors(self) -> dict[str, Tensor]:
        return {_SCALE: self.scale, _STEPS: self._steps}
