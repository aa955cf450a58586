"""Device and random numbers of a process that trains."""

from __future__ import annotations

import random

import numpy as np
import torch


def device_of(wish: str) -> torch.device:
    """Return the device that `worker.device` names; with `auto` a GPU if there is one."""
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wish)


def seed_all(*entropy: int) -> None:
    """Let all that a model draws depend on these numbers alone from here on: some draw from numpy or Python."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed)  # the generator that models use
    random.seed(seed)
