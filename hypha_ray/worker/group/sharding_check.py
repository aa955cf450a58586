"""Check that a model has the same gradient when its blocks are sharded, on a small copy and in one process.

FSDP2 gathers weights in hooks of modules. A model that goes past the hooks, or changes an output in place, may break
under it or compute something else; so each is tried.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hypha_ray.config.tables.resources import Worker
from hypha_ray.errors import ConfigError
from hypha_ray.model.checks.loss_check import choose_samples
from hypha_ray.model.checks.small_copies import Build, check_on_copy
from hypha_ray.model.evaluation import MASKING_SEED, tensors_of
from hypha_ray.model.execution import set_execution
from hypha_ray.model.losses import compute_losses
from hypha_ray.model.tasks.task import Batch, Task
from hypha_ray.types import Samples
from hypha_ray.worker.group.shards import Shards, connect, disconnect

_CLOSE = 1e-5
"""Largest difference of two gradients, relative to the largest value of a tensor's."""
_CONNECT_S = 60.0


def check_sharding_on_copy(
    worker: Worker, task: Task, samples: Samples, config: Any, build: Build, parameters: int
) -> bool:
    """Compare gradients of a small copy with those of its sharded self.

    Args:
        worker: settings by which workers compute.
        task: task from `resolve_task`.
        samples: samples of the dataset.
        config: configuration of the model.
        build: function that makes a model from a configuration.
        parameters: number of the model's parameters.

    Returns:
        Whether a copy could be built and checked.

    Raises:
        ConfigError: MODEL023, the gradients differ, or the sharded copy can't be run.

    """
    return check_on_copy(lambda network: _check(worker, task, network, samples), config, build, parameters)


def refused(network: Any, why: str) -> ConfigError:
    """Return the error for a model that mayn't be sharded."""
    what = f'worker.sharding = "full": {type(network).__name__.removeprefix("FSDP")} can\'t be shared out to processes'
    return ConfigError("MODEL023", what, why, fix="leave worker.sharding out, or choose another model")


def _check(worker: Worker, task: Task, network: Any, samples: Samples) -> None:
    if (why := _varying(network)) is not None:
        raise refused(network, why)
    set_execution(network, worker)
    network.train(worker.gradient_checkpointing)  # Which is for training alone.
    few = choose_samples(task, samples)
    inputs = task.inputs(tensors_of(few), few.keys, MASKING_SEED)
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    _backward(task, network, inputs)
    changed = [name for name, buffer in network.named_buffers() if not torch.equal(buffer, buffers[name])]
    if changed:
        raise refused(network, f"each process would have its own {changed[0]}, which a forward pass changes")
    whole = [one.grad for one in network.parameters() if one.requires_grad]
    network.zero_grad()
    for name, expected, found in zip(names, whole, _sharded(task, network, inputs), strict=True):
        if not _equal(expected, found):
            raise refused(network, f"the gradient of {name} is another one")


def _varying(network: Any) -> str | None:
    """Return why processes would use different parameters in a step, which FSDP2 can't sum up; None if they don't."""
    for name, value in vars(network.config).items():
        if name.endswith("layerdrop") and value:
            return f"{name} = {value} skips other blocks in each process"
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict) and name.endswith("experts"):
            return f"of {name} each process may use other ones"
    return None


def _sharded(task: Task, network: Any, inputs: Batch) -> list[torch.Tensor | None]:
    """Return the gradients of a model that is sharded over this process alone."""
    mesh = connect(HashStore(), 0, 1, torch.device("cpu"), _CONNECT_S)
    try:
        shards = Shards(network, mesh)
        _backward(task, network, inputs)
        return [piece.grad for piece in shards.pieces]
    except Exception as error:  # FSDP2, or the model under it.
        raise refused(network, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]) from error
    finally:
        disconnect()


def _backward(task: Task, network: Any, inputs: Batch) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        compute_losses(task, network, inputs).trained.backward()


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    scale = float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=_CLOSE * scale)
