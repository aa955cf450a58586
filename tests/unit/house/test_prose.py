"""The rules of docs/development.md about docstrings and pages, as far as a program can check them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.prose import CODE, LONGEST_SENTENCE, PAGES, ROOT, offences, page_offences


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
def test_docstrings_keep_the_rules_of_prose() -> None:
    assert [f"{name(path)}:{offence}" for path in CODE for offence in offences(path)] == []


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_pages_call_a_process_it(path: Path) -> None:
    assert page_offences(path) == []


def found(docstring: str, folder: Path, signature: str = "def function() -> int") -> list[str]:
    file = folder / "module.py"
    file.write_text(f'"""Module."""\n\n\n{signature}:\n    """{docstring}"""\n', encoding="utf-8")
    return offences(file)


@pytest.mark.parametrize(
    ("docstring", "offence"),
    [
        ("What a reduction goes by.", "begins with 'What'"),
        ("Whether the round is over.", "begins with 'Whether'"),
        ("Bytes that nobody reads.", "'nobody' of a process"),
        ("Bytes.\n\n    Returns:\n        whoever comes first.\n    ", "'whoever' of a process"),
        ("Weights" + " and weights" * 12 + " again.", "26 words in a sentence"),
        (
            "Weights.\n\n    Args:\n        theta: weights" + " and weights" * 12 + "\n            again.\n    ",
            "26 words",
        ),
    ],
)
def test_docstring_that_breaks_a_rule_is_listed(docstring: str, offence: str, tmp_path: Path) -> None:
    [line] = found(docstring, tmp_path)
    assert offence in line


@pytest.mark.parametrize(
    "docstring",
    [
        "Rules of a reduction.",
        "Weights" + " and weights" * 12 + ".",
        "Weights" + " and weights" * 12 + ". Weights" + " and weights" * 12 + ".",
        "Weights, as in `one code span" + " of many words" * 20 + "`.",
        "A list:\n\n    - weights" + " and weights" * 10 + "\n    - weights" + " and weights" * 10 + "\n    ",
        "A picture::\n\n        worker" + " ──► worker" * 30 + "\n    ",
    ],
)
def test_docstring_that_keeps_the_rules_is_not_listed(docstring: str, tmp_path: Path) -> None:
    assert found(docstring, tmp_path) == []


def test_whether_is_allowed_of_a_yes_or_no(tmp_path: Path) -> None:
    assert found("Whether the round is over.", tmp_path, "def over() -> bool") == []


def test_attribute_without_a_noun_and_comment_about_a_person_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""Module."""\n\nSTEPS = 3\n"""Of a round."""\n# Nobody waits.\n', encoding="utf-8")
    assert [line.split(":")[0] for line in offences(file)] == ["4", "5"]


def test_longest_sentence_is_what_the_rules_say() -> None:
    assert f"at most {LONGEST_SENTENCE} words" in (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
