"""HTML pages about runs: one file with its style inside, which asks no server for anything.

Long curves and lists are thinned: ends and extremes are kept, and nothing is averaged. A page that leaves the house has
no users, machines and addresses in its texts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from hypha_ray.telemetry.sinks.files import Record
from hypha_ray.texts import HIDDEN

_STYLE = Path(__file__).with_name("page.css")
T = TypeVar("T")
_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)"
    r"|(?<![\w:])(?=[0-9a-f:]*(?:::|[0-9a-f]{3}))(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])",
    re.IGNORECASE,
)
"""Addresses of IPv4 and IPv6."""
_HOME = re.compile(r"(?<=/home/)[^/\s'\"]+|(?<=/Users/)[^/\s'\"]+")
"""Name of a user in the path of a home folder."""
_MACHINE = re.compile(r"[^\s()]+")


def html_page(title: str, body: Iterable[str], head: Iterable[str] = ()) -> str:
    """Return a page with the style of all pages.

    Args:
        title: title of the page, as plain text.
        body: lines of HTML.
        head: further lines of HTML for the page's head.

    """
    lines = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        *head,
        f"<title>{escape(title)}</title>",
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>",
        *body,
        "</body>\n</html>",
    ]
    return "\n".join(lines) + "\n"


def html_table(name: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a table of plain texts; the first cell of each row is its heading. Columns may have no titles.

    Screen readers tell tables apart by their `name`.
    """
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table>'
    headings = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    if headings:
        yield f"<thead><tr>{headings}</tr></thead>"
    yield "<tbody>"
    for heading, *texts in rows:
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        yield f'<tr><th scope="row">{escape(heading)}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def html_section(name: str, title: str, content: Iterable[str]) -> str:
    """Return a section with its heading; `name` is what links lead to."""
    return "\n".join([f'<section id="{name}">\n<h2>{escape(title)}</h2>', *content, "</section>"])


def points_to_draw(values: Sequence[float], most: int) -> list[int]:
    """Return the places of the points of a curve that are drawn.

    The curve is cut into pieces of equal length, and each keeps its least and its greatest value. A piece without any
    keeps its first point, so that the gap is seen.

    Args:
        values: the curve; NaN: there is no value.
        most: number of points that is about the most, at least 4.

    Returns:
        All places if there are no more than that; otherwise some of them, in order, with the first and the last one.

    """
    if len(values) <= most:
        return list(range(len(values)))
    drawn = {0, len(values) - 1}
    for piece in cut(len(values), (most - 2) // 2):
        present = [point for point in piece if not math.isnan(values[point])]
        if present:
            drawn.add(min(present, key=values.__getitem__))
            drawn.add(max(present, key=values.__getitem__))
        else:
            drawn.add(piece[0])
    return sorted(drawn)


def spread(elements: Sequence[T], most: int) -> list[T]:
    """Return evenly spread elements, with the first and the last one; all if there are no more than `most`."""
    if len(elements) <= most:
        return list(elements)
    step = (len(elements) - 1) / (most - 1)
    return [elements[round(number * step)] for number in range(most)]


def cut(length: int, most: int) -> Iterator[range]:
    """Cut the places of a list into pieces of equal length, as far as possible: at most so many, of one at least."""
    pieces = min(length, max(1, most))
    for piece in range(pieces):
        yield range(piece * length // pieces, (piece + 1) * length // pieces)


class HostFilter:
    """Replaces what tells a user or a machine by ``***``.

    Args:
        provenance: account of the run's starts.
        events: events of the run.
        is_on: whether anything is replaced.

    """

    def __init__(self, provenance: Record, events: Iterable[Record], is_on: bool = True) -> None:
        self.is_on = is_on
        names = {name for name in (*_names(provenance), *_nodes(events)) if name}
        longest_first = sorted(names, key=lambda name: (-len(name), name))
        self._names = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in longest_first) or r"(?!)")

    def __call__(self, text: object) -> str:
        """Return a text without users, machines and addresses."""
        if not self.is_on:
            return str(text)
        without_homes = _HOME.sub(HIDDEN, str(text))
        without_names = self._names.sub(HIDDEN, without_homes)
        return _ADDRESS.sub(HIDDEN, without_names)


def _names(provenance: Record) -> Iterator[str]:
    """Users, names and addresses of machines of all starts; of a full name its first part, too."""
    for start in (provenance, *(provenance.get("earlier") or ())):
        hosts: list[Any] = [start]
        hosts += start.get("hosts") or ()
        for host in hosts:
            for field in ("user", "host", "address"):
                name = str(host.get(field) or "")
                yield name
                if field == "host":
                    yield name.partition(".")[0]


def _nodes(events: Iterable[Record]) -> Iterator[str]:
    """Names and addresses of the machines that events tell of."""
    for event in events:
        if event.get("kind") == "lease":
            yield str(event.get("node") or "")
        elif event.get("kind") == "machine_loss":
            yield from _MACHINE.findall(str(event.get("machine") or ""))
