"""Place of a sink: the run and the folders that it may write to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Losses(Protocol):
    """Counts of what a destination doesn't get."""

    def wait(self, reason: object, capacity: int) -> None:
        """Say that the destination can't be reached yet, and how many exports wait for it."""

    def began(self) -> None:
        """Say that it can be reached now."""

    def fail(self, reason: object) -> None:
        """Count an export that failed for good."""

    def drop(self, calls: int = 1) -> None:
        """Count exports that couldn't wait any longer."""


@dataclass(frozen=True, slots=True)
class SinkPlace:
    """Place of a sink, which its class is called with."""

    run: str
    """Name of the run."""
    directory: Path
    """The run directory."""
    losses: Losses
    """Counts of what a sink with a queue of its own loses."""
    trackers: Path | None = None
    """Folder that trackers share for all runs; None: the run directory."""
    aim_repository: str | None = None
    """Folder of Aim's repository; None: that of the trackers."""

    @property
    def folder(self) -> Path:
        """Folder for a tracker's files."""
        return self.trackers or self.directory
