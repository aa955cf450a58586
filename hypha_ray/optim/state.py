"""A worker's inner state as arrays, by which a successor goes on to the bit as if nothing had happened.

It is the optimizer's state, and nothing else: the weights of a round come from the server, places in the schedules
follow from the round, and random numbers from seed, round and worker. Keys are ``optimizer/parameter/name``, such as
``0/17/exp_avg``, both counted as torch does. bfloat16, which numpy lacks, travels as its bits in uint16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hypha_ray.errors import CheckpointError
from hypha_ray.model.flat import Array
from hypha_ray.model.layout import array_of, tensor_of
from hypha_ray.optim.optimizers import Inner
from hypha_ray.types import Flat


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
