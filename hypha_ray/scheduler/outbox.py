"""What the scheduler's brain wants done about one event, in order."""

from __future__ import annotations

from typing import Any

from hypha_ray.scheduler import commands as c


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

    def finish(self, error: Exception | None) -> None:
        """End the run, once."""
        if not self.over:
            self.over = True
            self.put(c.Finish(error))
