"""Page of a comparison: one HTML file, with its plot inside, that needs nothing else."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from html import escape

from hypha_ray.history.comparison import Comparison
from hypha_ray.history.html_page import html_page, html_section, html_table


def page(comparison: Comparison, picture: bytes | None) -> str:
    """Return the page; `picture` is a PNG, None without a curve."""
    return html_page(", ".join(comparison.names), _body(comparison, picture))


def _body(comparison: Comparison, picture: bytes | None) -> Iterator[str]:
    yield f"<header><h1>{escape(', '.join(comparison.names))}</h1></header>\n<main>"
    settings = ["<p>None.</p>"]
    if comparison.settings:
        settings = list(html_table(("key", *comparison.names), comparison.settings))
    yield html_section("settings", "Settings that differ", settings)
    figures = html_table(("figure", *comparison.names), comparison.figures)
    yield html_section("figures", "Figures", figures)
    if picture is not None:
        data = b64encode(picture).decode("ascii")
        image = f'<img alt="curves of the runs" src="data:image/png;base64,{data}">'
        yield html_section("curves", "Curves", [image])
    yield "</main>"
