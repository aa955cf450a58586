"""Upload of a dataset while it is made: only the slice at hand lies on this machine's disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.data.manifest import MANIFEST
from hypha_ray.data.preparation.encoders import FOLDER, PREPROCESSOR
from hypha_ray.data.storage.url_folder import UrlFolder
from hypha_ray.errors import ConfigError
from hypha_ray.redaction import redacted


@dataclass(frozen=True, slots=True)
class Upload:
    """A folder of this machine, and the URL that its files go to."""

    folder: Path
    place: UrlFolder

    def slice(self, file: Path) -> None:
        """Move a slice there."""
        self.place.put(file, file.name)
        file.unlink()


@contextmanager
def uploaded(url: str, overwrite: bool) -> Iterator[Upload]:
    """A new folder of this machine for tokenizer and manifest, which are copied to the URL at the end, manifest last.

    Raises:
        ConfigError: the URL already has a dataset and `overwrite` isn't set, or can't be written.
        HyphaError: the URL can't be reached.

    """
    place = UrlFolder(url)
    if url.startswith(("http:", "https:")):
        raise ConfigError("CFG003", "--out can't be written by HTTP", redacted(url), "s3, gs, hf or file, or a folder")
    if place.exists(MANIFEST):
        if not overwrite:
            fix = "add --overwrite, or choose another --out"
            raise ConfigError("PREP004", f"{redacted(url)} already contains a dataset", fix=fix)
        place.remove(MANIFEST)  # First: without a manifest it doesn't count as complete.
    for name in place.sizes(""):
        if ("/" not in name and name.endswith(".safetensors")) or name.startswith((f"{FOLDER}/", f"{PREPROCESSOR}/")):
            place.remove(name)
    with tempfile.TemporaryDirectory() as folder:
        yield Upload(Path(folder), place)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: path.name == MANIFEST):
            place.put(path, str(path.relative_to(folder)))
