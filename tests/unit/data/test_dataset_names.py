"""Names of datasets, by which data nodes serve them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.data.catalogue import name_of
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("/data/sort2/", "sort2"),
        ("s3://bucket/sets/sort2", "sort2"),
        ("https://host/sets/sort2?token=s3cret", "sort2"),
        ("https://host/sets/sort2/?X-Amz-Signature=a/b", "sort2"),
        ("/data/what?", "what?"),
    ],
)
def test_dataset_is_named_after_its_folder_and_never_after_a_secret(place: str, name: str) -> None:
    assert name_of(place) == name


def test_dataset_prepared_at_a_url_with_a_secret_has_none_in_its_manifest(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("word " * 400)
    options = PrepareOptions(
        str(tmp_path / "text.txt"), "memory://sets/words?sig=s3cret", seq_len=8, validation_samples=4
    )
    manifest = prepare(options, lambda what, count: None)
    assert manifest.name == "words" and "s3cret" not in str(manifest)
