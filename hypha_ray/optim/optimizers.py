"""Optimizers: they step on a worker's own gradients in DiLoCo, on the mean of all workers' in synchronous training.

A worker's optimizer keeps its state from round to round; see `optim.step` for its export.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hypha_ray.config.keys import choice_remedy
from hypha_ray.config.training import InnerOptimizer
from hypha_ray.errors import ConfigError
from hypha_ray.optim.schedules import build_schedule
from hypha_ray.optim.torch_extras import FleetAdamW, step_rounded
from hypha_ray.plugins import find, is_own, options_of

Parameters = list[torch.nn.Parameter]

EIGHT_BITS = "adamw8bit"
_LEAST_IN_EIGHT_BITS = 4096
_BLOCK = 256
"""Sizes in bitsandbytes: elements of the smallest tensor with averages of 8 bits, and elements that share a scale."""
_FUSED = (torch.optim.Adam, torch.optim.SGD)
"""Classes that compute in one kernel on request; AdamW always does."""
_UNFIT = {"optimizer", "lbfgs", "sparseadam"}
"""Base class, and classes that need several gradients for a step, or sparse ones."""


class Assembly(Protocol):
    """Parts of tensors that several processes share; all of these call the same methods in the same order."""

    def shape_of(self, piece: torch.Tensor) -> torch.Size:
        """Return the shape of the whole tensor, by this process's piece of a parameter."""

    def whole(self, part: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        """Gather a tensor that is divided among the processes as a parameter is."""

    def part(self, tensor: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a whole tensor, divided as a parameter is."""


class Shares(Assembly, Protocol):
    """Parts of a model's parameters that this process has."""

    def piece_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a parameter, on which an optimizer steps."""


class Inner:
    """Inner optimizer of a worker: one or more optimizers of torch, their schedules, and clipping of gradients."""

    def __init__(
        self, optimizers: list[torch.optim.Optimizer], config: InnerOptimizer, total_steps: int | None
    ) -> None:
        self.optimizers = optimizers
        self._clip_norm = config.clip_norm
        self._rounds = config.stochastic_rounding
        self._schedules = [build_schedule(optimizer, config, total_steps) for optimizer in optimizers]
        self.parameters: Parameters = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self.parameters += group["params"]
        self._ramp_step = 0
        self._ramp_steps = 0
        """Steps of a ramp so far, and its length."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step; with muon that of AdamW, to which Muon's is proportional."""
        group = self.optimizers[0].param_groups[0]
        return float(group["lr"]) * self._ramp_factor

    @property
    def rates(self) -> list[list[float]]:
        """Learning rates of the next step, without a ramp, of each group of parameters of each optimizer."""
        rates: list[list[float]] = []
        for optimizer in self.optimizers:
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
        return rates

    def set_rates(self, rates: Sequence[Sequence[float]]) -> None:
        """Make the next step with these learning rates, a result of `rates`."""
        for optimizer, group_rates in zip(self.optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, group_rates, strict=True):
                group["lr"] = rate

    def seek(self, position: float) -> None:
        """Set the position in the schedule, in inner steps from its start, for the next `step`.

        The schedule's `step` isn't used: before the optimizer's first step, as in a worker that joins, torch warns.
        """
        for optimizer, schedule in zip(self.optimizers, self._schedules, strict=True):
            schedule.last_epoch = position  # type: ignore[assignment] # the curves take fractions too
            for group, peak, curve in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
                group["lr"] = float(peak) * curve(position)  # type: ignore[arg-type]

    def scale(self, factor: float) -> None:
        """Make the next step with the peak learning rates times this factor, instead of the schedule's."""
        for optimizer, schedule in zip(self.optimizers, self._schedules, strict=True):
            for group, peak in zip(optimizer.param_groups, schedule.base_lrs, strict=True):
                group["lr"] = float(peak) * factor

    def ramp(self, steps: int) -> None:
        """Warm up linearly to the scheduled learning rates over the next `steps` steps."""
        self._ramp_step = 0
        self._ramp_steps = steps

    @property
    def _ramp_factor(self) -> float:
        """Factor of the scheduled learning rates in the next step."""
        if self._ramp_step >= self._ramp_steps:
            return 1.0
        return (self._ramp_step + 1) / self._ramp_steps

    def norm(self) -> torch.Tensor:
        """Return the L2 norm of the gradients, a scalar on the parameters' device that isn't waited for."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    @property
    def skips(self) -> bool:
        """Whether all optimizers support `skipped` of `step`."""
        return all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in self.optimizers)

    def step(self, norm: torch.Tensor | None = None, skipped: torch.Tensor | None = None) -> None:
        """Clip gradients by their norm, change the parameters, and advance the schedule.

        Args:
            norm: result of `norm`, if it is known.
            skipped: float32 scalar on the device: 1 leaves parameters and state as they are, 0 is a usual step.
                None: they change. Only optimizers with `skips` take it.

        """
        if self._clip_norm is not None:
            if norm is None:
                norm = self.norm()
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self._clip_norm, norm)
        ramp_factor = self._ramp_factor
        for optimizer, schedule in zip(self.optimizers, self._schedules, strict=True):
            if ramp_factor < 1:
                for group in optimizer.param_groups:
                    group["lr"] *= ramp_factor
            with _skipping(optimizer, skipped):
                if self._rounds:
                    step_rounded(optimizer)
                else:
                    optimizer.step()
            schedule.step()
        self._ramp_step += 1

    def reset(self) -> None:
        """Delete all state, as before the first step; positions in the schedules don't change."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def zero_grad(self) -> None:
        """Delete the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


@contextmanager
def _skipping(optimizer: Any, skipped: torch.Tensor | None) -> Iterator[None]:
    """Context in which a step is skipped if `skipped` is 1, by the attributes that `torch.amp` sets for that."""
    if skipped is None:
        yield
        return
    if isinstance(optimizer, torch.optim.SGD):
        _begin_momentum(optimizer)
    optimizer.grad_scale = None
    optimizer.found_inf = skipped
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _begin_momentum(optimizer: torch.optim.SGD) -> None:
    """Set momentum that isn't there to zero; a first step makes the same of it as of none.

    If its first step is skipped, fused SGD keeps momentum that it has allocated and not written (torch 2.13).
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if group["momentum"] and parameter.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def build_optimizer(
    model: torch.nn.Module,
    config: InnerOptimizer,
    total_steps: int | None = None,
    workers: int = 1,
    shards: Shares | None = None,
    fuses: bool = True,
) -> Inner:
    """Build the inner optimizer of a model; frozen parameters are left out.

    * adamw: weight decay on parameters of two and more dimensions only, as GPT-style training and transformers' Trainer
      do: gains and biases have no scale to hold down.
    * muon: Muon for the matrices between embedding and head, AdamW for all else, as its author advises (Jordan 2024;
      in DiLoCo: arXiv 2505.23725); see `muon_weights`.
    * adamw8bit: AdamW with running averages of 8 bits (Dettmers et al., arXiv 2110.02861), by bitsandbytes.
    * sgd: `torch.optim.SGD`, whose weight decay goes through its momentum.
    * a user's own: with the settings of the table that its constructor takes, and its own options.
    * any other: the class of `torch.optim` with that name, with the settings that its constructor takes.

    Args:
        model: model on the device where it will train.
        config: table of the job file.
        total_steps: inner steps that the run is planned to have; None: unknown.
        workers: number of workers that train such a model and merge their results, for K-aware AdamW.
        shards: parts of the parameters, which are stepped on instead; None: parameters are whole.
        fuses: whether Adam and SGD may compute in one kernel on GPUs, which rounds differently.

    Raises:
        ConfigError: the schedule lacks a value, or has values that contradict each other; or no optimizer has the name.

    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained_parameters: list[Any] = list(parameters)
    if shards is not None:
        trained_parameters = list(map(shards.piece_of, parameters))
    if config.name == "adamw":
        return Inner([adamw(trained_parameters, config, workers)], config, total_steps)
    if config.name == EIGHT_BITS:
        check_eight_bits()
        return Inner([_adamw_8bit(trained_parameters, config)], config, total_steps)
    if config.name == "muon":
        pieces = dict(zip(parameters, trained_parameters, strict=True))
        optimizers = find("inner_optimizers", config.name)(model, pieces, config, workers, shards)
        return Inner(optimizers, config, total_steps)
    return Inner([_of_torch(trained_parameters, config, fuses)], config, total_steps)


def build_own(
    name: str, options: Mapping[str, Any] | None, parameters: Any, table: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Build a user's optimizer, with the settings of `table` that its constructor takes, and its own options.

    Raises:
        ConfigError: the class can't be loaded, or an option is wrong.

    """
    optimizer_type = find("inner_optimizers", name)
    arguments = inspect.signature(optimizer_type).parameters
    settings = {key: value for key, value in table.items() if key in arguments}
    checked = options_of("inner_optimizers", name, optimizer_type, options)
    own_options = {} if checked is None else checked.model_dump()
    optimizer: torch.optim.Optimizer = optimizer_type(parameters, **settings, **own_options)
    return optimizer


def check_eight_bits() -> None:
    """Refuse 8-bit AdamW on a machine without bitsandbytes.

    Raises:
        ConfigError: OPT007.

    """
    if importlib.util.find_spec("bitsandbytes") is None:
        problem = f"inner_optimizer.name = {EIGHT_BITS!r} needs bitsandbytes"
        fix = "pip install bitsandbytes, or choose adamw"
        raise ConfigError("OPT007", problem, "it isn't installed", fix=fix)


def eight_bits_bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return the size of 8-bit AdamW's state: two averages of each parameter, with a float32 scale for each block."""
    average_bytes = 0
    for parameter in parameters:
        count = parameter.numel()
        if count < _LEAST_IN_EIGHT_BITS:
            average_bytes += 4 * count
        else:
            blocks = -(-count // _BLOCK)
            average_bytes += count + 4 * blocks
    return 2 * average_bytes


def optimizer_class(name: str) -> Any:
    """Return the class of `torch.optim` with that name, in upper or lower case.

    Raises:
        ConfigError: OPT006, there is no such class that steps on one dense gradient.

    """
    classes: dict[str, Any] = {}
    for member in vars(torch.optim).values():
        if not inspect.isclass(member) or not issubclass(member, torch.optim.Optimizer):
            continue
        key = member.__name__.lower()
        if key not in _UNFIT:
            classes[key] = member
    if name.lower() not in classes:
        names = sorted(classes)
        fix = choice_remedy(name.lower(), " | ".join(names))
        problem = "inner_optimizer.name: torch.optim has no such optimizer"
        raise ConfigError("OPT006", problem, name, ", ".join(names), fix)
    return classes[name.lower()]


def adamw(
    parameters: Iterable[torch.nn.Parameter], config: InnerOptimizer, workers: int
) -> torch.optim.AdamW | FleetAdamW:
    """Build AdamW, in its fused form if that is right, with one pass over memory on CPUs and GPUs; or K-aware AdamW."""
    parameters = list(parameters)
    groups = _decay_groups(parameters, config)
    if config.k_aware:
        return FleetAdamW(groups, config.learning_rate, config.betas, config.epsilon, workers=workers)
    fused = _may_fuse(parameters)
    return torch.optim.AdamW(groups, config.learning_rate, betas=config.betas, eps=config.epsilon, fused=fused)


def _may_fuse(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether fused optimizers are right for parameters: whether all of them are contiguous.

    Fused kernels go through memory and not through indices. A gradient or a loaded average may lie in another order
    than its parameter. Then torch 2.13 refuses it on GPUs, and on CPUs it silently takes numbers of other elements.
    """
    return all(map(torch.Tensor.is_contiguous, parameters))


def _of_torch(parameters: Parameters, config: InnerOptimizer, fuses: bool) -> torch.optim.Optimizer:
    """Build the optimizer that the job file names, with the settings that its constructor takes."""
    table: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.betas,
        "eps": config.epsilon,
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
    }
    if is_own("inner_optimizers", config.name):
        return build_own(config.name, config.name_options, parameters, table)
    optimizer_type = optimizer_class(config.name)
    arguments = inspect.signature(optimizer_type).parameters
    options: dict[str, Any] = {}
    for name, value in table.items():
        # Adafactor has a pair of epsilons: its `eps` isn't that of the table.
        if name in arguments and isinstance(value, tuple) == isinstance(arguments[name].default, tuple):
            options[name] = value
    on_gpus = all(parameter.is_cuda for parameter in parameters)
    if fuses and optimizer_type in _FUSED and on_gpus and _may_fuse(parameters):
        options["fused"] = True
    groups: Any = parameters
    if optimizer_type is torch.optim.Adafactor:
        groups = _groups_of_one_dtype(parameters)
    optimizer: torch.optim.Optimizer = optimizer_type(groups, **options)
    return optimizer


def _groups_of_one_dtype(parameters: Parameters) -> list[dict[str, Any]]:
    """Return groups of parameters of one dtype each.

    Adafactor's first epsilon depends on the dtype. Torch 2.13 takes it from the first parameter of a group for all.
    """
    groups: dict[torch.dtype, Parameters] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return [{"params": members} for members in groups.values()]


def _adamw_8bit(parameters: Iterable[torch.nn.Parameter], config: InnerOptimizer) -> torch.optim.Optimizer:
    """Build AdamW with an 8-bit state for tensors of 4096 elements and more, in blocks with a scale each."""
    from bitsandbytes.optim import AdamW8bit

    groups = _decay_groups(parameters, config)
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, config.learning_rate, config.betas, config.epsilon)
    return optimizer


def _decay_groups(parameters: Iterable[torch.nn.Parameter], config: InnerOptimizer) -> list[dict[str, Any]]:
    """Return groups of parameters with weight decay for matrices alone."""
    groups: dict[float, Parameters] = {}
    for parameter in parameters:
        decay = config.weight_decay if parameter.ndim >= 2 else 0.0
        groups.setdefault(decay, []).append(parameter)
    return [{"params": members, "weight_decay": decay} for decay, members in groups.items()]
