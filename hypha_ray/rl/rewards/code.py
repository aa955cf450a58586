"""Reward of programs: tests that they pass, in a process with limits."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from hypha_ray.rl.rewards.response import Response

_BLOCK = re.compile(r"```[^\n`]+```|(```|(?<![^\n \t])~~~)[ \t]*[{.]?(\w*)[^\n`]*\n(.*?)\1", re.DOTALL)
"""Code within a line, or a block: its fence, its language, and its text."""
_PYTHON = {"python", "python3", "py"}
_GUARD = Path(__file__).with_name("program_guard.py")
_LONGEST_S = 60.0
"""Longest time in seconds of a guard, which limits a program to 10 s, and then removes its files and processes."""

log = logging.getLogger(__name__)


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
    silent = subprocess.DEVNULL
    with subprocess.Popen(
        command, env={}, cwd="/", stdin=pipe, stdout=pipe, stderr=silent, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            process.wait(_LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()  # The program asked to end with it.
        return process.stdout.read()
