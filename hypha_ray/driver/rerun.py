"""Command line that repeats a run: the run's job file, under another name, with further settings of the user.

    rerun texts-1 --rounds.epochs 5   ─►   diloco @ /runs/texts-1/config.toml --run.name texts-1-… --rounds.epochs 5

Job scripts import this to parse their command line, so heavy modules are imported late.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypha_ray.config.assignments import INPUTS, Setting, from_arguments, from_document, relative_path, value_behind
from hypha_ray.config.document import read
from hypha_ray.config.entry_point import Phases, print_notes
from hypha_ray.config.keys import KeyPath, dotted
from hypha_ray.config.load import CONFIG, PROVENANCE, Loaded, load
from hypha_ray.errors import ConfigError
from hypha_ray.files import as_installed, find_file
from hypha_ray.plugins import look_beside_the_job
from hypha_ray.store.directory import home, runs
from hypha_ray.texts import counted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_OUTPUTS: frozenset[KeyPath] = frozenset(
    {("run", "dir"), ("checkpoint", "mirror"), ("telemetry", "trackers"), ("telemetry", "aim_repository")}
)
"""Keys that name a folder which is made if it is missing."""
_NAME: KeyPath = ("run", "name")
_DIR: KeyPath = ("run", "dir")
_PINNED_TABLES = ("model", "preprocessor", "rl.reward.model")
"""Tables with a hub repository, whose branch may point to another commit now."""
_TIME_SUFFIX = re.compile(r"-\d{8}-\d{6}$")
_LONGEST_STEM = 84
"""Longest beginning of a run's name, in characters, that leaves room for the time."""


def split_words(words: Sequence[str], options: type[DataclassInstance]) -> tuple[list[str], list[str]]:
    """Split a command line into the words of a job's own options and those of the job file.

    Args:
        words: the command line, without the script.
        options: class of the own options; a word without a flag belongs to them, unless it is a job file.

    Returns:
        Own words, with switches in the end, and words of the job file, each file behind an ``@`` of its own.

    Raises:
        ConfigError: CFG001, a flag that resembles an own one, or ``--resume``.

    """
    flags = {_flag(field.name): field.type == "bool" for field in fields(options)}
    """Own flags, and whether each is a switch."""
    own_words: list[str] = []
    switches: list[str] = []
    job_words: list[str] = []
    words_left = deque(words)
    while words_left:
        word = words_left.popleft()
        name, equals_sign, _ = word.partition("=")
        flag = _flag(name)
        if word.startswith("@"):
            file = word[1:] or value_behind("", words_left) or ""
            job_words += ["@", file]
        elif not word.startswith("-"):
            if word.endswith(".toml"):
                job_words += ["@", word]
            else:
                own_words.append(word)
        elif flags.get(flag) or flag in ("-h", "--help"):
            switches.append(word)
        else:
            if flag not in flags:
                _refuse_unknown(flag, flags)
            target = own_words if flag in flags else job_words
            value = None if equals_sign else value_behind("", words_left)
            target += [word] if value is None else [word, value]
    return [*own_words, *switches], job_words


def _flag(name: str) -> str:
    """Flag of an option, from its name or from the flag as it was written."""
    text = name.replace("_", "-")
    if text.startswith("-"):
        return text
    return f"--{text}"


def _refuse_unknown(flag: str, own_flags: Collection[str]) -> None:
    """Refuse a flag that is no key of the job file, and resembles an own flag or can't be used here."""
    if flag == "--resume":
        fix = "leave it out, since a new run begins; the last line of `python jobs/show.py RUN` goes on with one"
        raise ConfigError("CFG001", "unknown flag --resume", fix=as_installed(fix))
    matches = get_close_matches(flag, own_flags, n=1)
    if matches and "." not in flag:
        raise ConfigError("CFG001", f"unknown flag {flag}", fix=f"did you mean {matches[0]}?")


def rerun(folder: Path, words: Sequence[str], accepts_changes: bool, is_dry_run: bool) -> None:
    """Start the job of a run again under a new name.

    Args:
        folder: directory of the run.
        words: further job files and flags, which override the run's job file.
        accepts_changes: whether to start even if something has changed since the run.
        is_dry_run: whether to make only the checks of a start.

    Raises:
        ConfigError: RUN003, something has changed; RUN001, the name is that of the run itself; or as `load`.
        DataError: DATA044, the account of the run's start can't be understood.
        HyphaError: as the start of the job.

    """
    from hypha_ray.driver.start import own_command, start
    from hypha_ray.history.account import job_name
    from hypha_ray.history.overview import readable
    from hypha_ray.telemetry.sinks.files import read_json

    with Phases() as phases:
        phases.begin(f"comparing with {folder.name}")
        provenance = read_json(folder / PROVENANCE)
        with readable(folder / PROVENANCE):
            name = job_name(provenance)
            job_folder = job_folder_of(provenance)
        arguments = arguments_of(folder, provenance, words)
        _become(name, arguments, job_folder)
        loaded_job = load([*arguments, "--dry-run"] if is_dry_run else arguments)
        changes = _changes(folder, provenance, loaded_job)
    print_notes(changes)
    if changes and not accepts_changes:
        problem = f"run {folder.name} can't be repeated as it was"
        differences_text = counted(len(changes), "difference")
        raise ConfigError(
            "RUN003", problem, differences_text, "none", "undo what the notes name, or accept it by --anyway"
        )
    print_notes([f"this is {shlex.join(own_command())}"])
    start(loaded_job, name)


def _become(job_name: str, arguments: Sequence[str], job_folder: Path) -> None:
    """Make this process one of a training job, which tells its own command, by which the run can be continued."""
    script = Path(sys.argv[0]).with_name(f"{job_name}.py")
    if job_folder != Path.cwd():
        script = script.absolute()
        if "HYPHA_RAY_HOME" in os.environ:
            os.environ["HYPHA_RAY_HOME"] = str(home())  # The value may be relative to this folder.
        os.chdir(job_folder)
    sys.argv = [str(script), *arguments]
    look_beside_the_job()


def _changes(folder: Path, provenance: Mapping[str, Any], loaded_job: Loaded) -> list[str]:
    """Changes since a run, in a line each, for a job that has another name.

    Raises:
        ConfigError: RUN001, the job has the same name.

    """
    from hypha_ray.driver.run_provenance import changes_since

    run = loaded_job.job.run
    if runs(run.dir) / str(run.name) == folder:
        problem = f"run.name: {folder.name!r} is the run that is to be repeated"
        raise ConfigError("RUN001", problem, fix="choose another run.name, or leave it out")
    return list(changes_since(folder, provenance, loaded_job.job))


def arguments_of(folder: Path, provenance: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """Arguments of the training job that repeats a run, for the working directory that `job_folder_of` returns.

    Args:
        folder: directory of the run.
        provenance: account of the run's last start; empty if there is none.
        words: further job files and flags, as they are meant in the present working directory.

    Raises:
        ConfigError: a job file can't be read, or a flag is wrong.

    """
    from hypha_ray.model.sources import IDENTITY
    from hypha_ray.telemetry.sinks.files import read_json

    current_folder = Path.cwd()
    moves = job_folder_of(provenance) != current_folder
    if moves:
        words = _with_absolute_files(words)
    user_settings = _settings_of(words)
    user_keys = {setting.path for setting in user_settings}
    arguments = ["@", str(folder / CONFIG)]
    if _NAME not in user_keys:
        stem = _TIME_SUFFIX.sub("", folder.name)[:_LONGEST_STEM]
        arguments += ["--run.name", f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"]
    if _DIR not in user_keys:
        arguments += ["--run.dir", str(folder.parent)]
    arguments += _pins(read_json(folder / IDENTITY), user_keys)
    if moves:
        return [
            *arguments,
            *words,
            *_absolute_inputs(user_settings, current_folder),
            *_absolute_outputs(user_settings, current_folder),
        ]
    if "folder" in provenance:
        run_settings = from_document(read(str(folder / CONFIG)))
        arguments += _absolute_inputs(run_settings, Path(provenance["folder"]), missing_in=current_folder)
    return [*arguments, *words]


def _settings_of(words: Sequence[str]) -> list[Setting]:
    """Settings of job files and flags, from left to right."""
    command = from_arguments(words)
    settings: list[Setting] = []
    for file in command.files:
        settings += from_document(read(file))
    return [*settings, *command.flags]


def _with_absolute_files(words: Sequence[str]) -> list[str]:
    """Words of a job file with absolute paths of the files behind ``@``."""
    absolute_words: list[str] = []
    for number, word in enumerate(words):
        path = find_file(word)
        if number and words[number - 1] == "@" and path.exists():
            absolute_words.append(str(path.absolute()))
        else:
            absolute_words.append(word)
    return absolute_words


def _pins(identity: Mapping[str, str], user_keys: Collection[KeyPath]) -> list[str]:
    """Flags with the commits of hub repositories that the run began with, unless the user names other ones."""
    flags: list[str] = []
    for table in _PINNED_TABLES:
        path = tuple(table.split("."))
        commit = identity.get(f"{table}.revision")
        if commit is not None and not {(*path, "repository"), (*path, "revision")} & set(user_keys):
            flags += [f"--{table}.revision", commit]
    return flags


def _absolute_inputs(settings: Iterable[Setting], folder: Path, missing_in: Path | None = None) -> list[str]:
    """Flags with absolute paths of files and folders that settings name as seen from a folder, and that exist.

    Those that exist as seen from `missing_in`, too, are left out.
    """
    flags: list[str] = []
    for setting in settings:
        name = relative_path(setting, INPUTS)
        if name is None or not (folder / name).exists():
            continue
        if missing_in is None or not (missing_in / name).exists():
            flags += [f"--{dotted(setting.path)}", str(folder / name)]
    return flags


def _absolute_outputs(settings: Iterable[Setting], folder: Path) -> list[str]:
    """Flags with absolute paths of the folders that settings name for results, as seen from a folder."""
    flags: list[str] = []
    for setting in settings:
        name = relative_path(setting, _OUTPUTS)
        if name is not None:
            flags += [f"--{dotted(setting.path)}", str(folder / name)]
    return flags


def job_folder_of(provenance: Mapping[str, Any]) -> Path:
    """Folder that the job is to run in: that of the run's start, if it is here and has no other hypha_ray.

    Ray's workers import modules from this folder first. A submitted job stays in the folder that Ray gives it.
    """
    from hypha_ray.driver.run_provenance import CHECKOUT

    current_folder = Path.cwd()
    recorded_folder = provenance.get("folder")
    if recorded_folder is None or "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return current_folder
    folder = Path(recorded_folder)
    if not os.access(folder, os.R_OK | os.X_OK):
        return current_folder
    has_other_package = (folder / "hypha_ray" / "__init__.py").is_file() and folder != CHECKOUT
    return current_folder if has_other_package else folder
