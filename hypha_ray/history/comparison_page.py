"""Page of a comparison: one HTML file, with its plot inside, that needs nothing else."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape

from hypha_ray.history.comparison import Comparison, Row

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .25rem 1rem .25rem 0; vertical-align: top; }
th { border-bottom: 1px solid #9ca3af; } td { border-bottom: 1px solid #e5e7eb; } td + td { font-family: monospace; }
img { max-width: 100%; }
"""


def page(comparison: Comparison, picture: bytes | None) -> str:
    """Return the page; `picture` is a PNG, None without a curve."""
    return "\n".join(_lines(comparison, picture)) + "\n"


def _lines(comparison: Comparison, picture: bytes | None) -> Iterator[str]:
    title = escape(", ".join(comparison.names))
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>"
    yield f"<h1>{title}</h1>"
    yield "<h2>Settings that differ</h2>"
    if comparison.settings:
        yield from _table(("key", *comparison.names), comparison.settings)
    else:
        yield "<p>None.</p>"
    yield "<h2>Figures</h2>"
    yield from _table(("figure", *comparison.names), comparison.figures)
    if picture is not None:
        data = b64encode(picture).decode("ascii")
        yield f'<h2>Curves</h2>\n<img alt="curves of the runs" src="data:image/png;base64,{data}">'
    yield "</body>\n</html>"


def _table(titles: Row, rows: Sequence[Row]) -> Iterator[str]:
    yield "<table>"
    yield _row("th", titles)
    for row in rows:
        yield _row("td", row)
    yield "</table>"


def _row(tag: str, cells: Row) -> str:
    texts = [f"<{tag}>{escape(cell)}</{tag}>" for cell in cells]
    return f"<tr>{''.join(texts)}</tr>"
