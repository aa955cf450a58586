"""Additions to torch: a loss scale that the host never waits for, stochastic rounding, and steps on whole groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of mixed precision by their names in a job file."""
TOGETHER = 1 << 20
"""Largest number of elements that are widened at once: more take memory, and aren't faster."""
_DROPPED_BITS = 16
"""Number of a float32's bits that bfloat16 lacks."""


class LossScale:
    """`torch.amp.GradScaler` (Micikevicius et al., arXiv 1710.03740), without a number that the host has to wait for.

    The loss is multiplied by the scale. If gradients overflow, the step is skipped and the scale is halved. After
    `INTERVAL` steps without an overflow it is doubled.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL, device=device)
        """Factor of the next loss, a scalar on the device."""
        self._steps = torch.zeros((), dtype=torch.int32, device=device)
        """Number of steps since the scale was changed."""
        self.interval = INTERVAL

    def unscale(self, parameters: Iterable[Tensor], times: int = 1) -> None:
        """Divide gradients by the scale, and multiply them by `times`."""
        inverse = self.scale.double().reciprocal()
        factor = (inverse * times).float()
        ignored = torch.zeros((), device=self.scale.device)
        groups: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                groups.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in groups.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, ignored, factor)

    def update(self, overflows: Tensor) -> None:
        """Change the scale after a gradient: `overflows` is a float32 scalar, 0 if all was finite, otherwise 1."""
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
        """Copy the state that a successor needs."""
        state: Flat = {}
        for name, tensor in self._tensors().items():
            array = tensor.reshape(1).cpu().numpy()
            state[name] = array.copy()
        return state

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from a result of `state`; a tensor that it lacks stays as it is."""
        for name, tensor in self._tensors().items():
            if name in state:
                array = np.array(state[name])
                tensor.copy_(torch.from_numpy(array).reshape(()))

    def _tensors(self) -> dict[str, Tensor]:
        return {_SCALE: self.scale, _STEPS: self._steps}


def scale_of(autocast: torch.dtype | None, device: torch.device) -> LossScale | None:
    """Return the scale of losses for a dtype of mixed precision; None if that doesn't need one."""
    return LossScale(device) if autocast == torch.float16 else None


def add_gradients(parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Add earlier gradients to those of parameters."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Round float32 values to bfloat16 at random, so that weights lose no small step on average.

    Stochastic rounding (Zamirai et al., arXiv 2010.06192): a value between two neighbours becomes one of them, and the
    mean of the results is the value. By the nearest neighbour most steps would be lost, since bfloat16 has 8 bits of
    mantissa. Values of bfloat16 and infinities don't change. The noise comes from torch's generator of their device.
    """
    bits = values.view(torch.int32)
    noise = torch.randint_like(bits, 1 << _DROPPED_BITS)
    rounded_bits = noise.add_(bits).bitwise_and_(-1 << _DROPPED_BITS)
    return rounded_bits.view(torch.float32).to(torch.bfloat16)


def step_rounded(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer's step, which computes in float32 if parameters are of bfloat16.

    Running averages of such parameters are of bfloat16, too, and rounded in the same way. Gradients don't change.
    """
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameters.append(parameter)
                gradients.append(parameter.grad)
                parameter.grad = None
    for members in _batches(parameters):
        with _widened(optimizer, parameters[members], gradients[members]):
            optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _batches(parameters: list[torch.Tensor]) -> Iterator[slice]:
    """Cut parameters into ranges that are stepped on together, in order."""
    start = 0
    elements = 0
    for index, parameter in enumerate(parameters):
        if index > start and elements + parameter.numel() > TOGETHER:
            yield slice(start, index)
            start = index
            elements = 0
        elements += parameter.numel()
    if parameters:
        yield slice(start, len(parameters))


@contextmanager
def _widened(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], gradients: list[torch.Tensor]
) -> Iterator[None]:
    """Context in which only these parameters have gradients, and bfloat16 parameters and their averages are float32."""
    narrow_parameters = [(parameter, parameter.data) for parameter in parameters if parameter.dtype == torch.bfloat16]
    for parameter, weights in narrow_parameters:
        parameter.data = weights.float()
        state = optimizer.state[parameter]
        for name in _averages(state, weights.shape, torch.bfloat16):
            state[name] = state[name].float()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    yield
    for parameter in parameters:
        parameter.grad = None
    for parameter, weights in narrow_parameters:
        weights.copy_(rounded(parameter.data))
        parameter.data = weights
        state = optimizer.state[parameter]
        for name in _averages(state, weights.shape, torch.float32):
            state[name] = rounded(state[name])


def _averages(state: Mapping[str, object], shape: torch.Size, dtype: torch.dtype) -> list[str]:
    """Return the names of tensors in a parameter's state that have its shape; counters and scales have none."""
    names: list[str] = []
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dtype == dtype and value.shape == shape != ():
            names.append(name)
    return names


class GroupOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that are given by the step of a group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step on all parameters that have a gradient; a closure isn't called."""
        for group in self.param_groups:
            parameters: list[torch.Tensor] = []
            gradients: list[torch.Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameters.append(parameter)
                    gradients.append(parameter.grad)
            if parameters:
                self._step(group, parameters, gradients)

    @abstractmethod
    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None: ...


class FleetAdamW(GroupOptimizer):
    """AdamW with steps as long as on the mean gradient of K workers.

    If gradients are mostly noise, Adam's second moment v is mostly the noise's variance σ². The mean of K gradients has
    a K-th of that variance, so synchronous training takes longer steps at the same rate. Here v is reduced by
    (1 − 1/K) σ², but not below v/K. σ² = (v − m²) / (1 − c) by this worker's own averages, where c is the part of the
    noise that is left in m. With K = 1 this is `torch.optim.AdamW`, and its state has the same names.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        workers: int = 1,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "workers": workers}
        super().__init__(params, options)

    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        rate = group["lr"]
        beta1, beta2 = group["betas"]
        means: list[torch.Tensor] = []
        squares: list[torch.Tensor] = []
        mean_corrections: list[float] = []
        square_corrections: list[float] = []
        reductions: list[float] = []
        for parameter in parameters:
            state = self._state(parameter)
            state["step"] += 1
            steps = int(state["step"])
            means.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
            mean_corrections.append(1 - beta1**steps)
            square_corrections.append(1 - beta2**steps)
            reductions.append(_reduction(group["workers"], beta1, steps))
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        unbiased = torch._foreach_div(means, mean_corrections)
        moment = torch._foreach_div(squares, square_corrections)
        least_moments = torch._foreach_div(moment, group["workers"])
        torch._foreach_mul_(moment, [1 - reduction for reduction in reductions])
        torch._foreach_addcmul_(moment, unbiased, unbiased, reductions)
        torch._foreach_maximum_(moment, least_moments)
        torch._foreach_sqrt_(moment)
        torch._foreach_add_(moment, group["eps"])
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, unbiased, moment, -rate)

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _reduction(workers: int, beta1: float, steps: int) -> float:
    """Return the factor of v − m² by which v is reduced: (1 − 1/K) / (1 − c); 0 in the first step, where c is 1."""
    if steps <= 1:
        return 0.0
    return (1 - 1 / workers) / (1 - _noise_left(beta1, steps))


def _noise_left(decay: float, steps: int) -> float:
    """Return the variance of a corrected running average of independent values, relative to their own variance."""
    return (1 - decay) / (1 + decay) * (1 + decay**steps) / (1 - decay**steps)
