"""What the scheduler's brain wants done about one event, in order."""

from __future__ import annotations

from typing import Any

from hypha_ray.scheduler import commands as c
from hypha_ray.types import Damaged

NAMED = 8
"""Most samples of a batch that are named one by one."""


class Outbox:
    """Commands, notes for events.jsonl, and the end of the run."""

    def __init__(self) -> None:
        self._commands: list[c.Command] = []
        self.over = False

    def take(self) -> list[c.Command]:
        """Everything that was put in since the last call."""
        commands, self._commands = self._commands, []
        return commands

    def put(self, *commands: c.Command) -> None:
        """Add commands."""
        self._commands += commands

    def note(self, kind: str, now: float, **fields: Any) -> None:
        """Add a line for events.jsonl."""
        self.put(c.Note({"kind": kind, "monotonic_s": now, **fields}))

    def problem(self, text: str, now: float) -> None:
        """Say something to the user that doesn't end the run."""
        self.note("problem", now, text=text)

    def damaged(self, event: Damaged, now: float) -> None:
        """Name samples that can't be trained on."""
        worker = {"worker": event.source.worker, "incarnation": event.source.incarnation}
        for index, sample in event.samples[:NAMED]:
            self.note("damaged", now, **worker, round=event.round, slice=index, sample=sample, whole_batch=event.whole)
        index, sample = event.samples[0]
        more = f" and {len(event.samples) - 1} more" if len(event.samples) > 1 else ""
        left_out = "the batch is skipped" if event.whole else "left out"
        self.problem(f"slice {index}, sample {sample}{more}: no finite loss and gradient, {left_out}", now)

    def finish(self, error: Exception | None) -> None:
        """End the run, once."""
        if not self.over:
            self.over = True
            self.put(c.Finish(error))
