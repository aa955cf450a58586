"""House rules, so that the package stays readable in a day."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE = sorted(path for room in ("hypha_ray", "jobs", "tools") for path in (ROOT / room).rglob("*.py"))
PYTHON = CODE + sorted((ROOT / "tests").rglob("*.py"))
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|x" + r"fail|X" + r"XX)\b")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_modules_have_at_most_450_lines() -> None:
    lengths = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in CODE}
    assert {path: length for path, length in lengths.items() if length > 450} == {}


@pytest.mark.slow
def test_modules_say_what_they_are() -> None:
    assert [name(path) for path in CODE if not ast.get_docstring(syntax(path))] == []


def test_folders_have_at_most_twenty_modules() -> None:
    """The scripts in jobs/ are commands: their places are their names."""
    folders = Counter(path.parent for path in CODE if path.name != "__init__.py" and path.parent != ROOT / "jobs")
    assert {name(folder): count for folder, count in folders.items() if count > 20} == {}


def test_constants_stand_above_functions_and_classes() -> None:
    """One may follow a function or class that its value needs, directly or by such a constant."""
    late: list[str] = []
    for path in CODE:
        below: set[str] = set()
        for node in syntax(path).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                below.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value and below:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {target.id for target in targets if isinstance(target, ast.Name)}
                needed = {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
                if needed & below:
                    below |= names
                elif names and names != {"__all__"}:
                    late.append(f"{name(path)}:{node.lineno}")
    assert late == []


@pytest.mark.slow
def test_functions_have_at_most_fifty_lines() -> None:
    long: dict[str, int] = {}
    for path in CODE:
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 50:
                    long[f"{name(path)}:{node.name}"] = length
    assert long == {}


def test_nothing_is_left_unfinished() -> None:
    unfinished = [
        f"{name(path)}: {line}"
        for path in PYTHON + PAGES
        for line in path.read_text(encoding="utf-8").splitlines()
        if UNFINISHED.search(line)
    ]
    assert unfinished == []


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_in_the_docs_lead_somewhere(path: Path) -> None:
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        page = path.parent / target
        assert page.exists(), target
        if anchor:
            headings = HEADING.findall(page.read_text(encoding="utf-8"))
            assert anchor in {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_docs_name_only_jobs_and_targets_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    files = set(re.findall(r"\bjobs/[\w/]+\.(?:py|sh|toml)\b", text))
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)`", text)) <= targets


def test_make_help_lists_every_target() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    targets = [line for line in lines if re.match(r"[a-z]+:", line)]
    assert targets
    assert [line for line in targets if "## " not in line] == []


def test_both_ignore_files_are_the_same() -> None:
    """What git doesn't keep isn't sent to a cluster with a job either."""
    assert (ROOT / ".gitignore").read_text(encoding="utf-8") == (ROOT / ".rayignore").read_text(encoding="utf-8")


def test_every_fault_in_the_docs_has_a_test() -> None:
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    folders = {"": "unit", "c/": "cluster", "j/": "jobs"}
    named = re.findall(r"`(c/|j/|)((?:\w+/)?test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 40
    files = [(ROOT / "tests" / folders[folder] / file, test) for folder, file, test in named]
    assert [(file.name, test) for file, test in files if f"def {test}(" not in file.read_text(encoding="utf-8")] == []
    rows = [int(number) for number in re.findall(r"^\| F(\d+) \|", text, re.MULTILINE)]
    assert len(rows) >= 47
    assert rows == list(range(1, len(rows) + 1))


def test_decisions_know_no_wall_clock() -> None:
    """Clocks of machines differ and jump; only labels may come from them."""
    rooms = ("scheduler", "worker", "server", "market", "data", "codec")
    wall = re.compile(r"\btime\.time\(|\bdatetime\b(?! import timedelta\n)|\btime_ns\(|\blocaltime\(")
    files = [file for room in rooms for file in (ROOT / "hypha_ray" / room).rglob("*.py")]
    assert [name(file) for file in files if wall.search(file.read_text(encoding="utf-8"))] == []
