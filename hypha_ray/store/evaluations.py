"""Evaluations of a run, read from its metrics as they grow: the round with the best one, and the newest."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypha_ray.figures import Objective, objective_of

_METRICS = "metrics.jsonl"


class Evaluations:
    """Evaluations in the ``metrics.jsonl`` of a run directory."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / _METRICS
        self._read_bytes = 0
        """Size of the part of the file that was read, which ends with a line."""
        self._records: dict[int, dict[str, Any]] = {}
        """Record of each evaluated round."""

    @property
    def newest(self) -> int | None:
        """The newest round that is evaluated; None before the first."""
        self._read()
        return max(self._records, default=None)

    @property
    def objective(self) -> Objective:
        """Figure by which the evaluations are compared."""
        self._read()
        return objective_of(self._records.values())

    @property
    def best(self) -> dict[str, Any] | None:
        """Record of the best evaluation, the earliest of equal ones; None as long as none has a finite objective."""
        objective = self.objective
        records = []
        for round in sorted(self._records):
            if self._records[round].get(objective.name) is not None:
                records.append(self._records[round])
        if not records:
            return None
        best: dict[str, Any] = objective.best(records, key=lambda record: record[objective.name])
        return best

    def _read(self) -> None:
        """Read the lines that are new since the last call; all lines if the file was cut."""
        try:
            with self._file.open("rb") as file:
                if file.seek(0, 2) < self._read_bytes:
                    self._read_bytes = 0
                    self._records = {}
                file.seek(self._read_bytes)
                lines = file.read().split(b"\n")
        except OSError:
            return
        for line in lines[:-1]:
            self._read_bytes += len(line) + 1
            if b'"eval"' in line:
                self._add_record(line)

    def _add_record(self, line: bytes) -> None:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("kind") == "eval" and isinstance(record.get("round"), int):
                self._records[record["round"]] = record
