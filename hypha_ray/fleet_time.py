"""Time of a run's fleet by its use, and the share of it that made useful samples (goodput)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TIME_KINDS = ("training", "barrier", "exchange", "data", "evaluation", "loss", "start")
"""Uses of a worker's time; docs/telemetry.md says what belongs to each."""
_NO_SECONDS = dict.fromkeys(TIME_KINDS, 0.0)


@dataclass(slots=True)
class FleetTime:
    """Seconds of all workers together, and the samples that they could have trained meanwhile."""

    seconds: dict[str, float] = field(default_factory=_NO_SECONDS.copy)
    """Seconds of each of `TIME_KINDS`."""
    possible_samples: float = 0.0
    """Samples of hired workers, had they trained all the time at their own measured speeds."""

    @property
    def total_s(self) -> float:
        """Seconds of all kinds."""
        return sum(self.seconds.values())

    def add(self, other: FleetTime) -> None:
        """Add another time to this one."""
        for use, seconds in other.seconds.items():
            if seconds:
                self.seconds[use] += seconds
        self.possible_samples += other.possible_samples

    def used(self) -> dict[str, float]:
        """Seconds of the kinds that have any."""
        return {use: seconds for use, seconds in self.seconds.items() if seconds > 0}

    def lose_training(self) -> None:
        """Count the training as lost, because its samples don't go into a commit."""
        self.seconds["loss"] += self.seconds["training"]
        self.seconds["training"] = 0.0

    def fields(self) -> dict[str, Any]:
        """Fields of records: `fleet_s`, `time_shares`, None without any time, and `possible_samples`."""
        total_s = self.total_s
        shares: dict[str, float] | None = None
        if total_s > 0:
            shares = {use: seconds / total_s for use, seconds in self.seconds.items()}
        return {"fleet_s": total_s, "time_shares": shares, "possible_samples": self.possible_samples}

    def record(self, samples: int) -> dict[str, Any]:
        """Fields of a round's record, with the goodput of its committed samples."""
        return {**self.fields(), "goodput": goodput(samples, self.possible_samples)}

    @classmethod
    def of_records(cls, records: list[Mapping[str, Any]]) -> FleetTime:
        """Sum of the times in records with such fields; those of other records count as none."""
        total = cls()
        for record in records:
            for use, share in (record.get("time_shares") or {}).items():
                total.seconds[use] += share * record["fleet_s"]
            total.possible_samples += record.get("possible_samples") or 0.0
        return total


def goodput(samples: float, possible_samples: float) -> float | None:
    """Committed samples ÷ those that the fleet could have trained; None if that isn't known."""
    return samples / possible_samples if possible_samples > 0 else None


def training_seconds(rounds: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of training up to the end of each round, by the records of rounds.

    A round begins before its predecessor's weights have reached every worker, so the rounds' own times add up to more.
    A round's own time counts where no growth of `elapsed_s` tells it.
    """
    seconds: list[float] = []
    total_s = 0.0
    before_s = 0.0 if rounds and rounds[0]["round"] == 0 else None
    for record in rounds:
        elapsed_s = record.get("elapsed_s")
        if elapsed_s is None or before_s is None or elapsed_s <= before_s:
            total_s += record.get("time_s") or 0.0
        else:
            total_s += elapsed_s - before_s
        before_s = elapsed_s
        seconds.append(total_s)
    return seconds
