"""Class names of the scheduler's side end in a word of the glossary, or in a plain word that needs no explanation."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.prose import CODE, ROOT

GLOSSARY = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8").partition("\n## Glossary\n")[2]
ROOMS = ("scheduler", "driver", "market", "types")
PLAIN = set(
    re.findall(
        r"\w+",
        """
    actor actors book cache client entry error evaluation hashes info log machine metric need outcome pace planner point
    progress queue report resources samples service shortage sizes source state time totals update weights
    assign drain feed finish left lost merge persist ready reduce tick gone alive case
""",
    )
)
PARTICIPLE = re.compile(r"\w+(?:ed|ing)")


def terms() -> set[str]:
    """Last word of every entry."""
    cells = re.findall(r"^\| ([^|]+?) \|", GLOSSARY, flags=re.MULTILINE)
    return {entry.split()[-1] for cell in cells for entry in cell.split(", ")} - {"word"}


def public_classes(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name[0] != "_"]


def head(name: str) -> str:
    """Last word of a class name, in lower case."""
    return str(re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name)[-1]).lower()


CLASSES = [
    (name, path.relative_to(ROOT / "hypha_ray"))
    for path in CODE
    if path.is_relative_to(ROOT / "hypha_ray") and path.relative_to(ROOT / "hypha_ray").parts[0] in ROOMS
    for name in public_classes(path)
]


def test_glossary_has_no_word_twice() -> None:
    cells = re.findall(r"^\| ([^|]+?) \|", GLOSSARY, flags=re.MULTILINE)
    words = [word for cell in cells for word in cell.split(", ")]
    assert len(words) > 40
    assert sorted(words) == sorted(set(words))


def test_classes_are_named_by_words_of_the_glossary() -> None:
    known = terms() | PLAIN
    strange = []
    for name, path in CLASSES:
        word = head(name)
        if word not in known and word.removesuffix("s") not in known and not PARTICIPLE.fullmatch(word):
            strange.append(f"{name} in {path}")
    assert len(CLASSES) > 100
    assert strange == []
