"""Generated prompts: problems of digits for a small machine, and tasks of the package reasoning-gym.

    copy3      481=      481        sums          7+5=      12
    reverse3   481=      184        sums2         38+4=     42
    sort3      481=      148        remainders    7+5=      2
    max3       481=      8          remainders2   38+4=     2

The number behind a name is the number of digits, 1 to 9; terms of `sums` and `remainders` may have fewer. Remainders
are sums modulo ten.

Entries of reasoning-gym are drawn in a process of their own, whose hashes of texts are fixed. Some tasks draw from sets
of texts, whose order follows these hashes: by default another one in each process.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np

from hypha_ray.data.preparation.options import GYM
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.types.records import from_json, to_json

ALPHABET: Final = "0123456789+-*= "
"""Characters of all problems, so that models of one vocabulary can be trained on any of them."""

Problem: TypeAlias = tuple[str, str]
"""Prompt and answer."""

_OF_DIGITS: Final[dict[str, Callable[[str], str]]] = {
    "copy": lambda digits: digits,
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
    "max": max,
}
_OF_TWO_NUMBERS: Final[dict[str, Callable[[int, int], int]]] = {
    "sums": lambda a, b: a + b,
    "remainders": lambda a, b: (a + b) % 10,
}
_KEYS = ("answer", "question", "metadata")
"""Parts of an entry that its own scoring takes."""
_NAME = re.compile(r"([a-z]+)([1-9]?)")


def problems(name: str, seed: int) -> Iterator[Problem]:
    """Problems without end; the same seed gives the same ones. Each is drawn anew, so small tasks repeat theirs.

    Args:
        name: kind and number of digits, such as ``sort2``; without a number 2 digits, and 1 of sums and remainders.
        seed: seed of the draws.

    Raises:
        DataError: there are no such problems.

    """
    match = _NAME.fullmatch(name)
    kind, digits = match.groups() if match else (name, "")
    generator = np.random.default_rng(seed)
    if kind in _OF_DIGITS:
        return _of_digits(_OF_DIGITS[kind], int(digits or 2), generator)
    if kind in _OF_TWO_NUMBERS:
        return _of_two_numbers(_OF_TWO_NUMBERS[kind], int(digits or 1), generator)
    kinds = [*_OF_DIGITS, *_OF_TWO_NUMBERS]
    similar = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.5)
    allowed = f"{', '.join(kinds)}, with the number of digits behind it, 1 to 9"
    fix = f"did you mean {similar[0]!r}?" if similar else "such as problems:sort2"
    raise DataError("DATA030", f"there are no problems {name!r}", name, allowed, fix)


def _of_digits(answer: Callable[[str], str], length: int, generator: np.random.Generator) -> Iterator[Problem]:
    while True:
        digits = "".join(map(str, generator.integers(10, size=length)))
        yield f"{digits}=", answer(digits)


def _of_two_numbers(
    answer: Callable[[int, int], int], length: int, generator: np.random.Generator
) -> Iterator[Problem]:
    while True:
        a, b = map(int, generator.integers(10**length, size=2))
        yield f"{a}+{b}=", str(answer(a, b))


def gym_entries(name: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Draw entries of a task: the same ones for a seed, in whatever process.

    Raises:
        ConfigError: PREP008, the package isn't installed.
        DataError: DATA030, it has no such task, or can't draw from it.

    """
    _require(name)
    command = [sys.executable, "-P", "-c", f"from {__name__} import _draw; _draw()", name, str(seed), str(count)]
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryFile() as printed:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=printed) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield from_json(line)
        printed.seek(0)
        _, _, last_line = printed.read().decode(errors="replace").strip().rpartition("\n")
    if process.returncode:
        problem = f"reasoning-gym can't draw from its task {name!r}"
        raise DataError("DATA030", problem, last_line, fix="name another task")


def _require(name: str) -> None:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        got = " ".join(str(error).split())
        fix = "pip install 'hypha_ray[rl]'"
        raise ConfigError("PREP008", f"--source {GYM}{name} needs the package reasoning-gym", got, fix=fix) from None
    if name not in DATASETS:
        similar = difflib.get_close_matches(name, DATASETS, n=1)
        fix = f"did you mean {similar[0]!r}?" if similar else "name one of them"
        raise DataError("DATA030", f"reasoning-gym has no task {name!r}", name, ", ".join(sorted(DATASETS)), fix)


def _draw() -> None:
    """Write the entries that the command line asks for to standard output, a line each."""
    import reasoning_gym

    name = sys.argv[1]
    seed = int(sys.argv[2])
    count = int(sys.argv[3])
    with os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogatepass") as lines:
        os.dup2(2, 1)  # The package may print.
        for entry in reasoning_gym.create_dataset(name, size=count, seed=seed):
            record = {key: entry[key] for key in _KEYS if entry[key] is not None}
            lines.write(to_json(record) + "\n")
