"""Record of the command that prepares a dataset, for its manifest."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import MISSING, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from hypha_ray.data.preparation.options import Options
from hypha_ray.data.provenance import MadeBy
from hypha_ray.plugins import sources
from hypha_ray.python_sources import files_hash
from hypha_ray.redaction import redacted, redacted_tree

_OTHERS: Final = frozenset({"source", "out", "name", "overwrite", "report"})
"""Options that aren't in the record: the source, which has a place of its own, and those that change no sample."""


def made_by(options: Options, date: str | None) -> MadeBy:
    """The command without secrets of URLs, the hash of a kind of the user's own, and the time; None: it isn't known."""
    given: dict[str, JsonValue] = {}
    for option in fields(options):
        value = getattr(options, option.name)
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if option.name not in _OTHERS and value != default:
            given[option.name] = redacted_tree(str(value) if isinstance(value, Path) else value)
    if options.kind is not None and (files := sources("dataset_kinds", options.kind)):
        given["kind_sha256"] = files_hash(files)
    return MadeBy(redacted(options.source), given, _version(), date)


def _version() -> str | None:
    with suppress(PackageNotFoundError):
        return version("hypha_ray")
    return None
