"""Sources of a run: model repositories as local folders, and hashes of weights, tokenizers and users' own code.

A hub id is downloaded or found in the cache, and a path is used as it is. Only configuration, tokenizer and safetensors
files are fetched. Every refusal of a hub becomes one of our errors here, so that other modules read local files only. A
repository may be an adapter that PEFT wrote, whose configuration names its base model.

A run stores the hashes, its identity, at its first start. Every process that starts later, on any machine, compares its
own files with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants, errors, snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2, by its version

from hypha_ray.config import Job
from hypha_ray.config.checks import source_hashes
from hypha_ray.config.keys import key_at
from hypha_ray.config.load import defines_training
from hypha_ray.config.rl import RewardModel
from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.errors import AuthenticationError, CheckpointError, ConfigError, HubError, HyphaError, first_line
from hypha_ray.files import files_hash, with_imports

REMOTE_CODE_VARIABLE: Final = "HYPHA_RAY_ALLOW_REMOTE_CODE"
"""Environment variable that allows code of repositories on a node."""

_SETTINGS: Final = ["*.json", "*.txt", "*.model"]
_NAMED_TEMPLATES: Final = "additional_chat_templates/*.jinja"
_TEMPLATES: Final = ["chat_template.jinja", _NAMED_TEMPLATES]
_WEIGHTS: Final = ["*.safetensors"]
_CODE: Final = ["*.py"]
_IN_FOLDERS: Final = [f"*/{pattern}" for pattern in (*_SETTINGS, *_WEIGHTS, *_CODE)]
_LEFT_OUT: Final = [*_IN_FOLDERS, "additional_chat_templates/*/*", "consolidated*"]
CONFIGURATION: Final = "adapter_config.json"
TASK: Final = "task.json"
"""File with the task of a saved model: its architecture may have several tasks, and the job may choose tensors."""
BASE: Final = "base"
"""Key of that file with the path of an adapter's base model from its folder, by the absolute one that it had."""
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


def local_folder(repository: str) -> Path | None:
    """Return the folder of a local repository; None for a hub id.

    Raises:
        ConfigError: HUB001, a path leads to no folder.

    """
    path = Path(repository).expanduser()
    if path.is_dir():
        return path
    if path.exists() or repository.startswith(("/", "./", "../", "~")):
        raise ConfigError(
            "HUB001",
            "model repository is not a folder" if path.exists() else "model folder doesn't exist",
            str(path),
            fix="give a folder that save_pretrained() wrote, or a hub id such as owner/name",
        )
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a folder.

    Raises:
        CheckpointError: the file is missing or damaged.

    """
    file = folder / "config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        allowed = "a folder with a saved model"
        raise CheckpointError("MODEL005", f"{file} can't be read", str(error), allowed, "give such a folder") from None
    if not isinstance(settings, dict):
        raise CheckpointError("MODEL005", f"{file} is no model configuration", type(settings).__name__, "an object")
    return settings


def fetch(
    repository: str, revision: str | None, token: str | None, *, needs_weights: bool = False, needs_code: bool = False
) -> Path:
    """Return a folder with a repository's files.

    Args:
        repository: folder, or hub id `name` or `owner/name`.
        revision: branch, tag or commit on the hub; None: the default branch.
        token: hub token; None: `HF_TOKEN` of the environment.
        needs_weights: fetch weights, too.
        needs_code: fetch Python files, too.

    Raises:
        ConfigError: the id is malformed, or folder, repository or revision doesn't exist.
        AuthenticationError: the repository requires a token, or another one.
        HubError: the hub can't be reached and the cache lacks the files.
        CheckpointError: the repository has no safetensors weights.

    """
    folder = local_folder(repository)
    if folder is None:
        patterns = [*_SETTINGS, *_TEMPLATES]
        if needs_weights:
            patterns += _WEIGHTS
        if needs_code:
            patterns += _CODE
        folder = _download(repository, revision, token, patterns)
    if needs_weights and not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        raise CheckpointError(
            "SEC003",
            f"model repository {repository} has no safetensors weights",
            ", ".join(pickled),
            "*.safetensors; pickled weights could run code",
            "convert them with save_pretrained(), or choose another revision",
        )
    return folder


def hub_token(model: Model) -> str | None:
    """Return the hub token of a job's model; None: `HF_TOKEN` of the environment."""
    if not model.token:
        return None
    return model.token.get_secret_value()


def remote_code_allowed(trust_remote_code: bool) -> bool:
    """Return whether code of a repository may run: the job asks for it, and this node allows it."""
    return trust_remote_code and os.environ.get(REMOTE_CODE_VARIABLE) == "1"


def _download(repository: str, revision: str | None, token: str | None, patterns: list[str]) -> Path:
    with _hub_errors(repository, revision):
        files = snapshot_download(
            repository, revision=revision, token=token, allow_patterns=patterns, ignore_patterns=_LEFT_OUT
        )
        return Path(str(files))


@contextmanager
def _hub_errors(repository: str, revision: str | None) -> Iterator[None]:
    """Turn exceptions of huggingface_hub into our errors."""
    try:
        yield
    except errors.HFValidationError:
        raise ConfigError(
            "CFG010", "model.repository is malformed", repr(repository), "a folder, or a hub id name or owner/name"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError("HUB001", f"model repository {repository} has no such revision", repr(revision)) from None
    except (OSError, HTTPError) as error:
        raise _refusal(repository, error) from None


def _refusal(repository: str, error: Exception) -> ConfigError | AuthenticationError | HubError:
    """Return our error for a hub that refuses, or that doesn't answer."""
    answer: BaseException | None = error
    if isinstance(error, errors.LocalEntryNotFoundError):
        answer = error.__cause__
    status = answer.response.status_code if isinstance(answer, errors.HfHubHTTPError) else None
    if status in (401, 403):
        return AuthenticationError(
            "HUB002",
            f"the hub refuses access to {repository}",
            f"HTTP {status}",
            fix="check the name; if it is private or gated, ask for access and set HF_TOKEN",
        )
    if status == 404:
        return ConfigError(
            "HUB001", f"the hub has no model repository {repository}", fix="check the name, or give a local folder"
        )
    return _unreachable(repository, error)


def _unreachable(repository: str, error: Exception) -> HubError:
    """Return our error for a hub that doesn't answer, or that isn't asked because of `HF_HUB_OFFLINE`."""
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else first_line(error)
    return HubError(
        "HUB003",
        f"{repository} is neither a local folder nor whole in the cache, and can't be fetched: offline ({reason})",
        fix=f"check the network and HF_HUB_OFFLINE, or fill the cache {constants.HF_HUB_CACHE}",
    )


def base_of(model: Model) -> tuple[Model, Path | None]:
    """Return a model's table with the base model as its repository, and the folder of the adapter.

    An adapter that this package saved has the names of its labels, which are defaults for those of the job file.

    Returns:
        The table as it is and None, unless the repository is an adapter.

    Raises:
        HyphaError: the repository can't be fetched, or the adapter names no base model.

    """
    if not model.repository:
        return model, None
    token = hub_token(model)
    folder = fetch(model.repository, model.revision, token)
    if not (folder / CONFIGURATION).is_file() or (folder / "config.json").is_file():
        return model, None
    settings = _read(folder / CONFIGURATION)
    base = settings.get("base_model_name_or_path")
    revision = settings.get("revision")
    if not base or not isinstance(base, str):
        problem = f"adapter {model.repository} doesn't name its base model"
        fix = f"set base_model_name_or_path in its {CONFIGURATION} to the model that it was made for"
        raise CheckpointError("MODEL006", problem, repr(base), "a folder or hub id", fix)
    task: dict[str, Any] = {}
    if (folder / TASK).is_file():
        task = _read(folder / TASK)
    config = {**(task.get("labels") or {}), **(model.config or {})}
    relative_paths = task.get(BASE) or {}
    repository = _base_repository(base, relative_paths.get(base), folder)
    _require_base(repository, revision, token, folder / CONFIGURATION)
    base_keys = {"repository": repository, "revision": revision, "config": config or None}
    return model.model_copy(update=base_keys), folder


def _base_repository(base: str, relative_path: str | None, folder: Path) -> str:
    """Return the repository of a base model: a path, also one relative to the adapter's folder, or the name itself."""
    for path in (base, relative_path):
        if path is not None:
            beside = folder / Path(path).expanduser()
            if beside.is_dir():
                return str(beside.resolve())
    return base


def _require_base(base: str, revision: str | None, token: str | None, file: Path) -> None:
    """Refuse an adapter whose base model can't be fetched, and name the key of the adapter's file."""
    try:
        fetch(base, revision, token)
    except HyphaError as error:
        problem = f"{error.what}, which is the base model by base_model_name_or_path in {file}"
        fix = f"set base_model_name_or_path in {CONFIGURATION} to the base model's folder or hub id; {error.fix}"
        raise type(error)(error.code, problem, error.got, error.allowed, fix.removesuffix("; ")) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError("MODEL006", f"{file} can't be read", str(error), fix="copy the folder afresh") from None
    if not isinstance(settings, dict):
        got = type(settings).__name__
        raise CheckpointError("MODEL006", f"{file} is no description of an adapter", got, "an object")
    return settings


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
    changed_sources = changes(identity_of(job), stored)
    if changed_sources:
        raise changed_error(changed_sources)


def changes(present_hashes: Mapping[str, str], stored_hashes: Mapping[str, str]) -> list[str]:
    """Return the keys of inputs that differ from the stored ones; keys that either side lacks aren't compared."""
    return [key for key, value in present_hashes.items() if stored_hashes.get(key, value) != value]


def is_replaceable(key: str) -> bool:
    """Whether a resumed run may go on with another input under a key, as with another value of the setting."""
    if key.startswith(_REPLACEABLE):
        return True
    name, _, _ = key.partition(" ")
    path = tuple(name.split("."))
    setting = key_at(path)
    names_member = setting is not None and setting.family is not None
    return names_member and not defines_training(path)


def changed_error(changed_sources: list[str]) -> CheckpointError:
    """Return the error that the inputs of these keys aren't those that the run began with."""
    keys = ", ".join(changed_sources)
    problem = f"{keys}: the content has changed since the run began, or is another one on this machine"
    fix = "put back what was there, the same on each machine, or choose another run.name"
    if all(map(is_replaceable, changed_sources)):
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
    named_templates = folder.glob(_NAMED_TEMPLATES)
    for file in sorted((*folder.iterdir(), *named_templates)):
        if file.suffix not in _SUFFIXES or not file.is_file():
            continue
        size_bytes = file.stat().st_size
        description = repr((file.relative_to(folder).as_posix(), size_bytes))
        sha256.update(description.encode())
        with file.open("rb") as content:
            for start, part_bytes in _hashed_parts(size_bytes):
                content.seek(start)
                sha256.update(content.read(part_bytes))
    return sha256.hexdigest()


def _hashed_parts(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Return start and length of the parts of a file that are read: all of a small one, otherwise head and samples."""
    if size_bytes <= _WHOLE_BYTES:
        yield 0, size_bytes
        return
    yield 0, 1 << 20
    step = (size_bytes - _SPOT_BYTES) / (_SPOTS - 1)
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
