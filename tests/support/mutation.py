"""A module with one defect: its source with one place changed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def mutated(module: ModuleType, name: str, edits: dict[str, tuple[str, str]]) -> Any:
    """The module with the defect of that name, of which `edits` has the old text and the new one."""
    old, new = edits[name]
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{name}: its place is gone, or isn't unique"
    called = f"mutant_{len(sys.modules)}"
    damaged = sys.modules[called] = ModuleType(called)  # Dataclasses look their module up.
    exec(compile(source.replace(old, new), called, "exec"), damaged.__dict__)
    return damaged
