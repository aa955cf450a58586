"""Texts for users: without the secrets of URLs, and with numbers beside their nouns.

    sftp://me:s3cret@backup/runs      sftp://me:***@backup/runs
    https://hub.example/x?token=abc   https://hub.example/x?token=***

A user's name alone stays, for most servers want one; but of a web server it is a token as often as not. A URL that was
handled as a path has lost a slash, and counts as a URL nevertheless.

Records and names of files count rounds from zero; consoles, errors and options count them from one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

HIDDEN = "***"
SHORTEST = 4
"""Fewest letters of a secret that is looked for in other texts."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/{1,2}[^\s'\"<>`]+")
_PASSWORD = re.compile(r"(:/{1,2}[^/?#@:]*):(?!\d+(?:[/?#]|$))\S*@")
"""Password up to the last @, since it may contain that or a slash; a port is no password."""
_USER = re.compile(r"^(https?:/{1,2})[^/?#@]+@")
_BARE_QUERY = re.compile(r"\?[^=&#;?]+(?=#|$)")
_QUERY_VALUE = re.compile(r"([?&#;][^=&#;?]*=)[^&#;]+")


def printable(text: str) -> str:
    """A text with spaces for its control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text)


def redacted(text: str) -> str:
    """A text in which the secrets of all URLs are hidden; to redact it again changes nothing."""
    if ":/" not in text:
        return text
    return _URL.sub(lambda match: _hidden(match[0]), text)


def redacted_tree(value: Any) -> Any:
    """Tables and lists with all of their texts redacted."""
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
    """The secrets of a URL, as written in it and without percent-encoding; the longest first, no very short ones."""
    visible_parts = re.split(r"[?&#;=@:/]+", redacted(url))
    secrets = set(re.split(r"[?&#;=@:/]+", url)).difference(visible_parts)
    password = _password(url)
    if password is not None:
        secrets.add(password)
    secrets |= set(map(unquote, secrets))
    long_secrets = [secret for secret in secrets if len(secret) >= SHORTEST]
    return sorted(long_secrets, key=len, reverse=True)


def _password(url: str) -> str | None:
    """The password of a URL; None if it has none, or is no URL."""
    if "://" not in url:
        return None
    try:
        return urlsplit(url).password
    except ValueError:  # For instance an open bracket; `secrets_of` has the parts that `redacted` hides.
        return None


def _hidden(url: str) -> str:
    url = _PASSWORD.sub(rf"\1:{HIDDEN}@", url)
    if not _PASSWORD.search(url):
        url = _USER.sub(rf"\1{HIDDEN}@", url)
    url = _QUERY_VALUE.sub(rf"\1{HIDDEN}", url)
    return _BARE_QUERY.sub(f"?{HIDDEN}", url)


def counted(number: int | str, noun: str) -> str:
    """Write a number, or a text of one, with its noun: ``1 worker``, ``2 workers``, ``1.2k workers``."""
    return f"{number} {noun}" if str(number) == "1" else f"{number} {noun}s"


def significant(value: float, digits: int) -> str:
    """Write a number with so many significant digits; a larger one has all digits before its point, and no exponent."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text else text


def fixed(value: float, digits: int) -> str:
    """Write a number with so many digits after its point; a smaller one with significant digits."""
    if value and abs(value) < 10.0**-digits:
        return f"{value:.{max(1, digits - 1)}g}"
    return f"{value:.{digits}f}"


def size_in_memory(size_bytes: int) -> str:
    """Write a size of memory: ``21.8 GiB``, ``36 MiB``, ``5 KiB``."""
    if size_bytes >= 2**28:
        return f"{significant(size_bytes / 2**30, 3)} GiB"
    if size_bytes < 2**20:
        return f"{size_bytes / 2**10:.0f} KiB"
    return f"{size_bytes / 2**20:.0f} MiB"


def ranges(numbers: Iterable[int]) -> list[str]:
    """Write numbers briefly, in order: ``0-7``, ``9``."""
    spans: list[list[int]] = []
    """First and last number of each range."""
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = []
    for first, last in spans:
        texts.append(str(first) if first == last else f"{first}-{last}")
    return texts


def rounds_text(rounds: Sequence[int]) -> str:
    """Write rounds that are counted from 0 as people count them: ``round 4``, ``rounds 1-3, 7``."""
    noun = "round" if len(rounds) == 1 else "rounds"
    from_one = [round + 1 for round in rounds]
    return f"{noun} {', '.join(ranges(from_one))}"
