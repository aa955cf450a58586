"""Names of the page that leads through the kernel are names of the code."""

from __future__ import annotations

import ast
import re

from tests.support.density import KERNEL, PACKAGE, ROOT

PAGE = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+\.py)(?:::([\w.]+))?`")


def definitions(tree: ast.Module) -> set[str]:
    """Functions and classes of a module, and methods as `Class.method`."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_files_and_names_of_the_page_are_there() -> None:
    missing: list[str] = []
    for file, definition in NAMED.findall(PAGE):
        path = next((path for path in (PACKAGE / file, ROOT / file) if path.is_file()), None)
        if path is None:
            missing.append(file)
        elif definition and definition not in definitions(ast.parse(path.read_text(encoding="utf-8"))):
            missing.append(f"{file}::{definition}")
    assert len(NAMED.findall(PAGE)) > 50
    assert missing == []


def test_every_folder_of_the_kernel_has_a_stop() -> None:
    stops = PAGE.partition("## The stops")[2].partition("## Where")[0]
    files = {file for file, _ in NAMED.findall(stops)}
    assert [room for room in KERNEL if not any(file.startswith(room) for file in files)] == []
