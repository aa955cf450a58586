"""Preparation of a dataset from a source.

 source ─► rows, files or documents ─► samples of a kind ─► slices of both splits ─► manifest, last

Each kind of dataset is a file in `kinds`, and a line in the table of `hypha_ray.plugins`.
The output is a folder whose files are moved into place at the end, or uploads to a URL.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote

from fsspec.callbacks import Callback
from pydantic import JsonValue

from hypha_ray.data.catalogue import UNFINISHED, MissingError, UrlFolder, is_url, modality_of, name_of
from hypha_ray.data.encoders import FOLDER, PLAIN, PREPROCESSOR, read_template
from hypha_ray.data.kinds.kind import Kind, Report, SliceWriter, own_kind
from hypha_ray.data.manifest import MANIFEST, Manifest
from hypha_ray.data.options import GENERATED, PrepareOptions
from hypha_ray.data.provenance import Account, MadeBy, readable
from hypha_ray.data.sources.documents import require_source
from hypha_ray.errors import ConfigError, DataError, HyphaError, TryAgainError
from hypha_ray.files import files_hash, has_ended
from hypha_ray.model.sources import local_folder
from hypha_ray.plugins import find, is_built_in, sources
from hypha_ray.remote_files import open_url
from hypha_ray.texts import redacted, redacted_tree
from hypha_ray.types import SLICES_PER_PART

_CLAIM: Final = "preparing"
"""Name of the file by which a preparation claims a URL."""
_CONFIGURATION: Final = "config.json"
"""Name of a file that a model's folder has beside its weights, and a dataset's never."""
_UNRECORDED: Final = frozenset({"source", "out", "name", "overwrite", "report"})
"""Options that aren't in the record: the source, which has a field of its own, and those that change no sample."""
_NOT_ALLOWED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Numbers of errors that more space doesn't cure."""


@contextmanager
def staged(out: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder for slices, tokenizer and manifest, which are moved to `out` at the end.

    Files of an unfinished preparation are replaced. Other files in `out` stay.

    Raises:
        ConfigError: `out` already has a dataset and `overwrite` isn't set, or is a file.
        DataError: `out` can't be written.
        TryAgainError: another process prepares a dataset there.

    """
    if out.exists() and not out.is_dir():
        raise ConfigError("PREP003", f"--out {out} is a file", fix="name a folder")
    work_folder = out / UNFINISHED
    created = not out.exists()
    with _explained(out), _locked(out):
        _require_empty(out, overwrite)
        try:
            shutil.rmtree(work_folder, ignore_errors=True)
            work_folder.mkdir(parents=True)
            yield work_folder
        except BaseException:
            shutil.rmtree(out if created else work_folder, ignore_errors=True)
            raise
        # From here on, the inner folder marks a folder without a manifest as unfinished.
        _clear(out)
        for path in sorted(work_folder.iterdir(), key=lambda path: path.name == MANIFEST):
            path.replace(out / path.name)
        work_folder.rmdir()


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        fix = "free some space, or choose another --out"
        if error.errno in _NOT_ALLOWED:
            fix = "choose another --out, where you may write"
        raise DataError("DATA009", f"{error.filename or out} can't be written", reason, fix=fix) from error


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """The folder, made if need be, with a lock against other preparations, which ends with the process.

    Raises:
        TryAgainError: PREP016, another process has the lock.

    """
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY)
    try:
        with suppress(OSError):  # Some network file systems have no locks of folders.
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = "wait until it has ended, or choose another --out"
                raise TryAgainError("PREP016", f"another process prepares a dataset in {out}", fix=fix) from None
        yield
    finally:
        os.close(descriptor)


def _require_empty(out: Path, overwrite: bool) -> None:
    if not (out / MANIFEST).exists() and (out / _CONFIGURATION).exists() and any(out.glob("*.safetensors")):
        raise ConfigError("PREP003", f"--out {out} has the weights of a model", fix="name another folder")
    unfinished = (out / UNFINISHED).exists() and not (out / MANIFEST).exists()
    if not overwrite and not unfinished and _belongings(out):
        fix = "add --overwrite, or choose another --out"
        raise ConfigError("PREP004", f"{out} already contains a dataset", fix=fix)


def _clear(out: Path) -> None:
    """Remove the old dataset, manifest first: without a manifest it doesn't count as complete."""
    for path in _belongings(out):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _belongings(out: Path) -> list[Path]:
    """Files of a dataset, the manifest first."""
    slices = sorted(out.glob("*.safetensors"))
    return list(filter(Path.exists, (out / MANIFEST, out / FOLDER, out / PREPROCESSOR, *slices)))


@dataclass(frozen=True, slots=True)
class Upload:
    """A folder of this machine, and the folder at a URL that its files go to."""

    folder: Path
    destination: UrlFolder
    claim: bytes
    """Content of the file at the URL that tells other preparations of this one."""

    def slice(self, file: Path) -> None:
        """Move a slice to the URL."""
        self.require_claim()
        self.destination.put(file, file.name)
        file.unlink()

    def require_claim(self) -> None:
        """Refuse to write beside another process that has taken the URL over.

        Raises:
            TryAgainError: PREP016, another process has taken it.

        """
        if _claim_at(self.destination) != self.claim:
            problem = f"another process has begun to prepare a dataset at {redacted(self.destination.url)}"
            raise TryAgainError("PREP016", problem, fix="wait until it has ended, or choose another --out")


def _claim_at(destination: UrlFolder) -> bytes | None:
    """Content of the file by which a process claims a URL; None without one."""
    try:
        return destination.read(_CLAIM)
    except MissingError:
        return None


@contextmanager
def _claimed(destination: UrlFolder, overwrite: bool) -> Iterator[bytes]:
    """Claim a URL by a file, whose content is yielded and which is removed at the end.

    The claim of a process of this machine that was killed is replaced, as is any with `overwrite`.

    Raises:
        TryAgainError: PREP016, another process has claimed it.

    """
    claim = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}\n".encode()
    has_claim = _claim_at(destination)
    if has_claim is not None and (overwrite or _is_abandoned(has_claim)):
        destination.remove(_CLAIM)
    if not destination.create(_CLAIM, claim):
        problem = f"another process prepares a dataset at {redacted(destination.url)}"
        fix = "wait until it has ended; if it was killed, add --overwrite"
        raise TryAgainError("PREP016", problem, (has_claim or b"").decode("utf-8", "replace").strip(), fix=fix)
    try:
        yield claim
    finally:
        if _claim_at(destination) == claim:
            destination.remove(_CLAIM)


def _is_abandoned(claim: bytes) -> bool:
    """Whether a claim is that of a process of this machine that has ended."""
    host, _, rest_text = claim.decode("utf-8", "replace").partition(" ")
    process, _, _ = rest_text.partition(" ")
    return host == socket.gethostname() and has_ended(process)


@contextmanager
def uploaded(url: str, overwrite: bool) -> Iterator[Upload]:
    """A new folder of this machine for tokenizer and manifest, which are copied to the URL at the end, manifest last.

    Raises:
        ConfigError: the URL already has a dataset and `overwrite` isn't set, or can't be written.
        TryAgainError: PREP016, another process prepares a dataset there.
        HyphaError: the URL can't be reached.

    """
    destination = UrlFolder(url)
    if url.startswith(("http:", "https:")):
        raise ConfigError("CFG003", "--out can't be written by HTTP", redacted(url), "s3, gs, hf or file, or a folder")
    with _claimed(destination, overwrite) as claim, tempfile.TemporaryDirectory() as folder:
        _empty(destination, overwrite)
        upload = Upload(Path(folder), destination, claim)
        yield upload
        files = filter(Path.is_file, Path(folder).rglob("*"))
        for path in sorted(files, key=lambda path: path.name == MANIFEST):
            upload.require_claim()
            destination.put(path, str(path.relative_to(folder)))


def _empty(destination: UrlFolder, overwrite: bool) -> None:
    """Remove an unfinished dataset at a URL, and a finished one if it may be overwritten."""
    if destination.exists(MANIFEST):
        if not overwrite:
            fix = "add --overwrite, or choose another --out"
            raise ConfigError("PREP004", f"{redacted(destination.url)} already contains a dataset", fix=fix)
        destination.remove(MANIFEST)  # First: without a manifest it doesn't count as complete.
    for name in destination.sizes(""):
        is_slice = "/" not in name and name.endswith(".safetensors")
        if is_slice or name.startswith((f"{FOLDER}/", f"{PREPROCESSOR}/")):
            destination.remove(name)


def prepare(options: PrepareOptions, report: Report, date: str | None = None) -> Manifest:
    """Make the dataset; equal options and dates give equal bytes.

    Args:
        options: the command.
        report: receives the progress.
        date: the time of the command, for the manifest; None: the manifest has none.

    Raises:
        ConfigError: an option is out of range, or there already is a dataset.
        DataError: the source is missing, damaged or too small.
        HyphaError: a hub can't be reached or requires a token.

    """
    options.check()
    if is_built_in("dataset_kinds", options.kind_name):
        _check_files(options)
    if not is_url(options.source):
        return _prepare(options, options, report, date)
    if not is_url(str(options.out)):
        _require_empty(options.folder, options.overwrite)  # As is asked again, once the source is here.
    with _fetched(options, report) as local_options:
        return _prepare(local_options, options, report, date)


def _prepare(options: PrepareOptions, command: PrepareOptions, report: Report, date: str | None) -> Manifest:
    """Make the dataset from a source on this machine or a hub, for a command that may name it by a URL."""
    kind = _kind(options.kind_name)
    account = Account(kind.used)
    part = options.numbered_part
    first_slice = 0 if part is None else part[0] * SLICES_PER_PART
    with ExitStack() as outputs:
        if is_url(str(options.out)):
            upload = outputs.enter_context(uploaded(str(options.out), options.overwrite))
            folder = upload.folder
            name = name_of(upload.destination.url)
            writer = SliceWriter(folder, options.samples_per_slice, report, first_slice, upload.slice)
        else:
            folder = outputs.enter_context(staged(options.folder, options.overwrite))
            name = options.folder.resolve().name
            writer = SliceWriter(folder, options.samples_per_slice, report, first_slice)
        preprocessor = kind.write(options, writer, report, account)
        manifest = Manifest(
            name=readable(name),
            modality=kind.modality or modality_of(writer.tensors),
            slices=tuple(writer.slices),
            tensors=writer.tensors,
            preprocessor=preprocessor,
            tokens=writer.tokens,
            classes=writer.classes,
            made_by=made_by(command, date, writer.hashes),
            origin=None if options.source == "digits" else account.origin(),
            part=part,
        )
        manifest.save(folder)
    return manifest


class _Transfer(Callback):  # type: ignore[misc] # fsspec has no types
    """Counts the bytes that are copied from a URL."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def relative_update(self, inc: int = 1) -> None:
        """Count some more bytes; fsspec calls it."""
        self._report("bytes fetched", inc)


@contextmanager
def _fetched(options: PrepareOptions, report: Report) -> Iterator[PrepareOptions]:
    """A command with a copy of the source at its URL, which is there until the context ends; errors name the URL.

    Raises:
        HyphaError: there is no such source, it can't be reached, or doesn't fit the options.

    """
    with tempfile.TemporaryDirectory() as scratch:
        path = str(_copy_of(options.source, Path(scratch), _Transfer(report)))
        try:
            local_options = replace(options, source=path)
            local_options.check()
            yield local_options
        except HyphaError as error:
            url, _, _ = redacted(options.source).partition("?")
            for field in ("what", "got", "allowed", "fix"):
                setattr(error, field, getattr(error, field).replace(path, url))
            raise


def _copy_of(url: str, scratch: Path, progress: Callback) -> Path:
    """Copy a file or a folder at a URL to a folder of this machine; a folder of this machine stays where it is.

    Raises:
        ConfigError: PREP001, a folder of a web server, which doesn't say what it has.
        HyphaError: as `UrlFolder`.

    """
    address, mark, query = url.partition("?")
    is_web = url.startswith(("http:", "https:"))
    if is_web and address.endswith("/"):
        problem = "--source is a folder of a web server, which has no list of its files"
        raise ConfigError("PREP001", problem, redacted(url), "the URL of a file", "name one, or download all of them")
    if url.startswith("file:"):
        _, path = open_url(url)
        return Path(path)
    above, _, name = address.rstrip("/").rpartition("/")
    folder = UrlFolder(url)
    copy = scratch / (Path(unquote(name)).name or "source")
    names: list[str] = []
    if not is_web:
        names = sorted(filter(None, folder.sizes("")))
    if not names:
        UrlFolder(f"{above}{mark}{query}").get(name, copy, progress)
    for name in names:
        file = copy.joinpath(*(part for part in name.split("/") if part not in ("", "..")))
        file.parent.mkdir(parents=True, exist_ok=True)
        folder.get(name, file, progress)
    return copy


def _check_files(options: PrepareOptions) -> None:
    """Refuse files and folders that aren't there, before libraries are loaded or anything is read."""
    has_place = options.source not in ("stdlib", "digits") and not options.source.startswith(GENERATED)
    if has_place and not is_url(options.source):
        require_source(options.source)
    for repository in (options.tokenizer, options.preprocessor):
        if repository is not None and repository not in PLAIN:
            local_folder(repository)
    if options.chat_template is not None:
        read_template(options.chat_template)


def _kind(name: str) -> Kind:
    if not is_built_in("dataset_kinds", name):
        return own_kind(name)
    kind: Kind = find("dataset_kinds", name)
    return kind


def made_by(options: PrepareOptions, date: str | None, hashes: Mapping[str, str] = MappingProxyType({})) -> MadeBy:
    """Record of the command, without secrets of URLs; it has the hash of a kind that the user brings.

    Args:
        options: the command.
        date: its time; None: unknown.
        hashes: hashes of models that samples depend on, by name.

    """
    record: dict[str, JsonValue] = {}
    for option in fields(options):
        value = getattr(options, option.name)
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if option.name not in _UNRECORDED and value != default:
            record[option.name] = redacted_tree(str(value) if isinstance(value, Path) else value)
    if options.kind is not None:
        files = sources("dataset_kinds", options.kind)
        if files:
            record["kind_sha256"] = files_hash(files)
    record.update(hashes)
    return MadeBy(redacted(options.source), record, _version(), date)


def _version() -> str | None:
    with suppress(PackageNotFoundError):
        return version("hypha_ray")
    return None
