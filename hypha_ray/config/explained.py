"""Cause and remedy of every error code, by the table `error_codes.toml`, as text and for docs/errors.md."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from hypha_ray.errors import ConfigError

_TABLE = Path(__file__).with_name("error_codes.toml")
_BEGIN = "<!-- codes: made by hypha_ray.config.explained -->"
_END = "<!-- end of codes -->"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Meaning of an error code."""

    code: str
    subject: str
    """Subject of all codes with the same letters."""
    cause: str
    """Sentence about the usual cause."""
    remedy: str
    """Sentence about the remedy."""

    def lines(self) -> Iterator[str]:
        """Write the explanation as text."""
        yield f"{self.code}    {self.subject}"
        yield f"cause     {self.cause}"
        yield f"remedy    {self.remedy}"


@cache
def explanations() -> dict[str, Explanation]:
    """Explanations of all codes, in the order of the table."""
    all_codes: dict[str, Explanation] = {}
    for codes in tomllib.loads(_TABLE.read_text(encoding="utf-8")).values():
        subject = codes.pop("title")
        for code, sentences in codes.items():
            all_codes[code] = Explanation(code, subject, sentences["cause"], sentences["remedy"])
    return all_codes


def explanation_of(text: str) -> Explanation:
    """Return the explanation of a code, which may stand as ``error[CODE]`` and in small letters.

    Raises:
        ConfigError: CFG003, there is no such code; the nearest are named.

    """
    all_codes = explanations()
    code = text.strip().upper().removeprefix("ERROR").strip("[]: ")
    if code in all_codes:
        return all_codes[code]
    similar = get_close_matches(code, all_codes, n=3)
    fix = "see docs/errors.md, or give no code for the list"
    if similar:
        listed = " or ".join(similar)
        fix = f"did you mean {listed}?"
    raise ConfigError("CFG003", "there is no such error code", repr(text), "letters and three digits", fix)


def explanations_of(text: str) -> list[Explanation]:
    """Return the explanation of a code, or those of all codes with the given letters, such as CFG.

    Raises:
        ConfigError: CFG003, there is no such code; the nearest are named.

    """
    letters = text.strip().upper()
    family = [explanation for code, explanation in explanations().items() if code.rstrip("0123456789") == letters]
    return family or [explanation_of(text)]


def codes_markdown() -> str:
    """All codes as markdown: a heading and a table for each subject."""
    parts: list[str] = []
    subject = None
    for explanation in explanations().values():
        if explanation.subject != subject:
            subject = explanation.subject
            parts += ["", f"## {subject}", "", "| code | cause | remedy |", "|---|---|---|"]
        parts.append(f"| {explanation.code} | {explanation.cause} | {explanation.remedy} |")
    return "\n".join(parts).strip()


def renewed(document: str) -> str:
    """A markdown document with its list of codes regenerated between the two comments that mark it."""
    block = f"{_BEGIN}\n\n{codes_markdown()}\n\n{_END}"
    pattern = f"{re.escape(_BEGIN)}.*{re.escape(_END)}"
    return re.sub(pattern, lambda _: block, document, flags=re.DOTALL)
