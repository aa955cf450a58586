"""From a command line to a job: defaults < job files, from left to right < flags.

    [@ FILE.toml …] [--section.key VALUE …] [--dry-run] [--resume [NAME_OR_DIR]] [--help]

Files and flags become one list of settings, each of which knows where it stands; the last one of a key wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import tomli_w

from hypha_ray.config.checks import build, require_complete, worker_needs
from hypha_ray.config.document import read
from hypha_ray.config.help import help_text
from hypha_ray.config.keys import dotted, keys
from hypha_ray.config.names import GUIDE_NAMES, IGNORED, inside
from hypha_ray.config.schema import Job
from hypha_ray.config.settings import Setting, from_arguments, from_document, put

__all__ = ["Loaded", "load", "parse", "require_complete", "resolved_toml", "worker_needs"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a command line asks for.

    `resume` is the run's name or directory, True for the newest run, None to start afresh; `notes` are for the user.
    """

    job: Job
    dry_run: bool = False
    resume: str | bool | None = None
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load(arguments: Sequence[str]) -> Loaded:
    """Read a command line and the job files that it names.

    Raises:
        ConfigError: with the file and line, or the flag, that has to be mended.

    """
    command = from_arguments(arguments)
    settings = [setting for file in command.files for setting in from_document(read(file))]
    settings.extend(command.flags)
    job = build([setting for setting in settings if setting.path not in IGNORED])
    return Loaded(job, command.dry_run, command.resume, command.files, tuple(_notes(settings)))


def parse(arguments: Sequence[str], doc: str | None) -> Loaded:
    """`load`, or with ``--help`` print a job script's doc and every key, and exit with 0.

    Raises:
        ConfigError: as `load` does.
        SystemExit: after the help.

    """
    if {"-h", "--help"} & set(arguments):
        print(help_text(doc or ""))
        raise SystemExit(0)
    return load(arguments)


def resolved_toml(job: Job) -> str:
    """The job as a job file that loads to an equal job, but for the secrets, which are left out."""
    tree: dict[str, Any] = {}
    for key in keys().values():
        value = reduce(getattr, key.path, job)
        if value is not None and not key.secret:
            put(tree, key.path, _without_none(value))
        elif value is None and key.default is not None:
            put(tree, key.path, "none")
    return tomli_w.dumps(tree)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(child) for name, child in value.items() if child is not None}
    return list(value) if isinstance(value, tuple) else value


def _notes(settings: Sequence[Setting]) -> Iterator[str]:
    for setting in settings:
        key, name, document = keys().get(setting.path), inside(setting.raw), setting.document
        if setting.path in IGNORED:
            yield f"{setting.where}: {dotted(name)} is ignored: {IGNORED[setting.path]}"
        elif key and key.secret and document:
            advice = "it is written nowhere" if document.private else "chmod 600 the file, or set HF_TOKEN"
            yield f"CFG101: {setting.where}: {key.name} is a secret in a file: {advice}"
        elif key and key.path != name and name not in GUIDE_NAMES and document:
            yield f"{setting.where}: {dotted(name)} is read as {key.name}"
