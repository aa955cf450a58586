"""From a command line to a job: defaults < job files, from left to right < flags.

    [[@] FILE.toml …] [--section.key VALUE …] [--dry-run] [--resume [NAME | DIR | URL]] [--help]

Files and flags become one list of settings, each with its place; the last one of a key wins. The job file of a run
named after ``--resume`` comes before all of them.

Two jobs are compared key by key, as their resolved job files have them: do they still describe the same training?
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import tomli_w

from hypha_ray.config.aliases import GUIDE_NAMES, IGNORED, without_guide_table
from hypha_ray.config.assignments import INPUTS, Setting, from_arguments, from_document, in_force, nested, relative_path
from hypha_ray.config.checks import build, in_groups, require_complete
from hypha_ray.config.document import Document, check, read
from hypha_ray.config.keys import KeyPath, arrays, dotted, free_tables, key_at, shown, values
from hypha_ray.config.no_effect import keys_without_effect
from hypha_ray.config.options import help_text
from hypha_ray.config.rl import RewardModel
from hypha_ray.config.schema import Job, Model, Preprocessor
from hypha_ray.config.training import Alert
from hypha_ray.errors import ConfigError
from hypha_ray.texts import is_redacted, redacted, redacted_tree

__all__ = [
    "Loaded",
    "from_read_document",
    "from_tables",
    "load",
    "parse",
    "require_complete",
    "require_secrets",
    "resolved",
    "resolved_toml",
]

CONFIG = "config.toml"
"""Name of the job file in a run's directory."""
PROVENANCE = "provenance.json"
"""Name of the account of a run's starts in its directory."""

UPDATE_ROUNDS = ("rounds", "update_rounds")
_NAME = ("run", "name")
_DIR = ("run", "dir")
_MIRROR = ("checkpoint", "mirror")

FindRun: TypeAlias = Callable[[str, str | None, str | None], Path]
"""Finds a run's directory from the value of ``--resume``, and from `run.name` and `run.dir` if they are set."""
T = TypeVar("T", Model, Preprocessor, RewardModel)
DATA: KeyPath = ("dataset",)
_OF_A_TRAINING: tuple[KeyPath, ...] = (
    ("model",),
    ("preprocessor",),
    ("dataset", "path"),
    ("dataset", "name"),
    ("dataset", "mix"),
    ("run", "seed"),
    ("run", "mode"),
    ("sync", "strategy"),
    ("sync", "fragments"),
    ("sync", "partition"),
    ("sync", "downward_codec"),
    ("inner_optimizer", "name"),
    ("outer_optimizer", "name"),
)
"""Keys that define the training: with other values, its commits can't be used."""
_OF_EVALUATIONS: tuple[KeyPath, ...] = (("model", "metrics"),)
"""Keys that change no weight, although they lie below keys that define the training."""
_OF_A_COMMAND: tuple[KeyPath, ...] = (
    ("run", "name"),
    ("run", "dir"),
    ("run", "notes"),
    ("run", "tags"),
    ("testing",),
)
"""Keys that don't identify a run: its place and labels, and faults of tests."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The job of a command line; `notes` are shown to the user.

    With `resume`, the run named by `run.name` and `run.dir` has to exist, and continues even if the job has changed.
    """

    job: Job
    dry_run: bool = False
    resume: bool = False
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load(
    arguments: Sequence[str],
    find_run: FindRun | None = None,
    defaults: Sequence[str] = (),
    option: str | None = None,
) -> Loaded:
    """Read a command line and the job files that it names.

    Args:
        arguments: the command line.
        find_run: finds the run named after ``--resume``; None: ``--resume`` takes no name.
        defaults: flags over which job files win.
        option: option whose value the flags were, which errors name; None: they stood for themselves.

    Raises:
        ConfigError: with the file and line, or the flag, to correct.
        HyphaError: whatever `find_run` raises.

    """
    command = from_arguments(arguments, option)
    settings: list[Setting] = []
    for file in command.files:
        settings += from_document(read(file))
    settings += command.flags
    if isinstance(command.resume, str):
        settings = _over_the_run(command.resume, settings, find_run)
    settings = [*from_arguments(defaults).flags, *settings]
    job = _build(settings)
    if command.resume and job.run.name is None:
        raise ConfigError("CFG015", "--resume names no run", fix="give it a name or directory, or set run.name")
    notes = (*_notes(settings), *_no_effect_notes(settings, job))
    return Loaded(job, command.dry_run, bool(command.resume), command.files, notes)


def from_tables(tables: Mapping[str, Any]) -> Job:
    """Make a job from the tables of a job file.

    Raises:
        ConfigError: with the key to correct.

    """
    table = dict(tables)
    check(table, "the job")
    return from_read_document(Document("the job", "", table, private=True))


def from_read_document(document: Document) -> Job:
    """Make a job from a job file that has been read, or from its part of another file.

    Raises:
        ConfigError: with the file, line and key to correct.

    """
    return _build(from_document(document))


def _build(settings: Sequence[Setting]) -> Job:
    used_settings = [setting for setting in settings if setting.path not in IGNORED]
    return build(in_force(used_settings))


def parse(arguments: Sequence[str], doc: str | None, find_run: FindRun, defaults: Sequence[str] = ()) -> Loaded:
    """Load a job as `load` does; ``--help`` prints a job script's docstring and every key, and exits with 0.

    Raises:
        HyphaError: as `load` does.
        SystemExit: after the help.

    """
    if {"-h", "--help"} & set(arguments):
        print(help_text(doc or ""))
        raise SystemExit(0)
    return load(arguments, find_run, defaults)


def resolved(job: Job) -> dict[str, Any]:
    """The job as nested tables of a job file, which loads to an equal job except for secrets.

    Secrets are left out, and masked in URLs; `require_secrets` finds the missing ones.
    """

    def shown_values() -> Iterator[tuple[KeyPath, Any]]:
        for key, value in values(job):
            if job.workers and in_groups(key.path):
                continue
            if key.path == UPDATE_ROUNDS and job.rounds.epochs is not None:
                continue
            if value is not None and not key.secret:
                yield key.path, redacted_tree(_without_none(value))
            elif value is None and key.default is not None:
                yield key.path, "none"

    return nested(shown_values())


def resolved_toml(job: Job) -> str:
    """The resolved job as TOML text."""
    return tomli_w.dumps(resolved(job))


def require_secrets(job: Job) -> None:
    """Check that no URL lacks its secret: a run stores none, and may have been resumed by its name alone.

    Raises:
        ConfigError: CFG104, with the places where the secret may be given.

    """
    for key, value in values(job):
        if is_redacted(str(value)):
            problem = f"{key.name} needs the secret of its URL again, which the run doesn't store"
            fix = (
                f"give {key.name} with it in a job file of mode 0600; or leave the secret out and set it where fsspec "
                "reads it, in FSSPEC_<PROTOCOL>_PASSWORD or ~/.config/fsspec"
            )
            raise ConfigError("CFG104", problem, got=shown(value), fix=fix)


def _over_the_run(resume: str, settings: list[Setting], find_run: FindRun | None) -> list[Setting]:
    """Put the settings of a resumed run's job file, and its name and directory, before those given here."""
    if find_run is None:
        raise ConfigError("CFG015", "--resume takes no value here", fix="leave it out")
    texts = {setting.path: setting.value for setting in settings if isinstance(setting.value, str)}
    name = texts.get(_NAME)
    directory = find_run(resume, name, texts.get(_DIR))
    if name is not None and name != directory.name:
        problem = f"run.name and --resume mean different runs: {shown(name)} and {directory}"
        raise ConfigError("CFG011", problem, fix="give only one of them")
    settings_of_run = [_with_secret(setting, resume) for setting in _settings_of_run(directory)]
    run_name = Setting(_NAME, directory.name, _NAME, None)
    run_dir = Setting(_DIR, str(directory.parent), _DIR, None)
    return [*settings_of_run, run_name, *settings, run_dir]


def job_of_run(directory: Path) -> Job:
    """Make the job of a run again.

    Files and folders that it names and that aren't here are those of the folder in which the run was started last.

    Args:
        directory: directory of the run.

    Raises:
        ConfigError: the job file can't be read.

    """
    return _build(_settings_of_run(directory))


def _settings_of_run(directory: Path) -> list[Setting]:
    settings = from_document(read(str(directory / CONFIG)))
    folder: Any = None
    with suppress(OSError, ValueError, AttributeError):
        folder = json.loads((directory / PROVENANCE).read_bytes()).get("folder")
    if not isinstance(folder, str):
        return settings
    return [_with_path_below(Path(folder), setting) for setting in settings]


def _with_path_below(folder: Path, setting: Setting) -> Setting:
    """A setting, with an absolute path if it names a file or folder that isn't here but below the given folder."""
    name = relative_path(setting, INPUTS)
    if name is None or Path(name).exists() or not (folder / name).exists():
        return setting
    return replace(setting, value=str(folder / name))


def _with_secret(setting: Setting, resume: str) -> Setting:
    """A setting of the run itself; a mirror gets back its secret from the URL that the run was fetched from."""
    mirror, _, _ = resume.rstrip("/").rpartition("/")
    if setting.path == _MIRROR and setting.value == redacted(mirror):
        return replace(setting, value=mirror)
    return setting


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(child) for name, child in value.items() if child is not None}
    return list(value) if isinstance(value, tuple) else value


def _notes(settings: Sequence[Setting]) -> Iterator[str]:
    for setting in settings:
        key = key_at(setting.path)
        name = without_guide_table(setting.written)
        document = setting.document
        is_private = document is not None and document.private
        if setting.path in IGNORED:
            yield f"{setting.location}: {dotted(name)} is ignored: {IGNORED[setting.path]}"
        elif key and key.secret and document:
            advice = "it isn't stored" if is_private else "chmod 600 the file, or set HF_TOKEN"
            yield f"CFG101: {setting.location}: {key.name} is a secret in a file: {advice}"
        elif redacted_tree(setting.value) != setting.value:
            advice = "it isn't stored" if is_private else "others can read it; put it into a job file of mode 0600"
            yield f"CFG101: {setting.key_location} has a secret in a URL: {advice}"
        elif key and key.path != name and name not in GUIDE_NAMES and document:
            yield f"{setting.location}: {dotted(name)} is read as {key.name}"


def _no_effect_notes(settings: Sequence[Setting], job: Job) -> Iterator[str]:
    setting_by_path = {setting.path: setting for setting in settings}
    for path, reason in keys_without_effect(job).items():
        yield f"CFG103: {setting_by_path[path].key_location} has no effect {reason}"


def with_absolute_folders(job: Job) -> Job:
    """Name folders of models, preprocessor and trackers, and programs of alerts, absolutely; names of a hub stay.

    Actors need it, which run in another working directory than the driver. The job file that a run keeps has the names
    as they were given, so a project may be moved.
    """
    reward_model = _with_absolute_repository(job.rl.reward.model)
    reward = job.rl.reward.model_copy(update={"model": reward_model})
    folders = {
        "trackers": _absolute_path(job.telemetry.trackers),
        "aim_repository": _absolute_path(job.telemetry.aim_repository),
        "alerts": list(map(_with_absolute_program, job.telemetry.alerts)),
    }
    tables = {
        "model": _with_absolute_repository(job.model),
        "preprocessor": _with_absolute_repository(job.preprocessor),
        "rl": job.rl.model_copy(update={"reward": reward}),
        "telemetry": job.telemetry.model_copy(update=folders),
    }
    return job.model_copy(update=tables)


def _absolute_path(folder: str | None) -> str | None:
    if folder is None or "://" in folder:
        return folder
    return str(Path(folder).expanduser().absolute())


def _with_absolute_program(alert: Alert) -> Alert:
    """The alert with the path of its program, if it is given as a path; a bare name is looked up where it runs."""
    if not alert.command or "/" not in alert.command[0]:
        return alert
    return alert.model_copy(update={"command": [_absolute_path(alert.command[0]), *alert.command[1:]]})


def _with_absolute_repository(table: T) -> T:
    if not table.repository:
        return table
    folder = Path(table.repository).expanduser()
    if not folder.is_dir():
        return table
    return table.model_copy(update={"repository": str(folder.absolute())})


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose value differs between this job and the run to continue; None means unset."""

    path: KeyPath
    here: Any
    there: Any

    @property
    def forks(self) -> bool:
        """Whether the difference makes it another training, which can't continue from the run's commits."""
        return defines_training(self.path)

    @property
    def of_data(self) -> bool:
        """Whether the key locates the dataset, which may be the same one in another place."""
        return self.path[:1] == DATA and self.path[-1] != "weight"

    def __str__(self) -> str:
        return f"{dotted(self.path)} is {_value(self.here)} here and {_value(self.there)} in the run"


def defines_training(path: KeyPath) -> bool:
    """Whether another value of a key makes it another training."""
    return _is_below(path, _OF_A_TRAINING) and not _is_below(path, _OF_EVALUATIONS)


def differences(here: Job, there: Job) -> tuple[Difference, ...]:
    """Compare two jobs key by key, as their resolved job files have them; secrets are in neither."""
    ours = dict(_leaves(resolved(here), ()))
    theirs = dict(_leaves(resolved(there), ()))
    found_differences = []
    for path in ours | theirs:
        difference = Difference(path, ours.get(path), theirs.get(path))
        if difference.here != difference.there and not _is_below(path, _OF_A_COMMAND):
            found_differences.append(difference)
    return tuple(found_differences)


def settings_that_differ(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys of resolved job files whose values aren't all equal, with the value of each file; None: unset.

    Name, place and labels of the runs are left out.
    """
    leaves = [dict(_leaves(tree, ())) for tree in trees]
    paths: dict[KeyPath, None] = {}
    for settings in leaves:
        paths.update(dict.fromkeys(settings))
    different: dict[str, list[Any]] = {}
    for path in paths:
        values = [settings.get(path) for settings in leaves]
        if any(value != values[0] for value in values) and not _is_below(path, _OF_A_COMMAND):
            different[dotted(path)] = values
    return different


def refuse_changes(found_differences: Sequence[Difference], run_folder: Path) -> None:
    """Refuse the name of a run by another job.

    Raises:
        ConfigError: RUN001, there are differences.

    """
    if found_differences:
        place_text = f"{run_folder.name!r} in {run_folder.parent}"
        problem = f"run.name: there is a run {place_text}, by another job: {found_differences[0]}"
        fix = "choose another run.name, or give --resume to go on with the run as it is told here"
        raise ConfigError("RUN001", problem, fix=fix)


def _is_below(path: KeyPath, keys: Iterable[KeyPath]) -> bool:
    """Whether a path is one of the keys, or leads into one of them."""
    return any(path[: len(key)] == key for key in keys)


def _leaves(tree: Mapping[str, Any], table: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Values by their paths; tables of an array are numbered."""
    for name, value in tree.items():
        path = (*table, name)
        inner = value
        if path in arrays():
            inner = {str(number): element for number, element in enumerate(value)}
        if isinstance(inner, dict) and (inner or path in free_tables()):
            yield from _leaves(inner, path)
        else:
            yield path, inner


def _value(value: Any) -> str:
    return "not set" if value is None else shown(value)
