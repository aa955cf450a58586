"""A job's dataset as its driver reads it: from a folder of this machine, a URL, or data nodes of the cluster."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from hypha_ray.config.tables.training import Dataset
from hypha_ray.config.value_types import CLUSTER
from hypha_ray.data.catalogue import is_served, load, locate
from hypha_ray.data.manifest import MANIFEST, Manifest, parse_manifest
from hypha_ray.data.mixture import COPY, mixed, require_one_vocabulary, whole
from hypha_ray.data.slices import Arrays, read_slice
from hypha_ray.data.storage.files import Place, files_at, preprocessor_files, same_tokens, write_files
from hypha_ray.data.storage.url_folder import is_url
from hypha_ray.driver.ray_cluster import connected
from hypha_ray.errors import ClusterError, ConfigError, DataError, HyphaError, first_line
from hypha_ray.files import make_tree_private
from hypha_ray.scheduler.runtime.slices.data_nodes import Replica, replicas_of
from hypha_ray.store.directory import RunDirectory
from hypha_ray.types import SLICES_PER_DATASET, SliceInfo, dataset_of


@dataclass(frozen=True, slots=True)
class DataSource:
    """A prepared dataset that can be read.

    `folder` is on this machine and has the tokenizer. It has slices only if it is one of the `places`.
    A mixture has several places.
    """

    manifest: Manifest
    folder: Path
    places: tuple[Place, ...]
    read: Callable[[SliceInfo], Arrays]

    def has_tokens_of(self, model: Path) -> bool:
        """Whether the dataset's numbers are the tokens that a saved model knows; true as well if that can't be told."""
        made_by = self.manifest.preprocessor
        return made_by is None or same_tokens(model, self.folder / (made_by.folder or ""))

    def keep(self, directory: RunDirectory) -> None:
        """Copy manifest and tokenizer to the run directory, unless they are in one folder: the end needs them."""
        if self.places != (Place(str(self.folder)),):
            copy = directory.path / COPY
            write_files(preprocessor_files(self.folder), copy)
            self.manifest.save(copy)
            make_tree_private(copy)


def in_folder(folder: Path, manifest: Manifest | None = None) -> DataSource:
    """A dataset in a folder of this machine; None as `manifest`: it is read.

    Raises:
        DataError: there is none, or a damaged one.

    """
    known = load(folder) if manifest is None else manifest
    return DataSource(known, folder, (Place(str(folder)),), lambda info: read_slice(folder, info, known))


@contextmanager
def opened(dataset: Dataset) -> Iterator[DataSource]:
    """The dataset of a job; if it `is_served`, this process stays connected to the cluster meanwhile.

    Raises:
        HyphaError: there is no such dataset, it is damaged, or it can't be reached; or datasets can't be mixed.

    """
    with ExitStack() as held:
        if is_served(dataset):
            held.enter_context(connected(CLUSTER))
        sources = [_opened(part, held) for part in dataset.parts]
        yield sources[0] if not dataset.mix else _mixed(sources)


def _opened(dataset: Dataset, held: ExitStack) -> DataSource:
    """A dataset that is no mixture."""
    if dataset.path is not None and dataset.name is None and is_url(dataset.path):
        return _at_url(dataset, Path(held.enter_context(tempfile.TemporaryDirectory())))
    if is_served(dataset):
        return _at_nodes(dataset, Path(held.enter_context(tempfile.TemporaryDirectory())))
    source = in_folder(locate(dataset))
    whole([source.manifest])
    _require_parts(dataset, [source.manifest])
    return source


def _mixed(sources: Sequence[DataSource]) -> DataSource:
    """A mixture, whose tokenizer is that of the first dataset with a chat template, otherwise of the first."""

    def read(info: SliceInfo) -> Arrays:
        own = replace(info, index=info.index % SLICES_PER_DATASET)
        return sources[dataset_of(info.index)].read(own)

    manifest = mixed([source.manifest for source in sources])
    places = [source.places for source in sources]
    if made_by := manifest.preprocessor:
        require_one_vocabulary([(one.manifest.name, one.folder / (made_by.folder or "")) for one in sources])
    templated = (one for one in sources if one.manifest.tokens and one.manifest.tokens.template_sha256)
    folder = next(templated, sources[0]).folder
    return DataSource(manifest, folder, tuple(chain.from_iterable(places)), read)


def _at_url(dataset: Dataset, folder: Path) -> DataSource:
    """A dataset at a URL, of which `folder` gets manifest and tokenizer."""
    url = str(dataset.path)
    files = files_at(url, dataset.cache_gb, lambda text: print(f"note: {text}", file=sys.stderr))
    return _copied(whole([files.manifest()]), files.preprocessor(), folder, Place(url), files.read)


def _require_parts(dataset: Dataset, served: Sequence[Manifest]) -> None:
    """Refuse to prefer slices that are near, if all of them are in each place.

    Raises:
        ConfigError: they are.

    """
    if dataset.locality == "prefer" and all(manifest.part is None for manifest in served):
        what = f'dataset.locality = "prefer" has no effect: every place of {dataset.name!r} has all of its slices'
        raise ConfigError("CFG011", what, fix="serve it in parts, or leave dataset.locality at ignore")


def _at_nodes(dataset: Dataset, folder: Path) -> DataSource:
    """A dataset that data nodes serve, of which `folder` gets manifest and tokenizer."""
    name = str(dataset.name)
    replicas = replicas_of(name)
    _require_parts(dataset, [replica.manifest for replica in replicas])
    files = _asked(replicas, lambda actor: actor.preprocessor.remote())
    manifest = whole([replica.manifest for replica in replicas])
    return _copied(manifest, files, folder, Place(name, served=True), _reader(replicas))


def _copied(
    manifest: Manifest, files: Mapping[str, bytes], folder: Path, place: Place, read: Callable[[SliceInfo], Arrays]
) -> DataSource:
    write_files(files, folder)
    manifest.save(folder)
    return DataSource(manifest, folder, (place,), read)


def kept(dataset: Dataset, directory: RunDirectory) -> DataSource:
    """A run's dataset from what the run kept of it, without slices, or else from its folder.

    Raises:
        DataError: there is neither.

    """
    copy = directory.path / COPY
    if not (copy / MANIFEST).is_file():
        return in_folder(locate(dataset))
    return in_folder(copy, parse_manifest((copy / MANIFEST).read_bytes(), copy / MANIFEST))


def _reader(replicas: list[Replica]) -> Callable[[SliceInfo], Arrays]:
    def read(info: SliceInfo) -> Arrays:
        arrays: Arrays = _asked(
            [replica for replica in replicas if replica.has(info.index)],
            lambda actor: actor.read.remote(info.index, False, info.sha256),
        )
        return arrays

    return read


def _asked(replicas: list[Replica], call: Callable[[Any], Any]) -> Any:
    """Answer of the first data node that has one.

    Raises:
        HyphaError: all that answer say so, or none answers.

    """
    error: HyphaError | None = None
    for replica in replicas:
        try:
            return ray.get(call(replica.actor))
        except DataError as damage:
            error = damage
        except RayError as lost:
            error = error or _reason(replica, lost)
    assert error is not None
    raise error


def _reason(replica: Replica, lost: RayError) -> HyphaError:
    """Error for a data node that gives no answer: its own reason, such as missing credentials, or that it is gone."""
    cause = getattr(lost, "cause", None)
    if isinstance(cause, HyphaError):
        return cause
    return ClusterError("DATA061", f"the data node {replica.name} is gone", first_line(lost))
