"""Modules of users, in a folder that tests run beside."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_process import ROOT

Written = Callable[[str], str]
"""Function that writes the text of a module, and returns its name."""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    """Writer of modules beside the job, which are forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write(text: str) -> str:
        names.append(f"{tmp_path.name.replace('-', '_')}_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(text, encoding="utf-8")
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


def modules_beside(**texts: str) -> Any:
    """Make a fixture for all tests of a file: modules of a user beside the job, loaded anew by each test."""

    @pytest.fixture(autouse=True)
    def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)

    return beside


def write_examples(folder: Path) -> list[str]:
    """Write the modules of docs/plugins.md into a folder; returns the page's pieces of job files."""
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    for text in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        (folder / re.match(r"# (\w+\.py)\n", text)[1]).write_text(text, encoding="utf-8")
    return re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def install(folder: Path, group: str, name: str, place: str) -> None:
    """Put an entry point where an installed package has it."""
    about = folder / "of_a_test-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: of_a_test\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(f"[hypha_ray.{group}]\n{name} = {place}\n", encoding="utf-8")
