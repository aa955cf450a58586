"""Options of `jobs/chaos.py`. Free of heavy imports: the command line is made from here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hypha_ray.config.keys import choice_remedy
from hypha_ray.errors import ConfigError

ROLES = ("worker", "server", "shard", "scheduler", "store", "telemetry", "node", "driver")
"""Roles that can be killed. The last two aren't actors: a node dies with its processes, a driver is restarted."""


@dataclass
class Options:
    """Train on a local cluster, kill one part after the other, and measure what that costs and whether it heals."""

    mean_rounds_between_kills: float
    """mean time between two kills, in rounds of the calm phase"""
    rounds: int | None = None
    """rounds that are measured under kills; with --kills: as many as they need"""
    roles: str = "worker"
    """what to kill, with commas: worker, server, shard, scheduler, store, telemetry, node, driver"""
    kills: int | None = None
    """kill so often, evenly, each time after the last loss has healed: for recovery times"""
    signal: Literal["kill", "stop", "mixed"] = "kill"
    """SIGKILL, SIGSTOP (not for nodes and drivers), or one of the two by lot"""
    workers: int = 4
    """workers, each on a node of its own"""
    seed: int = 0
    """seed of times, roles and victims"""
    round_seconds: float = 18.0
    """how long a calm round should take, about"""
    calm_rounds: int = 6
    """rounds without kills that are measured first"""
    json: Path | None = None
    """file to write the figures to; -: standard output"""
    out: Path | None = None
    """new folder for dataset, run and logs; default: a temporary one, which is removed if all went well"""

    def check(self) -> None:
        """Refuse what can't be.

        Raises:
            ConfigError: a role is unknown, or a number out of range.

        """
        if unknown := [name for name in self.victims if name not in ROLES]:
            remedy = choice_remedy(unknown[0], " | ".join(ROLES))
            raise ConfigError("CHAOS001", f"--roles: no role {unknown[0]!r}", allowed=", ".join(ROLES), fix=remedy)
        if self.rounds is None and self.kills is None:
            raise ConfigError("CHAOS001", "--rounds or --kills is missing", fix="say when to stop")
        least = {"rounds": 1, "kills": 1, "workers": 1, "seed": 0, "calm_rounds": 1, "round_seconds": 1.0}
        least["mean_rounds_between_kills"] = 0.1 if self.kills is None else 1.0
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and not (minimum <= value < math.inf):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError("CHAOS001", f"{flag} is out of range", str(value), f"{minimum} and up")
        if self.out is not None and self.out.exists() and any(self.out.iterdir()):
            raise ConfigError("CHAOS002", f"--out: {self.out} isn't empty", fix="name a new folder, or remove it")

    @property
    def victims(self) -> tuple[str, ...]:
        """The roles, as a list without repetition."""
        return tuple(dict.fromkeys(name.strip() for name in self.roles.split(",")))

    @property
    def chaos_rounds(self) -> int:
        """Rounds that are measured under kills; evenly spaced kills need their spacing and time to heal, each."""
        if self.rounds is not None:
            return self.rounds
        return math.ceil((self.kills or 0) * (self.mean_rounds_between_kills + 1)) + 2
