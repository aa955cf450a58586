"""Checks of a model that isn't built, on a small copy of it with random weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.heavy_imports import uncollected
from hypha_ray.model.checks.small_copies import small_copies

BUDGET = 500_000_000
"""Number of parameters of the largest copy that is built."""
SMALL = 3_000_000
"""Number of parameters up to which a model is checked itself, not a smaller copy."""

Build = Callable[[Any], Any]


def check_on_copy(check: Callable[[Any], None], config: Any, build: Build, parameters: int) -> bool:
    """Run a check on the smallest copy that can be built, and that it can be run on.

    Args:
        check: function of a model in evaluation mode; it raises an error of ours if the model is to be refused.
        config: configuration of the model.
        build: function that makes a model from a configuration.
        parameters: number of the model's parameters.

    Returns:
        Whether a copy could be built and checked.

    Raises:
        ConfigError: whatever the check raises, or MODEL017, the model can't be run on the samples.

    """
    copies = iter(()) if parameters <= SMALL else small_copies(config)
    for copy in chain(copies, [config] if parameters <= BUDGET else []):
        with _silent():
            try:
                check(_build(copy, build))
            except HyphaError:
                raise
            except Exception as error:  # The next copy is more like the model itself.
                if copy is config:
                    raise unusable(error) from error
            else:
                return True
    return False


def _build(config: Any, build: Build) -> Any:
    """Build a model with random weights only: the zeros that some families begin with would hide every difference."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build(config).parameters())
    if size > BUDGET:
        raise ValueError(f"{size} parameters")
    with torch.random.fork_rng(devices=[]), uncollected():
        torch.manual_seed(0)
        network = build(config).float().eval()
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.ndim > 1:
                    parameter.add_(torch.randn_like(parameter), alpha=parameter[0].numel() ** -0.5)
    return network


@contextmanager
def _silent() -> Iterator[None]:
    """Silence transformers' remarks about a copy that the user never asked for."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def unusable(failure: Exception) -> ConfigError:
    """Return the error for a model that fails on the dataset's samples."""
    line = f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:300]
    return ConfigError(
        "MODEL017",
        "the model can't be run on samples of the dataset",
        line,
        fix="choose another model or model.type, or prepare the dataset for this one",
    )
