"""Inner state of a worker as arrays, and the base class of trainers that have all of it.

It is the state of the optimizer, from which a successor goes on to the bit. The weights of a round come from the
server, positions in the schedules follow from the round, and random numbers from seed, round and worker. Keys are
``optimizer/parameter/name``, such as ``0/17/exp_avg``, both counted as torch does. numpy lacks bfloat16, whose bits
travel as uint16.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from hypha_ray.errors import CheckpointError
from hypha_ray.model.flat import Array, Groups
from hypha_ray.model.layout import array_of, gather, scatter, tensor_of
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.step import FinishedStep, PendingStep, Step
from hypha_ray.types import Flat, Layout, Samples


def export_state(inner: Inner) -> Flat:
    """Copy the state of all optimizers into fresh arrays."""
    arrays: Flat = {}
    for number, optimizer in enumerate(inner.optimizers):
        for index, tensors in optimizer.state_dict()["state"].items():
            for name, tensor in tensors.items():
                if tensor is not None:
                    arrays[f"{number}/{index}/{name}"] = array_of(tensor, copy=True)
    return arrays


def load_state(inner: Inner, arrays: Mapping[str, Array]) -> None:
    """Copy the result of `export_state` into the optimizers. Learning rates and decays don't change.

    Raises:
        CheckpointError: the state is that of another model or another optimizer; nothing is changed then.

    """
    parameters = [_parameters(optimizer) for optimizer in inner.optimizers]
    states = [dict[int, dict[str, torch.Tensor]]() for _ in inner.optimizers]
    for key, array in arrays.items():
        number, index, name = key.split("/")
        try:
            tensor = _tensor(array, parameters[int(number)][int(index)])
        except (IndexError, ValueError) as error:
            problem = "the inner state doesn't fit the model and inner_optimizer"
            raise CheckpointError("OPT005", problem, f"{key} of shape {array.shape}") from error
        tensors = states[int(number)].setdefault(int(index), {})
        tensors[name] = tensor
    for optimizer, state in zip(inner.optimizers, states, strict=True):
        put_state(optimizer, state)


def put_state(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    """Set an optimizer's state by the indices of its parameters; all tensors keep their dtypes.

    Torch would cast floats to the dtype of their parameter, which changes the value of a running product.
    """
    groups: Any = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    parameters = _parameters(optimizer)
    for index, tensors in state.items():
        loaded = optimizer.state[parameters[index]]
        for name, tensor in tensors.items():
            if loaded[name].dtype != tensor.dtype:
                loaded[name] = tensor.to(loaded[name].device)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return an optimizer's parameters in the order of torch's indices."""
    parameters: list[torch.nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


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
