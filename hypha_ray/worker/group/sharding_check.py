"""Check that a model has the same gradient when its blocks are sharded, on a small copy and in one process.

FSDP2 gathers weights in hooks of modules. A model that bypasses the hooks, or changes an output in place, may fail or
compute something else; so each model is tried.
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


def sharding_error(network: Any, why: str) -> ConfigError:
    """Return the error for a model that mayn't be sharded."""
    name = type(network).__name__.removeprefix("FSDP")
    problem = f'worker.sharding = "full": {name} can\'t be shared out to processes'
    return ConfigError("MODEL023", problem, why, fix="leave worker.sharding out, or choose another model")


def _check(worker: Worker, task: Task, network: Any, samples: Samples) -> None:
    reason = _reason_not_to_shard(network)
    if reason is not None:
        raise sharding_error(network, reason)
    set_execution(network, worker)
    network.train(worker.gradient_checkpointing)  # Checkpointing needs the training mode.
    few_samples = choose_samples(task, samples)
    inputs = task.inputs(tensors_of(few_samples), few_samples.keys, MASKING_SEED)
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    _backward(task, network, inputs)
    for name, buffer in network.named_buffers():
        if not torch.equal(buffer, buffers[name]):
            raise sharding_error(network, f"each process would have its own {name}, which a forward pass changes")
    gradients = [parameter.grad for parameter in network.parameters() if parameter.requires_grad]
    network.zero_grad()
    sharded_gradients = _sharded_gradients(task, network, inputs)
    for name, gradient, sharded_gradient in zip(names, gradients, sharded_gradients, strict=True):
        if not _is_close(gradient, sharded_gradient):
            raise sharding_error(network, f"the gradient of {name} is another one")


def _reason_not_to_shard(network: Any) -> str | None:
    """Reason why processes would use different parameters in a step, which FSDP2 can't sum; None without one."""
    for name, value in vars(network.config).items():
        if name.endswith("layerdrop") and value:
            return f"{name} = {value} skips other blocks in each process"
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict) and name.endswith("experts"):
            return f"of {name} each process may use other ones"
    return None


def _sharded_gradients(task: Task, network: Any, inputs: Batch) -> list[torch.Tensor | None]:
    """Return the gradients of a model that is sharded over this process alone."""
    mesh = connect(HashStore(), 0, 1, torch.device("cpu"), _CONNECT_S)
    try:
        shards = Shards(network, mesh)
        _backward(task, network, inputs)
        return [piece.grad for piece in shards.pieces]
    except Exception as error:  # FSDP2 and models raise anything.
        text = " ".join(str(error).split())
        raise sharding_error(network, f"{type(error).__name__}: {text}"[:300]) from error
    finally:
        disconnect()


def _backward(task: Task, network: Any, inputs: Batch) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        compute_losses(task, network, inputs).trained.backward()


def _is_close(gradient: torch.Tensor | None, sharded_gradient: torch.Tensor | None) -> bool:
    if gradient is None or sharded_gradient is None:
        return gradient is sharded_gradient
    largest = 0.0
    if gradient.numel():
        largest = float(gradient.abs().max())
    return torch.allclose(gradient, sharded_gradient, rtol=0, atol=_CLOSE * largest)
