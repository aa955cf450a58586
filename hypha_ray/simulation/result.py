"""Result of a simulated run: times, bytes, utilisation and cost; there is no loss in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hypha_ray.config.cli.output import write_result

HEADLINE = "simulated: times, bytes and costs; no loss curve"
"""First line of every output of a simulation."""
DIGITS = 9
"""Significant digits of numbers in JSON."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Figures of one run. Times in seconds, sizes in bytes."""

    settings: dict[str, Any]
    """The whole scenario, see `Scenario.settings`."""
    rounds: int
    """Number of committed rounds."""
    time_s: float
    """Time from the start to the last commit; the end of the run if there is none."""
    bytes_up: int
    """Bytes of deltas that reached the head."""
    bytes_down: int
    """Bytes of weights that reached workers."""
    bytes_slices: int
    """Bytes of slices that reached workers."""
    utilisation: float
    """Worker time in batches ÷ worker time alive."""
    idle_fraction: float
    """Worker time at the barrier, from the delta to new weights, ÷ worker time alive."""
    goodput: float
    """Committed samples ÷ those of all machines if each trained from its start to the end at its nominal speed."""
    cost: float
    """Sum of price · hours of all leases."""
    samples: int
    """Committed samples."""
    events: dict[str, int]
    """Number of events of the scheduler's log and of failures, by kind."""
    round_s: tuple[float, ...]
    """Time of each round, from its commit back to the one before or the start."""
    round_metrics: tuple[dict[str, Any], ...] = ()
    """Records of rounds as in metrics.jsonl, without figures of a loss."""
    failure: str | None = None
    """Reason of an end before the last round; None if all rounds were committed."""
    notes: tuple[str, ...] = field(default=())
    """Limits of the figures, such as estimated bytes."""

    def as_json(self) -> dict[str, Any]:
        """The figures as plain values, rounded to 9 significant digits, in a fixed order."""
        fields = asdict(self)
        del fields["round_metrics"]
        rounded: dict[str, Any] = _rounded(fields)
        return rounded


def write_rows(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write results as a JSON list, to the file of ``--json``; equal results give equal bytes.

    Raises:
        ConfigError: CFG008, the file can't be written.

    """
    text = json.dumps(rows, indent=2, sort_keys=True, allow_nan=False)
    write_result("--json", file, text + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {str(name): _rounded(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(child) for child in value]
    return value
