"""A run as an outsider sees it: the files of its directory, each line with the moment at which it was first seen."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaoslab.figures.recovery import Seen

from hypha_ray.telemetry.sinks.files import EVENTS, METRICS


class Tail:
    """Follows a file of JSON lines, also when another file takes its place that has a part of the old lines.

    Args:
        path: may not exist yet.

    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0
        self._digests: set[bytes] = set()

    def new(self) -> list[dict[str, Any]]:
        """Objects of whole lines that have come since the last call; a torn line is passed over."""
        try:
            with self._path.open("rb") as file:
                inode = self._path.stat().st_ino
                if inode != self._inode:
                    self._inode = inode
                    self._offset = 0
                file.seek(self._offset)
                whole_lines, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole_lines) + len(newline)
        records = []
        for line in whole_lines.splitlines():
            record = self._new_record(line)
            if record is not None:
                records.append(record)
        return records

    def _new_record(self, line: bytes) -> dict[str, Any] | None:
        """Parse a line; None if it is no object, or was read before."""
        digest = hashlib.blake2b(line, digest_size=12).digest()
        if digest in self._digests:
            return None
        self._digests.add(digest)
        with suppress(ValueError):
            record = json.loads(line)
            return record if isinstance(record, dict) else None
        return None


class Watch:
    """Everything that was seen of a run, in the order in which it was seen.

    Args:
        run: the run directory; may not exist yet.

    """

    def __init__(self, run: Path) -> None:
        self._folder = run / "commits"
        self._metrics = Tail(run / METRICS)
        self._events = Tail(run / EVENTS)
        self.steps: list[Seen] = []
        self.events: list[Seen] = []
        self.commits: dict[int, float] = {}
        """Rounds, and when their records appeared."""
        self._records: dict[int, bytes] = {}

    def look(self, now: float) -> None:
        """Take in what is new; `now` is monotonic."""
        for round in self._rounds() - self.commits.keys():
            self._records[round] = self._path(round).read_bytes()
            self.commits[round] = now
        for record in self._metrics.new():
            if record.get("kind") == "step":
                self.steps.append(Seen(now, record))
        self.events += [Seen(now, record) for record in self._events.new()]

    def begun(self) -> list[int]:
        """Numbers of the rounds that were begun, as often as they were."""
        planned = [int(event.record["round"]) for event in self.events if event.record.get("kind") == "plan"]
        trained = {int(step.record["round"]) for step in self.steps}
        return planned + sorted(trained - set(planned))

    def taken_back(self) -> list[int]:
        """Rounds whose records were there, and are gone or have changed since."""
        return [round for round, record in self._records.items() if self._read(round) != record]

    def _rounds(self) -> set[int]:
        rounds = set()
        for path in self._folder.glob("round_*.json"):
            match = re.fullmatch(r"round_(\d{6,})\.json", path.name)
            if match:
                rounds.add(int(match[1]))
        return rounds

    def _path(self, round: int) -> Path:
        return self._folder / f"round_{round:06d}.json"

    def _read(self, round: int) -> bytes | None:
        with suppress(OSError):
            return self._path(round).read_bytes()
        return None
