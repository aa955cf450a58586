"""Overlay of a job file: proposals as TOML, with their reasons as comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import tomli_w

from hypha_ray.simulation.advice.proposal import Proposal

WIDTH = 118
"""Longest line of a comment."""


def overlay_text(proposals: Sequence[Proposal], heading: Sequence[str]) -> str:
    """Write a job file with the proposed keys.

    Args:
        proposals: keys with values and reasons.
        heading: lines of the comment before them.

    """
    lines = [comment_line(line) for line in heading]
    tables: dict[str, list[Proposal]] = {}
    for proposal in proposals:
        table, _, _ = proposal.key.rpartition(".")
        tables.setdefault(table, []).append(proposal)
    for table, members in tables.items():
        lines += ["", f"[{table}]"]
        for proposal in members:
            lines += _entry(proposal)
    return "\n".join(lines) + "\n"


def comment_line(text: str) -> str:
    """Write a line of a comment."""
    return f"# {text}".rstrip()


def _entry(proposal: Proposal) -> Iterator[str]:
    """Lines of a key: its comments, and the key with its value."""
    for text in (proposal.reason, *proposal.evidence):
        if text:
            yield from textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="#   ")
    _, _, name = proposal.key.rpartition(".")
    yield tomli_w.dumps({name: proposal.value}).rstrip()
