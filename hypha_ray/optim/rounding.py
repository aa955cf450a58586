"""Steps on weights of bfloat16 that are computed in float32 and rounded at random, so that none is lost on average.

Stochastic rounding (Zamirai et al., arXiv 2010.06192): a value between two neighbours becomes one of them, with the
probabilities by which the mean of the results is the value itself. The nearest one would be the old weight in most
steps, since bfloat16 has 8 bits of mantissa.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
