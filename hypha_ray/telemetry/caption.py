"""Caption of a run's pictures: its name, the date of its start, and its model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hypha_ray.config.load import CONFIG
from hypha_ray.telemetry.sinks.files import Record


def caption_of(folder: Path, first_record: Record) -> str:
    """Return name, date and model of a run, as far as they are known.

    Args:
        folder: directory of the run.
        first_record: a record with the time at which the run began, about.

    """
    parts = [folder.resolve().name]
    date = date_of(first_record)
    if date is not None:
        parts.append(date)
    with suppress(OSError, ValueError):  # It is missing or damaged.
        tables = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        parts.append(model_name(tables))
    return ", ".join(parts)


def date_of(record: Record) -> str | None:
    """Return the day of a record, such as 28 November 2026, in UTC; None if the record doesn't tell it."""
    with suppress(ValueError):
        time = datetime.fromisoformat(str(record.get("wall_time")))
        return f"{time.day} {time:%B %Y}"
    return None


def model_name(tables: Mapping[str, Any]) -> str:
    """Return the name of a job's model: its repository, its factory, or its type."""
    table = tables.get("model", {})
    for key in ("repository", "factory"):
        name = table.get(key)
        if name not in (None, "none"):
            return str(name)
    config = table.get("config") or {}
    model_type = config.get("model_type", "a model")
    return f"{model_type} from random weights"
