"""Every key of the job file as text: for ``--help``, and for docs/configuration.md."""

from __future__ import annotations

import re

from hypha_ray.config.keys import EACH, Key, KeyPath, keys, tables
from hypha_ray.files import as_installed

_ARGUMENTS = """\
arguments:
  [@] FILE.toml           a job file; later files override earlier ones
  --section.key VALUE     one key of the job file; overrides all files
  --dry-run               print a summary and the resolved job file, check them against the cluster, and exit
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
        lines = list(map(_line, _keys_of(path)))
        if lines:
            parts += ["", f"{_header(path)}  {_summary(table)}", *lines]
    return "\n".join(parts)


def keys_markdown() -> str:
    """All keys as markdown: a heading and a table for each table of the job file."""
    parts = []
    for path, table in tables().items():
        rows = list(map(_row, _keys_of(path)))
        if rows:
            heading = f"### `{_header(path)}`"
            head = ["| key | kind | default | meaning |", "|---|---|---|---|"]
            parts.append("\n".join([heading, "", _summary(table), "", *head, *rows]))
    return "\n\n".join(parts)


def renewed(document: str) -> str:
    """A markdown document with its list of keys regenerated between the two comments that mark it."""
    block = f"{_BEGIN}\n\n{keys_markdown()}\n\n{_END}"
    pattern = f"{re.escape(_BEGIN)}.*{re.escape(_END)}"
    return re.sub(pattern, lambda _: block, document, flags=re.DOTALL)


def _keys_of(table: KeyPath) -> list[Key]:
    return [key for key in keys().values() if key.path[:-1] == table]


def _header(path: KeyPath) -> str:
    """Line of a job file with which a table begins."""
    if path[-1:] == (EACH,):
        name = ".".join(path[:-1])
        return f"[[{name}]]"
    name = ".".join(path)
    return f"[{name}]"


def _line(key: Key) -> str:
    flag = f"--{key.name} {key.default_text}"
    return f"  {flag:<58} {key.meaning} ({key.kind})"


def _row(key: Key) -> str:
    default = f"`{key.default_text}`" if key.default_text else ""
    cells = (f"`{key.path[-1]}`", key.kind, default, key.meaning)
    escaped = [cell.replace(" | ", ", ") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _summary(table: type) -> str:
    doc = table.__doc__ or ""
    return doc.splitlines()[0]
