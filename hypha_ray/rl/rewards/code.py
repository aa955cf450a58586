"""Reward of programs: tests that they pass, in a process with limits."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path

from hypha_ray.rl.rewards.response import Response

_BLOCK = re.compile(r"```[^\n`]+```|(```|(?<![^\n \t])~~~)[ \t]*[{.]?(\w*)[^\n`]*\n(.*?)\1", re.DOTALL)
"""Code within a line; or a block: its fence, its language, and its text."""
_PYTHON = {"python", "python3", "py"}
_LIMIT_S = 10
"""Longest time of a program, and of its processor."""
_BOOT = f"""
import ctypes, resource, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
limits = {{"CPU": {_LIMIT_S}, "AS": 1 << 30, "FSIZE": 1 << 24, "NOFILE": 64, "CORE": 0}}
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
def run(proof):
    exec(compile(open("program.py", encoding="utf-8").read(), "program.py", "exec"), {{"__name__": "__main__"}})
    print("\\n" + proof)
run(sys.stdin.read())
"""
"""Program that sets the limits of its process, asks to end with its parent, and then runs the file beside it. At the
end it prints a proof that it got there, which no file has."""


def passes(response: Response) -> float:
    """Give 1 if the program in the response passes the tests, which are the answer, otherwise 0.

    The tests are statements of Python behind the program. They run with an empty environment, in a folder of their own,
    with limits of time, memory, files and their sizes. This keeps mistakes in, and isn't a wall against hostile
    programs.
    """
    program, proof = _program(response.text), secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        text = f"{program}\n{response.answer}\n"
        Path(folder, "program.py").write_text(text, encoding="utf-8", errors="replace")
        output = _output(Path(folder), proof)
    return float(output.rstrip().endswith(proof.encode()))  # A program that ends early doesn't get there.


def _program(text: str) -> str:
    """Return the last block of Python, or without one the last block of no language, or all of the text."""
    blocks = [(language.lower(), block) for _, language, block in _BLOCK.findall(text) if block]
    marked = [block for language, block in blocks if language in _PYTHON]
    plain = [block for language, block in blocks if not language]
    return textwrap.dedent((marked or plain or [text])[-1])


def _output(folder: Path, proof: str) -> bytes:
    """Run the program; return the standard output of one that ends well and in time."""
    command = [sys.executable, "-I", "-c", _BOOT]
    silent, pipe = subprocess.DEVNULL, subprocess.PIPE
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(
            command, cwd=folder, env={}, stdin=pipe, stdout=output, stderr=silent, start_new_session=True
        )
        try:
            process.communicate(proof.encode(), _LIMIT_S)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # What it started, too.
        process.wait()
        output.seek(0)
        return output.read() if code == 0 else b""
