"""Bytes of prepared datasets: those of earlier releases, unless a change of samples is meant."""

from __future__ import annotations

import json

import pytest

from tests.support.frozen_datasets import DATASETS, FILE, hashes


@pytest.mark.parametrize("name", DATASETS)
def test_dataset_prepared_anew_has_the_bytes_of_before(name: str) -> None:
    assert hashes(name) == json.loads(FILE.read_text())[name]
