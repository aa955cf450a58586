"""Names by which data nodes serve datasets."""

from __future__ import annotations

import pytest

from hypha_ray.driver.datasets.data_nodes import name_of


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
