"""Reward of mathematical answers, compared as expressions by the package math-verify."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

from hypha_ray.errors import ConfigError, first_line
from hypha_ray.rl.rewards.response import Response

log = logging.getLogger(__name__)

_COMMANDS = re.compile(r"\\(text|mathrm|mbox)\{[^{}]*\}|\\(?!boxed)[A-Za-z]+")
"""Commands of LaTeX that aren't prose, whatever their names and texts are."""
_PROSE = re.compile(r"\$|\\[(\[]|\\boxed|####|[A-Za-z]{3}|\d [A-Za-z]+/[A-Za-z]+$")
"""Signs of an answer that isn't mathematics as a whole: marks of formulas, words, and units such as m/s."""

_EXPONENT = re.compile(r"(?<![\w.\\])\d+(?:\.\d+)?[eE][-+]?\d{1,2}(?!\w|\.\d)")
_MIXED = re.compile(r"(?<![\w.,/^}\\])(\d{1,3}) (\d{1,4})/(\d{1,4})(?![\w/^]|\.\d)")
"""Number such as 1e5 or 1 1/2, which the package takes for a product."""


def equal(response: Response) -> float | None:
    r"""Give 1 if the last ``\boxed{…}``, or without one the last expression, equals the answer, otherwise 0.

    Comparison may take long, so it runs in a process with a limit. The package's own limits are off, because they work
    by signals, in main threads alone.

    Returns:
        The reward; None for a response that the package fails on.

    Raises:
        ConfigError: RWD004, the package isn't installed.
        ValueError: the answer is no expression.

    """
    package = _package()
    right = _parsed_answer(package, response.answer)
    if not right:
        raise ValueError(f"no expression in the answer {response.answer[:80]!r}")
    try:
        answer = _parsed(package, response.text)
        return float(package.verify(right, answer, timeout_seconds=None))
    except Exception as error:  # The package reads whatever a model writes.
        log.warning("a response has no reward, math-verify fails on it: %s", first_line(error))
        return None


def warm_up() -> None:
    """Load the package and compare once, which takes about a second the first time.

    Raises:
        ConfigError: RWD004, the package isn't installed.

    """
    equal(Response("", "1", (), True, {"answer": "1"}, 1))


def _parsed_answer(package: Any, answer: str) -> Any:
    """Parse a right answer: all of it is mathematics, unless it marks its mathematics itself, or it is prose."""
    texts = [f"${answer}$", answer]
    if _PROSE.search(_COMMANDS.sub("", answer)):
        texts.reverse()
    return _parsed(package, texts[0]) or _parsed(package, texts[1])


def _parsed(package: Any, text: str) -> Any:
    text = _MIXED.sub(_improper, text)
    text = _EXPONENT.sub(lambda number: f"{Decimal(number[0]):f}", text)
    kinds = [package.LatexExtractionConfig(boxed_match_priority=0), package.ExprExtractionConfig()]
    return package.parse(text, extraction_config=kinds, parsing_timeout=None)


def _improper(number: re.Match[str]) -> str:
    """Write a mixed number as one fraction; leave a fraction of 1 or more that stands behind another number."""
    whole, numerator, denominator = map(int, number.groups())
    if numerator >= denominator:
        return number[0]
    return f"{whole * denominator + numerator}/{denominator}"


def _package() -> Any:
    try:
        import math_verify
    except ImportError as error:
        fix = "pip install 'hypha_ray[rl]' on all machines"
        raise ConfigError("RWD004", "reward function math needs the package math-verify", fix=fix) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns of the limits that are off.
    return math_verify
