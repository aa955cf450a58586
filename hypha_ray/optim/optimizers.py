"""Optimizers: they step on a worker's own gradients in DiLoCo, on the mean of all workers' in synchronous training.

A worker's optimizer keeps its state from round to round and never resets it; see `state` for when that is sent.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hypha_ray.config.tables.training import InnerOptimizer
from hypha_ray.errors import ConfigError
from hypha_ray.optim.group_optimizers import FleetAdamW
from hypha_ray.optim.muon import Assembly, Muon, muon_weights
from hypha_ray.optim.own import build_own
from hypha_ray.optim.precision import step_rounded
from hypha_ray.optim.schedules import build_schedule
from hypha_ray.plugins import is_own

Parameters = list[torch.nn.Parameter]

EIGHT_BITS = "adamw8bit"
_LEAST_IN_EIGHT_BITS = 4096
_BLOCK = 256
"""Elements of the smallest tensor whose averages have 8 bits, and of those that share a scale; of bitsandbytes."""
_FUSED = (torch.optim.Adam, torch.optim.SGD)
"""Classes that compute in one kernel on request; AdamW does so in any case."""
_UNFIT = {"optimizer", "lbfgs", "sparseadam"}
"""The base class, and what wants more than one gradient a step or sparse ones."""


class Shares(Assembly, Protocol):
    """Parts of a model's parameters that this process has."""

    def piece_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the part of a parameter, on which an optimizer steps."""
        ...


class Inner:
    """Optimizers, their schedules, and clipping of gradients, as one.

    Args:
        optimizers: between them they have all trained parameters.
        config: schedule and clipping.
        total_steps: inner steps that the run is planned to have; None: unknown.

    """

    def __init__(
        self, optimizers: list[torch.optim.Optimizer], config: InnerOptimizer, total_steps: int | None
    ) -> None:
        self.optimizers = optimizers
        self._clip_norm = config.clip_norm
        self._rounds = config.stochastic_rounding
        self._schedules = [build_schedule(optimizer, config, total_steps) for optimizer in optimizers]
        self.parameters: Parameters = [
            parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._ramp = 0, 0
        """Steps of a ramp that are taken, and its length."""

    @property
    def learning_rate(self) -> float:
        """Rate of the next step; under muon that of AdamW, to which Muon's own is proportional."""
        return float(self.optimizers[0].param_groups[0]["lr"]) * self._part

    @property
    def rates(self) -> list[list[float]]:
        """Rates of the next step, without those of a ramp, of each group of parameters of each optimizer."""
        return [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in self.optimizers]

    def set_rates(self, rates: Sequence[Sequence[float]]) -> None:
        """Make the next step with these rates, as `rates` gives them."""
        for optimizer, own in zip(self.optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = rate

    def seek(self, position: float) -> None:
        """Go to a place in the schedule, in inner steps from its start; the next `step` is made there.

        By hand: torch warns of a schedule that moves before the first step, as that of a worker that joins late does.
        """
        for optimizer, schedule in zip(self.optimizers, self._schedules, strict=True):
            schedule.last_epoch = position  # type: ignore[assignment] # the curves take fractions too
            for group, peak, curve in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
                group["lr"] = float(peak) * curve(position)  # type: ignore[arg-type]

    def scale(self, factor: float) -> None:
        """Make the next step with the peak rates times this, whatever the schedule says."""
        for optimizer, schedule in zip(self.optimizers, self._schedules, strict=True):
            for group, peak in zip(optimizer.param_groups, schedule.base_lrs, strict=True):
                group["lr"] = float(peak) * factor

    def ramp(self, steps: int) -> None:
        """Let the rates of so many steps from here on grow to those of the schedule, in equal parts."""
        self._ramp = 0, steps

    @property
    def _part(self) -> float:
        """Part of the schedule's rates that the next step has."""
        taken, steps = self._ramp
        return (taken + 1) / steps if taken < steps else 1.0

    def norm(self) -> torch.Tensor:
        """L2 norm of the gradients, a scalar on the parameters' device; not waited for."""
        return torch.nn.utils.get_total_norm([one.grad for one in self.parameters if one.grad is not None])

    @property
    def skips(self) -> bool:
        """Whether all optimizers can leave a step out by a number on the device, as `step` may ask for."""
        return all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in self.optimizers)

    def step(self, norm: torch.Tensor | None = None, skipped: torch.Tensor | None = None) -> None:
        """Clip gradients by their norm, change the parameters, and go on in the schedule.

        Args:
            norm: as `norm` gives it, if it is known.
            skipped: float32 scalar on the device, by which parameters and state stay as they are: 1 if they are to,
                otherwise 0; None: they change. It takes an optimizer that `skips`.

        """
        if self._clip_norm is not None:
            norm = self.norm() if norm is None else norm
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self._clip_norm, norm)
        for optimizer, schedule in zip(self.optimizers, self._schedules, strict=True):
            if (part := self._part) < 1:
                for group in optimizer.param_groups:
                    group["lr"] *= part
            with _skipping(optimizer, skipped):
                if self._rounds:
                    step_rounded(optimizer)
                else:
                    optimizer.step()
            schedule.step()
        self._ramp = self._ramp[0] + 1, self._ramp[1]

    def reset(self) -> None:
        """Forget all state, as before the first step; places in the schedules stay."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


@contextmanager
def _skipping(optimizer: Any, skipped: torch.Tensor | None) -> Iterator[None]:
    """Context in which a step is left out if this is 1, by the attributes through which `torch.amp` asks for that."""
    if skipped is None:
        yield
        return
    optimizer.grad_scale = None
    optimizer.found_inf = skipped
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


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
    * muon: Muon for the matrices between embedding and head, AdamW for the rest, as its author advises (Jordan 2024;
      in DiLoCo: arXiv 2505.23725); see `muon_weights`.
    * adamw8bit: AdamW with running averages of 8 bits (Dettmers et al., arXiv 2110.02861), by bitsandbytes.
    * sgd: `torch.optim.SGD`, whose weight decay goes through its momentum.
    * one that the user brings: with as much of the table as it takes, and its own options.
    * any other: the class of `torch.optim` with that name, with as much of the table as it takes.

    Args:
        model: on the device where it will train.
        config: table of the job file.
        total_steps: inner steps that the run is planned to have; None: unknown.
        workers: how many have such a model and merge their results, for AdamW that is aware of it.
        shards: parts of the parameters, which are stepped on instead; None: parameters are whole.
        fuses: whether Adam and SGD may compute in one kernel on GPUs, whose rounding is another one.

    Raises:
        ConfigError: the schedule lacks a value, or has values that contradict each other; or no optimizer has the name.

    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained: list[Any] = [parameter if shards is None else shards.piece_of(parameter) for parameter in parameters]
    if config.name == "adamw":
        return Inner([_adamw(trained, config, workers)], config, total_steps)
    if config.name == EIGHT_BITS:
        check_eight_bits()
        return Inner([_adamw_8bit(trained, config)], config, total_steps)
    if config.name == "muon":
        pieces = dict(zip(parameters, trained, strict=True))
        return Inner(_muon(model, pieces, config, workers, shards), config, total_steps)
    return Inner([_of_torch(trained, config, fuses)], config, total_steps)


def check_eight_bits() -> None:
    """Refuse 8-bit AdamW on a machine without bitsandbytes.

    Raises:
        ConfigError: OPT007.

    """
    if importlib.util.find_spec("bitsandbytes") is None:
        what = f"inner_optimizer.name = {EIGHT_BITS!r} needs bitsandbytes"
        fix = "pip install bitsandbytes, or choose adamw"
        raise ConfigError("OPT007", what, "it isn't installed", fix=fix)


def eight_bits_bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Size of the state that 8-bit AdamW has for parameters: two averages, with a float32 scale for each block."""
    counts = [parameter.numel() for parameter in parameters]
    blocks = (-(-count // _BLOCK) for count in counts if count >= _LEAST_IN_EIGHT_BITS)
    return 2 * (sum(count * (1 if count >= _LEAST_IN_EIGHT_BITS else 4) for count in counts) + 4 * sum(blocks))


def _alike(value: object, default: object) -> bool:
    """Whether an optimizer means the same by a setting: Adafactor has a pair of epsilons."""
    return isinstance(value, tuple) == isinstance(default, tuple)


def optimizer_class(name: str) -> Any:
    """The class of `torch.optim` with that name, in whatever case.

    Raises:
        ConfigError: OPT006, there is none that steps on one dense gradient.

    """
    found = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind.__name__.lower() not in _UNFIT
    }
    if name.lower() not in found:
        allowed = ", ".join(sorted(found))
        raise ConfigError("OPT006", "inner_optimizer.name: torch.optim has no such optimizer", name, allowed)
    return found[name.lower()]


def _adamw(
    parameters: Iterable[torch.nn.Parameter], config: InnerOptimizer, workers: int
) -> torch.optim.AdamW | FleetAdamW:
    """Build AdamW in its fused form, one pass over memory on CPUs and GPUs alike; or the one that is aware of K."""
    options = _decayed(parameters, config)
    if config.k_aware:
        return FleetAdamW(options, config.learning_rate, config.betas, config.epsilon, workers=workers)
    return torch.optim.AdamW(options, config.learning_rate, betas=config.betas, eps=config.epsilon, fused=True)


def _of_torch(parameters: Parameters, config: InnerOptimizer, fuses: bool) -> torch.optim.Optimizer:
    """Build the class of `torch.optim` that the job file names, with as much of the table as it takes."""
    table: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.betas,
        "eps": config.epsilon,
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
    }
    if is_own("inner_optimizers", config.name):
        return build_own(config.name, config.name_options, parameters, table)
    kind = optimizer_class(config.name)
    takes = inspect.signature(kind).parameters
    options: dict[str, Any] = {n: value for n, value in table.items() if n in takes and _alike(value, takes[n].default)}
    if fuses and kind in _FUSED and all(parameter.is_cuda for parameter in parameters):
        options["fused"] = True
    built: torch.optim.Optimizer = kind(parameters, **options)
    return built


def _adamw_8bit(parameters: Iterable[torch.nn.Parameter], config: InnerOptimizer) -> torch.optim.Optimizer:
    """Build AdamW whose state has 8 bits in tensors of 4096 elements and more, in blocks with a scale each."""
    from bitsandbytes.optim import AdamW8bit

    options = _decayed(parameters, config)
    built: torch.optim.Optimizer = AdamW8bit(options, config.learning_rate, config.betas, config.epsilon)
    return built


def _decayed(parameters: Iterable[torch.nn.Parameter], config: InnerOptimizer) -> list[dict[str, Any]]:
    """Groups of parameters: weight decay is for matrices alone."""
    groups: dict[float, Parameters] = {}
    for parameter in parameters:
        groups.setdefault(config.weight_decay if parameter.ndim >= 2 else 0.0, []).append(parameter)
    return [{"params": members, "weight_decay": decay} for decay, members in groups.items()]


def _muon(
    model: torch.nn.Module,
    pieces: dict[torch.nn.Parameter, Any],
    config: InnerOptimizer,
    workers: int,
    shards: Shares | None,
) -> list[torch.optim.Optimizer]:
    """Build AdamW and Muon for the parameters of a model, of which each has a tensor to step on."""
    taken = muon_weights(model)
    rest = [piece for parameter, piece in pieces.items() if id(parameter) not in taken]
    groups: dict[bool, Parameters] = {}
    for parameter, piece in pieces.items():
        if id(parameter) in taken:
            groups.setdefault(taken[id(parameter)], []).append(piece)
    optimizers: list[torch.optim.Optimizer] = [_adamw(rest, config, workers)] if rest else []
    if groups:
        options = [{"params": members, "sideways": sideways} for sideways, members in groups.items()]
        rate = config.muon_learning_rate
        decay = config.weight_decay
        length = config.muon_step_length
        optimizers.append(Muon(options, rate, weight_decay=decay, length=length, assembly=shards))
    return optimizers
