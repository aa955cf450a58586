"""Identity of what a run is trained with, beside its samples: weights, tokenizers and users' own code, by hash.

A run keeps it from its first start on. Every process that starts later, on whichever machine, holds its own to that.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.config.checks import source_hashes
from hypha_ray.config.compare import defines_training
from hypha_ray.config.keys import key_at
from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.config.tables.rewards import RewardModel
from hypha_ray.errors import CheckpointError, HyphaError
from hypha_ray.files import files_hash, with_imports
from hypha_ray.model.loading.hub import base_of, fetch

IDENTITY = "identity.json"
"""File in a run directory with the hashes, by the key of the job file that names each thing."""
_REPLACEABLE = ("rl.reward.", "trainer ")
"""Beginnings of the keys that a resumed run may change, as it may change other rewards."""
_WHOLE_BYTES = 1 << 26
"""Size up to which a file is read as a whole."""
_SPOTS = 256
_SPOT_BYTES = 4096
"""Number of places of a larger file that are read, and the size of each: training changes weights everywhere."""
_SNAPSHOTS = "snapshots"
"""Folder of a hub's cache that has a folder for each commit."""
_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".txt", ".model", ".py"})
"""Endings of the files of a repository that are ever read."""


def pinned(job: Job, known: Mapping[str, str]) -> Job:
    """The job with the commit of each hub repository as its revision, resolved when the run begins and never again.

    Args:
        job: the job file.
        known: identity that the run began with; empty at its beginning.

    Raises:
        HyphaError: a hub refuses or can't be reached.

    """
    token = None if job.model.token is None else job.model.token.get_secret_value()
    tables: dict[str, Model | Preprocessor | RewardModel] = {
        "model": job.model,
        "preprocessor": job.preprocessor,
        "rl.reward.model": job.rl.reward.model,
    }
    commits: dict[str, str] = {}
    for name, table in tables.items():
        if table.repository and not _is_local(table.repository):
            commit = known.get(f"{name}.revision") or _commit(table.repository, table.revision, token)
            commits |= {name: commit} if commit else {}
    updates = {name: tables[name].model_copy(update={"revision": commit}) for name, commit in commits.items()}
    judge = updates.pop("rl.reward.model", job.rl.reward.model)
    rl = job.rl.model_copy(update={"reward": job.rl.reward.model_copy(update={"model": judge})})
    return job.model_copy(update={**updates, "rl": rl})


def identity_of(job: Job) -> dict[str, str]:
    """Hash of each thing that a job names and that is on this machine, by its key; of a hub's repository the commit."""
    return dict(_parts(job))


def require_same(job: Job, known: Mapping[str, str]) -> None:
    """Refuse to train with something else than the run began with.

    Raises:
        CheckpointError: CKPT007, something has changed, or is another one on this machine.

    """
    changed = changes(identity_of(job), known)
    if changed:
        raise other(changed)


def changes(here: Mapping[str, str], known: Mapping[str, str]) -> list[str]:
    """Keys of what is another thing here; what either side lacks isn't compared."""
    return [key for key, value in here.items() if known.get(key, value) != value]


def is_replaceable(key: str) -> bool:
    """Whether a resumed run may go on with another thing under a key, as it may with another value of the setting."""
    path = tuple(key.partition(" ")[0].split("."))
    names_member = (setting := key_at(path)) is not None and setting.family is not None
    return key.startswith(_REPLACEABLE) or (names_member and not defines_training(path))


def other(changed: list[str]) -> CheckpointError:
    """Error that things of these keys aren't those that the run began with."""
    what = f"{', '.join(changed)}: the content has changed since the run began, or is another one on this machine"
    fix = "put back what was there, the same on each machine, or choose another run.name"
    if all(map(is_replaceable, changed)):
        fix = f"{fix}; --resume goes on with it as it is now"
    return CheckpointError("CKPT007", what, fix=fix)


def _parts(job: Job) -> Iterator[tuple[str, str]]:
    yield from _of_repository("model", job.model.repository, job.model.revision)
    base = _base(job.model)
    if base != job.model.repository:
        yield from _of_repository("model.base", base, None)
    yield from _of_repository("preprocessor", job.preprocessor.repository, job.preprocessor.revision)
    if job.rl.algorithm is not None:
        judge = job.rl.reward.model
        yield from _of_repository("rl.reward.model", judge.repository, judge.revision)
    yield from source_hashes(job).items()
    for command in sorted({group.command for group in job.worker_groups if group.command}):
        if (digest := _script_hash(command)) is not None:
            yield f"trainer {command!r}", digest


def _of_repository(table: str, repository: str | None, revision: str | None) -> Iterator[tuple[str, str]]:
    if repository and _is_local(repository):
        yield f"{table}.repository", folder_hash(Path(repository).expanduser())
    elif repository and revision:
        yield f"{table}.revision", revision


def _base(model: Model) -> str | None:
    """Repository of the model below an adapter; that of the model if it is none, or can't be looked at."""
    try:
        return base_of(model)[0].repository
    except (HyphaError, OSError):
        return model.repository


def _is_local(repository: str) -> bool:
    return Path(repository).expanduser().is_dir()


def _commit(repository: str, revision: str | None, token: str | None) -> str | None:
    """Commit of a hub's repository that a branch or tag stands for now; None if the cache doesn't tell."""
    folder = fetch(repository, revision, token)
    return folder.name if folder.parent.name == _SNAPSHOTS else None


def folder_hash(folder: Path) -> str:
    """Hash of names, sizes and contents of a model's or tokenizer's files; of large files it has samples and the head.

    It depends on no time or path, so it is the same for copies on other machines.
    """
    sha256 = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES and file.is_file()):
        size = file.stat().st_size
        sha256.update(repr((file.name, size)).encode())
        with file.open("rb") as content:
            for start, length in _spots(size):
                content.seek(start)
                sha256.update(content.read(length))
    return sha256.hexdigest()


def _spots(size: int) -> list[tuple[int, int]]:
    """Begin and length of the parts of a file that are read: all of a small one, otherwise the head and samples."""
    if size <= _WHOLE_BYTES:
        return [(0, size)]
    step = (size - _SPOT_BYTES) / (_SPOTS - 1)
    return [(0, 1 << 20), *((int(number * step), _SPOT_BYTES) for number in range(_SPOTS))]


def _script_hash(command: str) -> str | None:
    """Hash of the files that a command line names, with the modules beside them; None if it names none."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    files = {file for word in words[1:] if Path(word).is_file() for file in with_imports(Path(word))}
    return files_hash(files) if files else None
