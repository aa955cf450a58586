"""Identity of a run's inputs beside its samples: hashes of weights, tokenizers and users' own code.

A run stores it at its first start. Every process that starts later, on any machine, compares its own files with it.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.config.checks import source_hashes
from hypha_ray.config.keys import key_at
from hypha_ray.config.load import defines_training
from hypha_ray.config.rl import RewardModel
from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.errors import CheckpointError, HyphaError
from hypha_ray.files import files_hash, with_imports
from hypha_ray.model.loading.hub import base_of, fetch, hub_token

IDENTITY = "identity.json"
"""File in a run directory with the hashes, by the keys of the job file that name the inputs."""
_REPLACEABLE = ("rl.reward.", "trainer ")
"""Beginnings of the keys that a resumed run may change, as it may change other rewards."""
_WHOLE_BYTES = 1 << 26
"""Size up to which a file is read as a whole."""
_SPOTS = 256
_SPOT_BYTES = 4096
"""Number of samples of a larger file that are read, and the size of each: training changes weights everywhere."""
_SNAPSHOTS = "snapshots"
"""Folder of a hub's cache that has a folder for each commit."""
_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".txt", ".model", ".py"})
"""Endings of the files of a repository that are ever read."""


def pinned(job: Job, stored: Mapping[str, str]) -> Job:
    """Return the job with the commit of each hub repository as its revision, resolved when the run begins.

    Args:
        job: the job file.
        stored: identity that the run began with; empty at its beginning.

    Raises:
        HyphaError: a hub refuses or can't be reached.

    """
    token = hub_token(job.model)
    tables: dict[str, Model | Preprocessor | RewardModel] = {
        "model": job.model,
        "preprocessor": job.preprocessor,
        "rl.reward.model": job.rl.reward.model,
    }
    pinned_tables: dict[str, Model | Preprocessor | RewardModel] = {}
    for name, table in tables.items():
        if not table.repository or _is_local(table.repository):
            continue
        commit = stored.get(f"{name}.revision") or commit_of(table.repository, table.revision, token)
        if commit:
            pinned_tables[name] = table.model_copy(update={"revision": commit})
    reward_model = pinned_tables.pop("rl.reward.model", job.rl.reward.model)
    reward = job.rl.reward.model_copy(update={"model": reward_model})
    rl = job.rl.model_copy(update={"reward": reward})
    return job.model_copy(update={**pinned_tables, "rl": rl})


def identity_of(job: Job) -> dict[str, str]:
    """Return the hash of each input of a job on this machine, by its key; the commit of a hub's repository."""
    return dict(_inputs(job))


def require_same(job: Job, stored: Mapping[str, str]) -> None:
    """Refuse to train with other inputs than the run began with.

    Raises:
        CheckpointError: CKPT007, an input has changed, or differs on this machine.

    """
    changed = changes(identity_of(job), stored)
    if changed:
        raise changed_error(changed)


def changes(present: Mapping[str, str], stored: Mapping[str, str]) -> list[str]:
    """Return the keys of inputs that differ from the stored ones; keys that either side lacks aren't compared."""
    return [key for key, value in present.items() if stored.get(key, value) != value]


def is_replaceable(key: str) -> bool:
    """Whether a resumed run may go on with another input under a key, as with another value of the setting."""
    if key.startswith(_REPLACEABLE):
        return True
    name, _, _ = key.partition(" ")
    path = tuple(name.split("."))
    setting = key_at(path)
    names_member = setting is not None and setting.family is not None
    return names_member and not defines_training(path)


def changed_error(changed: list[str]) -> CheckpointError:
    """Return the error that the inputs of these keys aren't those that the run began with."""
    keys = ", ".join(changed)
    problem = f"{keys}: the content has changed since the run began, or is another one on this machine"
    fix = "put back what was there, the same on each machine, or choose another run.name"
    if all(map(is_replaceable, changed)):
        fix = f"{fix}; --resume goes on with it as it is now"
    return CheckpointError("CKPT007", problem, fix=fix)


def commit_of(repository: str, revision: str | None, token: str | None) -> str | None:
    """Return the commit that a branch or tag of a hub's repository stands for now; None if the cache doesn't tell.

    Raises:
        HyphaError: the hub refuses or can't be reached.

    """
    return snapshot_commit(fetch(repository, revision, token))


def snapshot_commit(folder: Path) -> str | None:
    """Return the commit of a folder of the hub's cache; None if it is another folder."""
    return folder.name if folder.parent.name == _SNAPSHOTS else None


def _inputs(job: Job) -> Iterator[tuple[str, str]]:
    """Return key and hash of each input."""
    yield from _of_repository("model", job.model.repository, job.model.revision)
    base = _base(job.model)
    if base != job.model.repository:
        yield from _of_repository("model.base", base, None)
    yield from _of_repository("preprocessor", job.preprocessor.repository, job.preprocessor.revision)
    if job.rl.algorithm is not None:
        judge = job.rl.reward.model
        yield from _of_repository("rl.reward.model", judge.repository, judge.revision)
    yield from source_hashes(job).items()
    commands = {group.command for group in job.worker_groups if group.command}
    for command in sorted(commands):
        digest = _script_hash(command)
        if digest is not None:
            yield f"trainer {command!r}", digest


def _of_repository(table: str, repository: str | None, revision: str | None) -> Iterator[tuple[str, str]]:
    if repository and _is_local(repository):
        folder = Path(repository).expanduser()
        yield f"{table}.repository", folder_hash(folder)
    elif repository and revision:
        yield f"{table}.revision", revision


def _base(model: Model) -> str | None:
    """Return the repository of an adapter's base model; the model's own if it is no adapter, or can't be read."""
    try:
        return base_of(model)[0].repository
    except (HyphaError, OSError):
        return model.repository


def _is_local(repository: str) -> bool:
    return Path(repository).expanduser().is_dir()


def folder_hash(folder: Path) -> str:
    """Hash names, sizes and contents of a model's or tokenizer's files; large files by their head and samples.

    The hash depends on no time or path, so it is the same for copies on other machines.
    """
    sha256 = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix not in _SUFFIXES or not file.is_file():
            continue
        size = file.stat().st_size
        description = repr((file.name, size))
        sha256.update(description.encode())
        with file.open("rb") as content:
            for start, length in _hashed_parts(size):
                content.seek(start)
                sha256.update(content.read(length))
    return sha256.hexdigest()


def _hashed_parts(size: int) -> Iterator[tuple[int, int]]:
    """Return start and length of the parts of a file that are read: all of a small one, otherwise head and samples."""
    if size <= _WHOLE_BYTES:
        yield 0, size
        return
    yield 0, 1 << 20
    step = (size - _SPOT_BYTES) / (_SPOTS - 1)
    for number in range(_SPOTS):
        yield int(number * step), _SPOT_BYTES


def _script_hash(command: str) -> str | None:
    """Hash the files that a command line names, with the modules beside them; None if it names none."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    files: set[Path] = set()
    for word in words[1:]:
        if Path(word).is_file():
            files.update(with_imports(Path(word)))
    if not files:
        return None
    return files_hash(files)
