"""Texts for people: without the secrets of URLs, and with numbers beside their nouns.

    sftp://me:s3cret@backup/runs      sftp://me:***@backup/runs
    https://hub.example/x?token=abc   https://hub.example/x?token=***

A user's name alone stays, for most servers want one; but of a web server it is a token as often as not. A URL that was
taken for a path has lost a slash, and is one all the same.

Records and names of files count rounds from zero; consoles, errors and options count them from one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any
from urllib.parse import unquote, urlsplit

HIDDEN = "***"
SHORTEST = 4
"""Letters of a secret that is looked for in other texts."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/{1,2}[^\s'\"<>`]+")
_PASSWORD = re.compile(r"(:/{1,2}[^/?#@:]*):(?!\d+(?:[/?#]|$))\S*@")
"""To the last @, for a password may have one in it, or a slash; what is a port is none."""
_USER = re.compile(r"^(https?:/{1,2})[^/?#@]+@")
_BARE = re.compile(r"\?[^=&#;?]+(?=#|$)")
_SAID = re.compile(r"([?&#;][^=&#;?]*=)[^&#;]+")


def redacted(text: str) -> str:
    """A text in which the secrets of all URLs are hidden; once more changes nothing."""
    return _URL.sub(lambda found: _hidden(found[0]), text) if ":/" in text else text


def redacted_tree(value: Any) -> Any:
    """Tables and lists with all of their texts like that."""
    match value:
        case str():
            return redacted(value)
        case Mapping():
            return {name: redacted_tree(child) for name, child in value.items()}
        case list() | tuple():
            return [redacted_tree(child) for child in value]
    return value


def is_redacted(text: str) -> bool:
    """Whether a secret of a URL was hidden in a text."""
    return any(HIDDEN in url for url in _URL.findall(text))


def secrets_of(url: str) -> list[str]:
    """The secrets of a URL, as they are written in it and as they are meant; the longest first, no very short ones."""
    shown = set(re.split(r"[?&#;=@:/]+", redacted(url)))
    parts = {part for part in re.split(r"[?&#;=@:/]+", url) if part} - shown
    password = _password(url)
    found = {*parts, *([password] if password else [])}
    found |= {unquote(part) for part in found}
    return sorted((part for part in found if len(part) >= SHORTEST), key=len, reverse=True)


def _password(url: str) -> str | None:
    """The password of a URL; None if it has none, or is no URL."""
    if "://" not in url:
        return None
    try:
        return urlsplit(url).password
    except ValueError:  # Such as a bracket that isn't closed; what `redacted` hides is still found.
        return None


def _hidden(url: str) -> str:
    url = _PASSWORD.sub(rf"\1:{HIDDEN}@", url)
    if not _PASSWORD.search(url):
        url = _USER.sub(rf"\1{HIDDEN}@", url)
    return _BARE.sub(f"?{HIDDEN}", _SAID.sub(rf"\1{HIDDEN}", url))


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: ``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranges(numbers: Iterable[int]) -> list[str]:
    """Write numbers briefly, in order: ``0-7``, ``9``."""
    pairs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    spans: list[list[int]] = [[number for _, number in pair] for _, pair in pairs]
    return [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]


def rounds_text(rounds: Sequence[int]) -> str:
    """Write rounds that are counted from 0 as people count them: ``round 4``, ``rounds 1-3, 7``."""
    noun = "round" if len(rounds) == 1 else "rounds"
    return f"{noun} {', '.join(ranges(round + 1 for round in rounds))}"
