"""Job files that come with the package, each with the sentence that its first comment begins with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from hypha_ray.errors import ConfigError
from hypha_ray.files import as_installed, shipped_configs

_SENTENCE = re.compile(r".+?\.(?=\s|$)")


def config_lines() -> Iterator[str]:
    """Write a line for each job file: its name, and the first sentence about it."""
    files = shipped_configs()
    width = max(map(len, files))
    for name, file in files.items():
        text = file.read_text(encoding="utf-8")
        yield f"{name.ljust(width)}  {first_sentence(text)}"


def first_sentence(text: str) -> str:
    """The first sentence of a job file's first comment; empty without one."""
    words = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        words.append(line.removeprefix("#").strip())
    sentence = _SENTENCE.match(" ".join(words))
    if sentence is None:
        return ""
    return sentence[0].removesuffix(".")


def shipped_config(name: str) -> str:
    """Text of a job file that comes with the package, with its commands as they are given here.

    Raises:
        ConfigError: CFG003, there is none of that name; the nearest is named.

    """
    files = shipped_configs()
    stem = name.removesuffix(".toml")
    if stem in files:
        return as_installed(files[stem].read_text(encoding="utf-8"))
    fix = "see the list without a name"
    for match in get_close_matches(stem, files, n=1):
        fix = f"did you mean {match!r}?"
    raise ConfigError("CFG003", "no such job file comes with hypha_ray", repr(name), ", ".join(files), fix)
