"""Every error code has a cause and a remedy, and the page has the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hypha_ray.config.automatic import CARDS, UNLISTED
from hypha_ray.config.entry_point import explanation_of, explanations, explanations_of, renewed
from hypha_ray.config.keys import free_table, keys, schema_path, tables
from hypha_ray.errors import ConfigError

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "errors.md"
CODE = re.compile(r"([A-Z]{2,}\d{3})(?:: |$)")
"""A text that is a code, or a note that begins with one."""
KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+\b")


def codes_of_source() -> set[str]:
    """Codes in texts of the program; GPUs have names of the same form."""
    codes = set()
    for room in ("hypha_ray", "jobs", "tools"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.match(node.value):
                    codes.add(node.value.partition(":")[0])
    return codes - UNLISTED.keys() - {card.name for card in CARDS}


@pytest.mark.slow
def test_table_has_the_codes_of_the_program_and_no_others() -> None:
    codes = codes_of_source()
    assert len(codes) > 200
    assert sorted(codes - explanations().keys()) == [], "give them a cause and a remedy in error_codes.toml"
    assert sorted(explanations().keys() - codes) == []


def test_page_is_made_from_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert renewed(page) == page, "PAGE.write_text(renewed(PAGE.read_text()))"
    assert page.count("\n| ") == len(explanations()) + page.count("\n| code |")


def test_cause_and_remedy_are_sentences_of_their_own() -> None:
    for explanation in explanations().values():
        assert explanation.cause != explanation.remedy
        for text in (explanation.cause, explanation.remedy):
            assert re.fullmatch(r"\S.{9,160}\.", text), text
            assert "  " not in text and "|" not in text


def test_keys_that_explanations_name_are_keys_of_the_job_file() -> None:
    names = {path[0] for path in tables() if path}
    unknown = []
    for explanation in explanations().values():
        for name in KEY.findall(f"{explanation.cause} {explanation.remedy}"):
            path = tuple(name.split("."))
            known = path in keys() or path in tables() or free_table(path) is not None
            is_file = path[-1] in ("md", "py")
            if path[0] in names and not known and not is_file and schema_path(path) not in keys():
                unknown.append(f"{explanation.code}: {name}")
    assert unknown == []


@pytest.mark.parametrize("text", ["CFG004", "cfg004", "error[CFG004]", "error[CFG004]:", " CFG004 "])
def test_code_may_be_given_as_an_error_has_it(text: str) -> None:
    assert explanation_of(text).code == "CFG004"


@pytest.mark.parametrize(("text", "nearest"), [("CGF004", "CFG004"), ("STORE015", "STORE01"), ("AUTH005", "AUTH00")])
def test_unknown_code_names_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match="no such error code") as caught:
        explanation_of(text)
    assert caught.value.code == "CFG003" and nearest in caught.value.fix


def test_text_that_is_like_no_code_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match="give no code for the list"):
        explanation_of("out of memory")


def test_letters_stand_for_all_codes_that_have_them_and_a_code_for_itself() -> None:
    security = [explanation.code for explanation in explanations_of("sec")]
    assert security == [code for code in explanations() if code.startswith("SEC")] and len(security) > 2
    assert [explanation.code for explanation in explanations_of("sec001")] == ["SEC001"]
    with pytest.raises(ConfigError, match="no such error code"):
        explanations_of("S")
