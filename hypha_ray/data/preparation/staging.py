"""Staging of a dataset: its files are made in an inner folder and moved into place at the end, the manifest last."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypha_ray.data.catalogue import UNFINISHED
from hypha_ray.data.manifest import MANIFEST
from hypha_ray.data.preparation.encoders import FOLDER, PREPROCESSOR
from hypha_ray.errors import ConfigError, DataError


@contextmanager
def staged(out: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder for slices, tokenizer and manifest, which are moved to `out` at the end.

    Files of an unfinished preparation are replaced. Other files in `out` stay.

    Raises:
        ConfigError: `out` already has a dataset and `overwrite` isn't set, or is a file.
        DataError: `out` can't be written.

    """
    _check(out, overwrite)
    work = out / UNFINISHED
    created = not out.exists()
    with _explained(out):
        try:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            yield work
        except BaseException:
            shutil.rmtree(out if created else work, ignore_errors=True)
            raise
        # From here on, the inner folder marks a folder without a manifest as unfinished.
        _clear(out)
        for path in sorted(work.iterdir(), key=lambda path: path.name == MANIFEST):
            path.replace(out / path.name)
        work.rmdir()


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        fix = "free some space, or choose another --out"
        raise DataError("DATA009", f"{error.filename or out} can't be written", reason, fix=fix) from error


def _check(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError("PREP003", f"--out {out} is a file", fix="name a folder")
    unfinished = (out / UNFINISHED).exists() and not (out / MANIFEST).exists()
    if not overwrite and not unfinished and _belongings(out):
        raise ConfigError(
            "PREP004", f"{out} already contains a dataset", fix="add --overwrite, or choose another --out"
        )


def _clear(out: Path) -> None:
    """Remove the old dataset, manifest first: without a manifest it doesn't count as complete."""
    for path in _belongings(out):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _belongings(out: Path) -> list[Path]:
    """Files of a dataset, the manifest first."""
    found = [out / MANIFEST, out / FOLDER, out / PREPROCESSOR, *sorted(out.glob("*.safetensors"))]
    return [path for path in found if path.exists()]
