"""Every key of the job file as text: for ``--help``, and for docs/configuration.md."""

from __future__ import annotations

import re

from hypha_ray.config.keys import EACH, Key, KeyPath, keys, tables
from hypha_ray.files import as_installed

_ARGUMENTS = """\
arguments:
  [@] FILE.toml           a job file; later files override earlier ones
  --section.key VALUE     one key of the job file; overrides all files
  --dry-run               print the resolved job file, check it against the cluster, and exit
  --resume                continue the run named run.name, even if the job has changed
  --resume NAME|DIR|URL   continue that run with its own job file; files and keys given here override it
  --help                  this text

Keys, with their defaults:
"""
_BEGIN = "<!-- keys: made by hypha_ray.config.cli.help -->"
_END = "<!-- end of keys -->"


def help_text(doc: str) -> str:
    """Text of ``--help``: a job script's docstring, its arguments, and one line for each key."""
    parts = [as_installed(doc).strip(), "", _ARGUMENTS.rstrip()]
    for path, table in tables().items():
        lines = [_line(key) for key in keys().values() if key.path[:-1] == path]
        if lines:
            parts += ["", f"{_header(path)}  {_summary(table)}", *lines]
    return "\n".join(parts)


def keys_markdown() -> str:
    """All keys as markdown: a heading and a table for each table of the job file."""
    parts = []
    for path, table in tables().items():
        rows = [_row(key) for key in keys().values() if key.path[:-1] == path]
        if rows:
            head = ["| key | kind | default | meaning |", "|---|---|---|---|"]
            parts.append("\n".join([f"### `{_header(path)}`", "", _summary(table), "", *head, *rows]))
    return "\n\n".join(parts)


def renewed(document: str) -> str:
    """A markdown document with its list of keys regenerated between the two comments that mark it."""
    block = f"{_BEGIN}\n\n{keys_markdown()}\n\n{_END}"
    return re.sub(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", lambda _: block, document, flags=re.DOTALL)


def _header(path: KeyPath) -> str:
    """Line of a job file with which a table begins."""
    return f"[[{'.'.join(path[:-1])}]]" if path[-1:] == (EACH,) else f"[{'.'.join(path)}]"


def _line(key: Key) -> str:
    return f"  {f'--{key.name} {key.default_text}':<58} {key.meaning} ({key.kind})"


def _row(key: Key) -> str:
    cells = (f"`{key.path[-1]}`", key.kind, f"`{key.default_text}`" if key.default_text else "", key.meaning)
    return f"| {' | '.join(cell.replace(' | ', ', ') for cell in cells)} |"


def _summary(table: type) -> str:
    return (table.__doc__ or "").splitlines()[0]
