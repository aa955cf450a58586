"""Results of inner steps, which a device may not have finished yet, and the inner state of a worker as arrays.

host      begin 1   begin 2   begin 3   read 1   begin 4   read 2 …
device    ──── step 1 ────►──── step 2 ────►──── step 3 ────►

The state is that of the optimizer, from which a successor goes on to the bit. The weights of a round come from the
server, positions in the schedules follow from the round, and random numbers from seed, round and worker. Keys are
``optimizer/parameter/name``, such as ``0/17/exp_avg``, both counted as torch does. Plain numbers, as some optimizers
count steps, have ``:number`` behind the name. numpy lacks bfloat16, whose bits travel as uint16.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.model.flat import Array, Groups
from hypha_ray.model.layout import array_of, gather, scatter, tensor_of
from hypha_ray.optim.optimizers import Inner
from hypha_ray.types import Flat, Layout, PromptsOfResponder, Samples, Sums

_NUMBER = ":number"
"""End of the key of a state that is no tensor but a number."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a batch, with tensors on the device that aren't waited for."""

    loss: torch.Tensor
    """Mean loss over the scored positions."""
    scored: int
    """Number of scored positions; with 0 the batch has changed nothing."""
    norm: torch.Tensor
    """L2 norm of the gradients before clipping."""
    tokens: int | None = None
    """Number of tokens without padding; None for data without tokens."""
    sums: Sums = field(default_factory=dict)
    """Further figures of the batch."""
    figures: torch.Tensor | None = None
    """Sums and weights of further figures, which aren't named yet, [figures, 2]; None without them."""
    bad: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 3), np.int64))
    """Keys, as `Samples.keys`, of samples that were left out because loss or gradient weren't finite."""
    shown: tuple[Mapping[str, Any], ...] = ()
    """Records of a few responses, to be shown."""
    revived: tuple[int, ...] = ()
    """Numbers of the model workers that have died and were replaced since the batch before."""
    problems: tuple[str, ...] = ()
    """Lines for the user about failures that didn't stop the training."""
    disabled: tuple[str, ...] = ()
    """Names of settings that were chosen automatically and failed, and are disabled since."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds of parts of the step, by the names of figures."""
    responders: tuple[PromptsOfResponder, ...] = ()
    """Prompts of the batch by the process that responded to them, if others than the worker may."""
    extra: int = 0
    """Number of samples that were used beside those of the batch: the next ones of the round."""


class PendingStep(Protocol):
    """Step that was begun."""

    @property
    def ready(self) -> bool:
        """Whether `result` waits for nothing."""

    def result(self) -> Step:
        """Return the result of the step, with tensors on the CPU if it was read; the first call may do work."""


class FinishedStep:
    """Step whose result is known."""

    ready = True

    def __init__(self, step: Step) -> None:
        self._step = step

    def result(self) -> Step:
        """Return the result."""
        return self._step


class Reading(Protocol):
    """Numbers on their way from a device to the host."""

    @property
    def arrived(self) -> bool:
        """Whether the numbers are there."""

    def numbers(self) -> Tensor:
        """Return the numbers, on the CPU, once they are there."""


class CudaReading:
    """Copy of a few numbers, of shape [n], into pinned memory, after all earlier work of the device."""

    def __init__(self, figures: Tensor) -> None:
        self._numbers = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
        self._numbers.copy_(figures, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(figures.device))

    @property
    def arrived(self) -> bool:
        """Whether the device has done the copy."""
        return bool(self._event.query())

    def numbers(self) -> Tensor:
        """Return the numbers, once the device has done the copy."""
        self._event.synchronize()
        return self._numbers


def reading_from(device: torch.device) -> Callable[[Tensor], Reading] | None:
    """Return a function that begins to read numbers from a device; None if a read waits for nothing, as on a CPU."""
    return CudaReading if device.type == "cuda" else None


class ReadStep:
    """Step whose figures are read from a device."""

    def __init__(self, reading: Reading, finish: Callable[[Tensor], Step]) -> None:
        self._reading = reading
        self._finish = finish
        self._step: Step | None = None

    @property
    def ready(self) -> bool:
        """Whether the figures are there."""
        return self._reading.arrived

    def result(self) -> Step:
        """Return the result, which is made once."""
        if self._step is None:
            self._step = self._finish(self._reading.numbers())
        return self._step


def export_state(inner: Inner) -> Flat:
    """Copy the state of all optimizers into fresh arrays; what is None is left out.

    Raises:
        ConfigError: OPT009, a state is neither a tensor nor a number.

    """
    arrays: Flat = {}
    for optimizer_number, optimizer in enumerate(inner.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if value is not None:
                    key, array = _named_array(name, value)
                    arrays[f"{optimizer_number}/{index}/{key}"] = array
    return arrays


def _named_array(name: str, value: Any) -> tuple[str, Array]:
    """Return the end of the key of a value of an optimizer's state, and its array.

    Raises:
        ConfigError: OPT009.

    """
    if isinstance(value, torch.Tensor):
        return name, array_of(value, copy=True)
    if isinstance(value, int | float):
        return f"{name}{_NUMBER}", np.array(value)
    problem = f"inner_optimizer.name: the state {name} of the optimizer can't be saved with the run"
    fix = "keep it in a tensor, or choose another optimizer"
    raise ConfigError("OPT009", problem, type(value).__name__, "tensors and numbers", fix)


def load_state(inner: Inner, arrays: Mapping[str, Array]) -> None:
    """Copy the result of `export_state` into the optimizers. Learning rates and decays don't change.

    Raises:
        CheckpointError: the state is that of another model or another optimizer; nothing is changed then.

    """
    parameters = [_parameters(optimizer) for optimizer in inner.optimizers]
    states = [dict[int, dict[str, torch.Tensor | float]]() for _ in inner.optimizers]
    for key, array in arrays.items():
        optimizer_number, index, name = key.split("/", 2)
        try:
            value = _value(name, array, parameters[int(optimizer_number)][int(index)])
        except (IndexError, ValueError) as error:
            problem = "the inner state doesn't fit the model and inner_optimizer"
            raise CheckpointError("OPT005", problem, f"{key} of shape {array.shape}") from error
        values = states[int(optimizer_number)].setdefault(int(index), {})
        values[name.removesuffix(_NUMBER)] = value
    for optimizer, state in zip(inner.optimizers, states, strict=True):
        put_state(optimizer, state)


def put_state(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, torch.Tensor | float]]) -> None:
    """Set an optimizer's state by the indices of its parameters; all tensors keep their dtypes.

    Torch would cast floats to the dtype of their parameter, which changes the value of a running product.
    """
    groups: Any = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    parameters = _parameters(optimizer)
    for index, values in state.items():
        loaded_state = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and loaded_state[name].dtype != value.dtype:
                loaded_state[name] = value.to(loaded_state[name].device)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return an optimizer's parameters in the order of torch's indices."""
    parameters: list[torch.nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def _value(name: str, array: Array, parameter: torch.nn.Parameter) -> torch.Tensor | float:
    """Return a value of a parameter's state: a number, or a tensor as `_tensor` makes it."""
    if name.endswith(_NUMBER):
        number: float = array.item()
        return number
    return _tensor(array, parameter)


def _tensor(array: Array, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Copy an array of a parameter's state into a tensor, with the parameter's memory format if shapes are equal.

    Raises:
        ValueError: the array is neither of the parameter's shape, nor a scalar, nor a row or column as in Adafactor.

    """
    sizes = zip(reversed(array.shape), reversed(parameter.shape), strict=False)
    if array.ndim > parameter.ndim or any(size not in (1, full) for size, full in sizes):
        raise ValueError("the shape of another parameter")
    source = tensor_of(array)
    if source.shape != parameter.shape or parameter.ndim == 0:
        return source.clone()
    return torch.empty_like(parameter, requires_grad=False).copy_(source)


class WholeModel:
    """Base class of trainers that have all weights and the whole state of the optimizer in their process."""

    model: torch.nn.Module
    optimizer: Inner

    @abstractmethod
    def step(self, batch: Samples) -> Step:
        """Take one inner step."""

    def begin_step(self, batch: Samples) -> PendingStep:
        """Take one inner step at once."""
        return FinishedStep(self.step(batch))

    def gather(self, layout: Layout, fragment: int, out: Flat | None = None, gradients: bool = False) -> Flat:
        """Copy a fragment out of the model, as `model.layout.gather`."""
        return gather(self.model, layout, fragment, out, gradients)

    def scatter(self, layout: Layout, fragment: int, flat: Groups, mixing: float = 0.0) -> None:
        """Copy a fragment's arrays into the model, as `model.layout.scatter`."""
        scatter(self.model, layout, fragment, flat, mixing)

    def optimizer_state(self) -> Flat:
        """Copy the optimizer's state, as `export_state`."""
        return export_state(self.optimizer)

    def load_optimizer_state(self, state: Mapping[str, Array]) -> None:
        """Copy a result of `optimizer_state` into the optimizer.

        Raises:
            CheckpointError: as `load_state`.

        """
        load_state(self.optimizer, state)
