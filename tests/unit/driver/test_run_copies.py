"""The copy of a dataset's manifest in a run directory, from which a finished run is saved again."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.config.training import Dataset, DatasetShare
from hypha_ray.data.catalogue import load
from hypha_ray.data.mixture import mixed
from hypha_ray.driver.data_source import COPY, run_copy
from hypha_ray.errors import DataError
from hypha_ray.store.directory import RunDirectory


def test_copy_of_a_mixture_is_read_as_one(tmp_path: Path, corpus: Path) -> None:
    manifest = mixed([load(corpus), load(corpus)])
    (tmp_path / COPY).mkdir()
    manifest.save(tmp_path / COPY)
    shares = [DatasetShare(path=str(corpus)), DatasetShare(path=str(corpus), weight=2.0)]
    assert run_copy(Dataset(mix=shares), RunDirectory(tmp_path)).manifest.slices == manifest.slices
    with pytest.raises(DataError, match="DATA003"):
        run_copy(Dataset(path=str(corpus)), RunDirectory(tmp_path))
