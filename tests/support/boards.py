"""Boards of docs/grafana, and their queries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "grafana"


def boards() -> list[dict[str, Any]]:
    """All boards."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))]


def expressions() -> Iterator[tuple[str, str]]:
    """Queries of all panels, each with the panel's title."""
    for board in boards():
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield panel["title"], target["expr"]
