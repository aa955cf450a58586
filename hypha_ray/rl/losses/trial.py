"""Trial of a policy's loss on two short responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hypha_ray.config.tables.rl import RL
from hypha_ray.errors import ConfigError
from hypha_ray.plugins import create
from hypha_ray.rl.losses.token_losses import LossInputs, PolicyLoss, checked

_LOGPROBS = ((-1.0, -0.5, -2.0), (-0.1, -3.0, -1.0))
_ADVANTAGES = ((1.0, 1.0, 1.0), (-0.5, -0.5, -0.5))
_MASK = ((1.0, 1.0, 0.0), (1.0, 1.0, 1.0))


def try_loss(name: str, options: Mapping[str, Any] | None) -> None:
    """Try a loss with and without a reference and a correction.

    Raises:
        ConfigError: RL030, it raises, returns something else, or has no finite gradient.

    """
    loss: PolicyLoss = create("rl_losses", name, options)
    for inputs in _examples():
        result = checked(name, loss, inputs)
        (gradient,) = torch.autograd.grad((result.losses * inputs.mask).sum(), inputs.logprobs)
        if not gradient.isfinite().all():
            what = f"rl.loss {name} can't be trained on"
            fix = "keep logarithms and powers in range"
            raise ConfigError("RL030", what, "a gradient that isn't finite", "finite numbers", fix)


def _examples() -> Iterator[LossInputs]:
    logprobs = torch.tensor(_LOGPROBS)
    for further in (None, logprobs + 0.1):
        yield LossInputs(
            logprobs=logprobs.clone().requires_grad_(),
            old_logprobs=logprobs - 0.2,
            behaviour_logprobs=logprobs - 0.3,
            reference_logprobs=further,
            advantages=torch.tensor(_ADVANTAGES),
            mask=torch.tensor(_MASK),
            correction=None if further is None else further.exp(),
            settings=RL(algorithm="grpo"),
        )
