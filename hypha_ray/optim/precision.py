"""Training in 16 bits: scale of the loss for float16, and stochastic rounding of weights for bfloat16."""

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


TOGETHER = 1 << 20
"""Most elements that are widened at once: what is more gains nothing by company, and takes memory."""
_LEFT_OUT = 16
"""Bits of a float32 that bfloat16 lacks."""


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Round float32 values to bfloat16 at random, by torch's generator of their device.

    Values of bfloat16 stay as they are, and so do infinities.
    """
    bits = values.view(torch.int32)
    noise = torch.randint_like(bits, 1 << _LEFT_OUT)
    return noise.add_(bits).bitwise_and_(-1 << _LEFT_OUT).view(torch.float32).to(torch.bfloat16)


def step_rounded(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer's step, which computes in float32 if parameters are of bfloat16.

    Their running averages are of bfloat16, too, and rounded in the same way. Gradients are left as they are.
    """
    found = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    gradients = [parameter.grad for parameter in found]
    for parameter in found:
        parameter.grad = None
    for members in _companies(found):
        with _widened(optimizer, [found[place] for place in members], [gradients[place] for place in members]):
            optimizer.step()
    for parameter, gradient in zip(found, gradients, strict=True):
        parameter.grad = gradient


def _companies(parameters: list[torch.Tensor]) -> Iterator[list[int]]:
    """Places of parameters that are stepped on together, in order."""
    members = list[int]()
    size = 0
    for place, parameter in enumerate(parameters):
        if members and size + parameter.numel() > TOGETHER:
            yield members
            members = []
            size = 0
        members.append(place)
        size += parameter.numel()
    if members:
        yield members


@contextmanager
def _widened(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], gradients: list[torch.Tensor]
) -> Iterator[None]:
    """Context in which these parameters alone have gradients, and those of bfloat16 are widened with all they have."""
    narrow = [(one, one.data) for one in parameters if one.dtype == torch.bfloat16]
    for parameter, weights in narrow:
        parameter.data = weights.float()
        averages = optimizer.state[parameter]
        averages.update({name: one.float() for name, one in averages.items() if _is_like(one, weights)})
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    yield
    for parameter in parameters:
        parameter.grad = None
    for parameter, weights in narrow:
        weights.copy_(rounded(parameter.data))
        parameter.data = weights
        averages = optimizer.state[parameter]
        averages.update({name: rounded(one) for name, one in averages.items() if _is_like(one, weights, torch.float32)})


def _is_like(value: object, weights: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether a value of the state is a tensor as large as the weights; counters and scales aren't."""
    return isinstance(value, torch.Tensor) and value.dtype == dtype and value.shape == weights.shape != ()
