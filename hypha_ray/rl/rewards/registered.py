"""Registered reward functions: comparisons of texts, and tests that programs pass in a process with limits.

Spaces at both ends of a response and of an answer don't count. Mathematical answers are compared as expressions, by the
package math-verify.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tempfile
import textwrap
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from hypha_ray.errors import ConfigError, first_line
from hypha_ray.rl.rewards.response import Response

_NUMBER = re.compile(r"(?:(?<![\w.)])[-+−])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")

_BOX = r"\boxed{"
_BRACES = re.compile(r"\\boxed\{|\\\\(?!boxed)|\\[{}]|[{}]")
"""Beginning of a box, or brace; braces with a backslash are characters, and a line break is no backslash."""
log = logging.getLogger(__name__)

_COMMANDS = re.compile(r"\\(text|mathrm|mbox)\{[^{}]*\}|\\(?!boxed)[A-Za-z]+")
"""Commands of LaTeX, whose names and texts don't count as prose."""
_PROSE = re.compile(r"\$|\\[(\[]|\\boxed|####|[A-Za-z]{3}|\d [A-Za-z]+/[A-Za-z]+$")
"""Signs of an answer that isn't mathematics as a whole: marks of formulas, words, and units such as m/s."""

_EXPONENT = re.compile(r"(?<![\w.\\])\d+(?:\.\d+)?[eE][-+]?\d{1,2}(?!\w|\.\d)")
_MIXED = re.compile(r"(?<![\w.,/^}\\])(\d{1,3}) (\d{1,4})/(\d{1,4})(?![\w/^]|\.\d)")
"""Number such as 1e5 or 1 1/2, which the package takes for a product."""
_BLOCK = re.compile(r"```[^\n`]+```|(```|(?<![^\n \t])~~~)[ \t]*[{.]?(\w*)[^\n`]*\n(.*?)\1", re.DOTALL)
"""Code within a line, or a block: its fence, its language, and its text."""
_PYTHON = {"python", "python3", "py"}
_GUARD = Path(__file__).with_name("program_guard.py")
_LONGEST_S = 60.0
"""Longest time in seconds of a guard, which limits a program to 10 s, and then removes its files and processes."""


def exact(response: Response) -> float:
    """Give 1 for the answer and nothing else, ended by the model, otherwise 0."""
    is_equal = response.text.strip() == response.answer.strip()
    return float(response.ended and is_equal)


def positions(response: Response) -> float:
    """Give the share of the answer's characters at the right position; the end counts as one more character.

    It leads a small model to exact answers: a response that is half right gets half of the reward.
    """
    text = response.text.strip()
    answer = response.answer.strip()
    right = sum(character == expected for character, expected in zip(text, answer, strict=False))
    if response.ended and len(text) == len(answer):
        right += 1
    return right / (len(answer) + 1)


def contains(response: Response) -> float:
    """Give 1 if the answer occurs in the response as whole words, otherwise 0; the case of letters counts."""
    answer = re.escape(response.answer.strip())
    return float(re.search(rf"(?<!\w){answer}(?!\w)", response.text) is not None)


def number(response: Response) -> float:
    """Give 1 if the last number of the response equals the last one of the answer, otherwise 0.

    Thousands may be separated by commas; any other comma separates numbers, so ``8,5`` ends in 5. ``72`` equals
    ``72.0``.

    Raises:
        ValueError: there is no number in the answer.

    """
    right = last_number(response.answer)
    if right is None:
        raise ValueError(f"no number in the answer {response.answer[:80]!r}")
    return float(last_number(response.text) == right)


def last_number(text: str) -> Decimal | None:
    """The last decimal number in a text; None without any."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    digits = numbers[-1].replace(",", "")
    try:
        return Decimal(digits.replace("−", "-"))
    except InvalidOperation:
        return None


def boxed(response: Response) -> float:
    r"""Give 1 if the model ended the response, and it has one ``\boxed{…}`` with something in it, otherwise 0."""
    contents = _boxes(response.text)
    if not response.ended or len(contents) != 1:
        return 0.0
    return float(bool(contents[0].strip()))


def _boxes(text: str) -> list[str]:
    """Return the contents of all boxes that are closed and lie in no other one."""
    open_braces: list[int | None] = []  # Where a box's content begins; None for another brace.
    spans: list[tuple[int, int]] = []
    for brace in _BRACES.finditer(text):
        if brace[0] == _BOX:
            open_braces.append(brace.end())
        elif brace[0] == "{":
            open_braces.append(None)
        elif brace[0] == "}" and open_braces:
            begin = open_braces.pop()
            if begin is None:
                continue
            while spans and spans[-1][0] > begin:
                spans.pop()
            spans.append((begin, brace.start()))
    return [text[begin:end] for begin, end in spans]


def length(response: Response) -> float:
    """Subtract up to 1 in the last fifth of the allowed tokens, and 1 for a response that is cut off.

    This is the overlong punishment of DAPO (arXiv 2503.14476).
    """
    if not response.ended:
        return -1.0
    fifth = response.most_tokens / 5
    excess_tokens = len(response.ids) - (response.most_tokens - fifth)
    return min(0.0, -excess_tokens / fifth)  # The largest is 0, and not -0.


def of_environment(response: Response) -> float | None:
    """Give the sum of the rewards that the environment gave for the turns; None if the episode has failed."""
    return response.episode_reward


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
    """Parse a right answer: all of it as mathematics, unless it has marks around its mathematics or is prose."""
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
    whole_number, numerator, denominator = map(int, number.groups())
    if numerator >= denominator:
        return number[0]
    return f"{whole_number * denominator + numerator}/{denominator}"


def _package() -> Any:
    try:
        import math_verify
    except ImportError as error:
        fix = "pip install 'hypha_ray[rl]' on all machines"
        raise ConfigError("RWD004", "reward function math needs the package math-verify", fix=fix) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # The package warns that its limits are off.
    return math_verify


def passes(response: Response) -> float | None:
    """Give 1 if the program in the response passes the tests, which are the answer, otherwise 0.

    The tests are statements of Python that run after the program, in its namespace. Both run in a process with an empty
    environment, in a folder of their own, with limits of time, memory, files and their sizes. What it leaves is killed
    and removed. This keeps mistakes in, and isn't a wall against hostile programs: they run as the user.

    Returns:
        The reward; None if this machine can't start a process or write a file.

    """
    tests = response.answer
    try:
        folder = Path(tempfile.mkdtemp(prefix="hypha-code-"))
        for name, text in (("program.py", _program(response.text)), ("tests.py", tests)):
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
        return float(_verdict(folder) == b"1")
    except OSError as error:
        log.warning("reward function code can't run a program: %s", error)
        return None


def _program(text: str) -> str:
    """Return the last block of Python, or without one the last block of no language, or all of the text."""
    program = text
    program_is_python = False
    for _, language, block in _BLOCK.findall(text):
        if not block:
            continue
        is_python = language.lower() in _PYTHON
        if is_python or (not language and not program_is_python):
            program = block
            program_is_python = is_python
    return textwrap.dedent(program)


def _verdict(folder: Path) -> bytes:
    """Run program and tests of a folder, which the guard removes; return the guard's verdict."""
    command = [sys.executable, "-I", "-S", str(_GUARD), str(folder)]
    pipe = subprocess.PIPE
    no_output = subprocess.DEVNULL
    with subprocess.Popen(
        command, env={}, cwd="/", stdin=pipe, stdout=pipe, stderr=no_output, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            process.wait(_LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()  # The program asked to end with it.
        return process.stdout.read()
