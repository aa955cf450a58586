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
    return {
        f"{number}/{index}/{name}": array_of(tensor, copy=True)
        for number, optimizer in enumerate(inner.optimizers)
        for index, values in optimizer.state_dict()["state"].items()
        for name, tensor in values.items()
        if tensor is not None
    }


def load_state(inner: Inner, arrays: Mapping[str, Array]) -> None:
    """Go on from what `export_state` gave; the arrays are copied. Learning rates and decays stay as they are.

    Raises:
        CheckpointError: the state is that of another model or another optimizer; nothing is changed then.

    """
    parameters = [[p for group in one.param_groups for p in group["params"]] for one in inner.optimizers]
    states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in inner.optimizers]
    for key, array in arrays.items():
        number, index, name = key.split("/")
        try:
            tensor = _tensor(array, parameters[int(number)][int(index)])
        except (IndexError, ValueError) as error:
            what = "the inner state doesn't fit the model and inner_optimizer"
            raise CheckpointError("OPT005", what, f"{key} of shape {array.shape}") from error
        states[int(number)].setdefault(int(index), {})[name] = tensor
    for optimizer, state in zip(inner.optimizers, states, strict=True):
        put_state(optimizer, state)


def put_state(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    """Give an optimizer its state by the numbers of its parameters, each tensor in the dtype that it has.

    Torch casts what is floating to the dtype of its parameter, and a running product of bfloat16 is another number.
    """
    groups: Any = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, tensors in state.items():
        kept = optimizer.state[parameters[index]]
        for name, tensor in tensors.items():
            if kept[name].dtype != tensor.dtype:
                kept[name] = tensor.to(kept[name].device)


def _tensor(array: Array, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a tensor of its own, in memory as its parameter if it has that one's shape.

    Counters are scalars, and Adafactor has rows and columns: what is none of these has another parameter's shape.
    """
    sizes = zip(reversed(array.shape), reversed(parameter.shape), strict=False)
    if array.ndim > parameter.ndim or any(size not in (1, full) for size, full in sizes):
        raise ValueError("the shape of another parameter")
    source = tensor_of(array)
    if source.shape != parameter.shape or parameter.ndim == 0:
        return source.clone()
    return torch.empty_like(parameter, requires_grad=False).copy_(source)


class WholeModel:
    """Base class of trainers whose process has all weights and all of the optimizer's state."""

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
        """Go on from what `optimizer_state` gave.

        Raises:
            CheckpointError: as `load_state`.

        """
        load_state(self.optimizer, state)
