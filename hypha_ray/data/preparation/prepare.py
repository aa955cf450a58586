"""Preparation of a dataset from a source.

 source ─► rows, files or documents ─► samples of a kind ─► slices of both splits ─► manifest, last

Each kind of dataset is a file in `kinds`, and a line in the table of `hypha_ray.plugins`.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import MISSING, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from hypha_ray.data.catalogue import modality_of
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.preparation.encoders import PLAIN, read_template
from hypha_ray.data.preparation.kinds.kind import Kind, own_kind
from hypha_ray.data.preparation.options import GENERATED, PrepareOptions
from hypha_ray.data.preparation.slice_writer import Report, SliceWriter
from hypha_ray.data.preparation.sources.documents import require_source
from hypha_ray.data.preparation.staging import staged, uploaded
from hypha_ray.data.provenance import Account, MadeBy, readable
from hypha_ray.data.storage.url_folder import is_url, name_of
from hypha_ray.files import files_hash
from hypha_ray.model.loading.folders import local_folder
from hypha_ray.plugins import find, is_built_in, sources
from hypha_ray.texts import redacted, redacted_tree
from hypha_ray.types import SLICES_PER_PART

_UNRECORDED: Final = frozenset({"source", "out", "name", "overwrite", "report"})
"""Options that aren't in the record: the source, which has a field of its own, and those that change no sample."""


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
    kind = _kind(options.kind_name)
    account = Account(kind.used)
    part = options.numbered_part
    first = 0 if part is None else part[0] * SLICES_PER_PART
    with ExitStack() as outputs:
        if is_url(str(options.out)):
            upload = outputs.enter_context(uploaded(str(options.out), options.overwrite))
            folder = upload.folder
            name = name_of(upload.destination.url)
            writer = SliceWriter(folder, options.samples_per_slice, report, first, upload.slice)
        else:
            folder = outputs.enter_context(staged(options.folder, options.overwrite))
            name = options.folder.resolve().name
            writer = SliceWriter(folder, options.samples_per_slice, report, first)
        preprocessor = kind.write(options, writer, report, account)
        manifest = Manifest(
            name=readable(name),
            modality=kind.modality or modality_of(writer.tensors),
            slices=tuple(writer.slices),
            tensors=writer.tensors,
            preprocessor=preprocessor,
            tokens=writer.tokens,
            classes=writer.classes,
            made_by=made_by(options, date),
            origin=None if options.source == "digits" else account.origin(),
            part=part,
        )
        manifest.save(folder)
    return manifest


def _check_files(options: PrepareOptions) -> None:
    """Refuse files and folders that aren't there, before libraries are loaded or anything is read."""
    if options.source not in ("stdlib", "digits") and not options.source.startswith(GENERATED):
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


def made_by(options: PrepareOptions, date: str | None) -> MadeBy:
    """Record of the command, without secrets of URLs; it has the hash of a kind that the user brings.

    Args:
        options: the command.
        date: its time; None: unknown.

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
    return MadeBy(redacted(options.source), record, _version(), date)


def _version() -> str | None:
    with suppress(PackageNotFoundError):
        return version("hypha_ray")
    return None
