"""A job's dataset as its driver reads it: from a folder of this machine, a URL, or data nodes of the cluster.

Its tokenizer has the decisions about tokens that were made when the dataset was prepared.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from hypha_ray.config import Job
from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.config.training import Dataset
from hypha_ray.config.value_types import CLUSTER
from hypha_ray.data.catalogue import is_served, is_url, load, locate
from hypha_ray.data.manifest import MANIFEST, Manifest, parse_manifest
from hypha_ray.data.mixture import COPY, mixed, require_one_vocabulary, same_tokens, whole
from hypha_ray.data.slices import Arrays, read_slice
from hypha_ray.data.storage import Place, files_at, preprocessor_files, write_files
from hypha_ray.driver.ray_cluster import connected
from hypha_ray.errors import ClusterError, ConfigError, DataError, HyphaError, first_line
from hypha_ray.files import make_tree_private
from hypha_ray.model.sources import fetch, hub_token
from hypha_ray.model.tasks import find_task
from hypha_ray.model.tokenizers import apply_rules, end_token, saved_rules
from hypha_ray.scheduler.runtime.data_nodes import Replica, replicas_of
from hypha_ray.store.directory import RunDirectory
from hypha_ray.types import SLICES_PER_DATASET, Samples, SliceInfo, TokenRules, dataset_of

_WRITES = {"causal-lm": False, "seq2seq-lm": True}
"""Tasks whose models write text, and whether it is a translation."""


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
    parts: tuple[Manifest, ...] = ()
    """Manifests of the datasets of a mixture; empty if it is none."""

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Manifests of all datasets."""
        return self.parts or (self.manifest,)

    def has_tokens_of(self, model: Path) -> bool:
        """Whether the dataset's numbers are the tokens of a saved model; true as well if that isn't known."""
        preprocessor = self.manifest.preprocessor
        return preprocessor is None or same_tokens(model, self.folder / (preprocessor.folder or ""))

    def require_tokens_of(self, model: Path) -> None:
        """Refuse a saved model whose tokens differ from those of the dataset.

        Raises:
            DataError: DATA023, it is one.

        """
        made_by = self.manifest.preprocessor
        if made_by is not None and not self.has_tokens_of(model):
            problem = f"the numbers in dataset {self.manifest.name!r} are other tokens than the model's"
            fix = f"prepare it with --tokenizer {model}"
            raise DataError("DATA023", problem, f"tokens of {made_by.name}", "the model's tokenizer", fix)

    def keep(self, directory: RunDirectory) -> None:
        """Copy manifest and tokenizer to the run directory, unless the dataset is one folder: the end needs them."""
        if self.places != (Place(str(self.folder)),):
            copy = directory.path / COPY
            write_files(preprocessor_files(self.folder), copy)
            self.manifest.save(copy)
            make_tree_private(copy)


def samples_at(rows: Any, arrays: Arrays, index: int) -> Samples:
    """Samples in some rows of a slice, with their keys.

    Args:
        rows: int64 array of the rows.
        arrays: tensors of the slice.
        index: number of the slice.

    """
    keys = np.stack([np.zeros_like(rows), np.full_like(rows, index), rows], axis=1)
    return Samples({name: array[rows] for name, array in arrays.items()}, keys)


def in_folder(folder: Path, manifest: Manifest | None = None) -> DataSource:
    """A dataset in a folder of this machine; None as `manifest`: it is read.

    Raises:
        DataError: there is none, or a damaged one.

    """
    folder_manifest = load(folder) if manifest is None else manifest

    def read(info: SliceInfo) -> Arrays:
        return read_slice(folder, info, folder_manifest)

    return DataSource(folder_manifest, folder, (Place(str(folder)),), read)


@contextmanager
def opened(dataset: Dataset) -> Iterator[DataSource]:
    """The dataset of a job; if it `is_served`, this process stays connected to the cluster meanwhile.

    Raises:
        HyphaError: there is no such dataset, it is damaged, or it can't be reached; or datasets can't be mixed.

    """
    with ExitStack() as stack:
        if is_served(dataset):
            stack.enter_context(connected(CLUSTER))
        sources = [_open_part(part, stack) for part in dataset.parts]
        yield _mixed(sources) if dataset.mix else sources[0]


def _open_part(dataset: Dataset, stack: ExitStack) -> DataSource:
    """A dataset that is no mixture."""
    if dataset.path is not None and dataset.name is None and is_url(dataset.path):
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        return _at_url(dataset, Path(folder))
    if is_served(dataset):
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        return _at_nodes(dataset, Path(folder))
    source = in_folder(locate(dataset))
    whole([source.manifest])
    _require_parts(dataset, [source.manifest])
    return source


def _mixed(sources: Sequence[DataSource]) -> DataSource:
    """A mixture; its tokenizer is from the first dataset with a chat template, otherwise from the first dataset."""

    def read(info: SliceInfo) -> Arrays:
        source = sources[dataset_of(info.index)]
        return source.read(replace(info, index=info.index % SLICES_PER_DATASET))

    parts = tuple(source.manifest for source in sources)
    manifest = mixed(parts)
    preprocessor = manifest.preprocessor
    if preprocessor is not None:
        subfolder = preprocessor.folder or ""
        require_one_vocabulary([(source.manifest.name, source.folder / subfolder) for source in sources])
    folder = sources[0].folder
    for source in sources:
        tokens = source.manifest.tokens
        if tokens and tokens.template_sha256:
            folder = source.folder
            break
    places = chain.from_iterable(source.places for source in sources)
    return DataSource(manifest, folder, tuple(places), read, parts)


def _at_url(dataset: Dataset, folder: Path) -> DataSource:
    """A dataset at a URL, of which `folder` gets manifest and tokenizer."""
    url = str(dataset.path)
    files = files_at(url, dataset.cache_gb, lambda text: print(f"note: {text}", file=sys.stderr))
    manifest = whole([files.manifest()])
    return _with_copy(manifest, files.preprocessor(), folder, Place(url), files.read)


def _require_parts(dataset: Dataset, served: Sequence[Manifest]) -> None:
    """Refuse a preference for near slices if every replica has all slices.

    Raises:
        ConfigError: CFG011.

    """
    if dataset.locality == "prefer" and all(manifest.part is None for manifest in served):
        problem = f'dataset.locality = "prefer" has no effect: every place of {dataset.name!r} has all of its slices'
        raise ConfigError("CFG011", problem, fix="serve it in parts, or leave dataset.locality at ignore")


def _at_nodes(dataset: Dataset, folder: Path) -> DataSource:
    """A dataset that data nodes serve, of which `folder` gets manifest and tokenizer."""
    name = str(dataset.name)
    replicas = replicas_of(name)
    manifests = [replica.manifest for replica in replicas]
    _require_parts(dataset, manifests)
    files = _first_answer(replicas, lambda actor: actor.preprocessor.remote())
    return _with_copy(whole(manifests), files, folder, Place(name, served=True), _reader(replicas))


def _with_copy(
    manifest: Manifest, files: Mapping[str, bytes], folder: Path, origin: Place, read: Callable[[SliceInfo], Arrays]
) -> DataSource:
    """A dataset that isn't on this machine, after its manifest and tokenizer were copied to a folder."""
    write_files(files, folder)
    manifest.save(folder)
    return DataSource(manifest, folder, (origin,), read)


def run_copy(dataset: Dataset, directory: RunDirectory) -> DataSource:
    """A run's dataset: the copy in the run directory, which has no slices, otherwise the dataset's folder.

    Raises:
        DataError: there is neither.

    """
    copy = directory.path / COPY
    manifest_path = copy / MANIFEST
    if not manifest_path.is_file():
        return in_folder(locate(dataset))
    manifest = parse_manifest(manifest_path.read_bytes(), manifest_path, len(dataset.parts))
    return in_folder(copy, manifest)


def _reader(replicas: list[Replica]) -> Callable[[SliceInfo], Arrays]:
    def read(info: SliceInfo) -> Arrays:
        holders = [replica for replica in replicas if replica.has(info.index)]
        arrays: Arrays = _first_answer(holders, lambda actor: actor.read.remote(info.index, False, info.sha256))
        return arrays

    return read


def _first_answer(replicas: list[Replica], call: Callable[[Any], Any]) -> Any:
    """Answer of the first data node that has one.

    Raises:
        HyphaError: every data node reports damage or gives no answer.

    """
    error: HyphaError | None = None
    for replica in replicas:
        try:
            return ray.get(call(replica.actor))
        except DataError as damage:
            error = damage
        except RayError as lost:
            error = error or _loss_error(replica, lost)
    assert error is not None
    raise error


def _loss_error(replica: Replica, loss: RayError) -> HyphaError:
    """Error for a data node that gives no answer: its own reason, such as missing credentials, or that it is gone."""
    cause = getattr(loss, "cause", None)
    if isinstance(cause, HyphaError):
        return cause
    return ClusterError("DATA061", f"the data node {replica.name} is gone", first_line(loss))


def job_preprocessor(job: Job, source: DataSource) -> Any | None:
    """Load a job's tokenizer or image processor, with the dataset's decisions about tokens.

    Raises:
        HyphaError: any error of `load_preprocessor`.

    """
    return preprocessor_for(job.preprocessor, job.model, source)


def preprocessor_for(preprocessor: Preprocessor, model: Model, source: DataSource) -> Any | None:
    """Load a tokenizer or image processor, as `load_preprocessor`, with a dataset's decisions about tokens.

    Raises:
        HyphaError: any error of `load_preprocessor`.

    """
    from hypha_ray.model.tokenizers import load_preprocessor

    loaded_preprocessor = load_preprocessor(preprocessor, source.folder, model)
    tokenizer = getattr(loaded_preprocessor, "tokenizer", loaded_preprocessor)
    task_name = find_task(model.type).name
    if task_name in _WRITES and hasattr(tokenizer, "init_kwargs"):
        rules = _rules(model, source, tokenizer)
        if rules:
            apply_rules(tokenizer, rules, translates=_WRITES[task_name])
    return loaded_preprocessor


def is_silent(manifest: Manifest) -> bool:
    """Whether a dataset of tokens has no record of their beginnings and ends, because an earlier release made it."""
    is_prepared_text = manifest.preprocessor is not None and manifest.modality in ("language", "prompts", "preferences")
    return is_prepared_text and manifest.tokens is None


def inherited(model: Model, source: DataSource) -> TokenRules | None:
    """Return the decisions that came with the weights of a repository, if their tokens are the dataset's."""
    rules = saved_rules(model)
    if rules is None or not source.has_tokens_of(_folder(model)):
        return None
    return rules


def _rules(model: Model, source: DataSource, tokenizer: Any) -> TokenRules | None:
    """Return the decisions that hold for a job; None if those of its dataset aren't known."""
    dataset_rules = source.manifest.tokens
    model_rules = inherited(model, source)
    if dataset_rules is None and is_silent(source.manifest):
        end = end_token(tokenizer)
        dataset_rules = TokenRules(ends=() if end is None else (end,))
    if dataset_rules is None or model_rules is None:
        return dataset_rules or model_rules
    ends = dict.fromkeys((*dataset_rules.ends, *model_rules.ends))
    return replace(dataset_rules, ends=tuple(ends))


def _folder(model: Model) -> Path:
    return fetch(str(model.repository), model.revision, hub_token(model))
