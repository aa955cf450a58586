"""HTML pages about runs: one file with its style inside, which asks no server for anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

_STYLE = Path(__file__).with_name("page.css")


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


def html_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a table of plain texts; the first cell of each row is its heading. Columns may have no titles."""
    yield '<div class="scroll" tabindex="0" role="region" aria-label="table"><table>'
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
