"""Datasets that a run began with, as its directory keeps them. Every process that starts later is held to them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import identities
from hypha_ray.errors import DataError

DATASET = "dataset.json"
"""File in a run directory with the name and the identities of the run's datasets, wherever they lie."""
COPY = "dataset"
"""Folder in a run directory with manifest and tokenizer of a dataset that isn't on the driver's machine."""

OTHER_SAMPLES = "DATA046"
"""Error code for a place with other samples than those that a run began with."""


@dataclass(frozen=True, slots=True)
class RunDataset:
    """Identity of a run's dataset, and of each dataset of a mixture; empty if an earlier release began the run."""

    sha256: str | None = None
    each: tuple[str, ...] = ()

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> RunDataset:
        """Read the fields of the file; one that is missing or damaged has none."""
        sha256 = fields.get("sha256")
        each = fields.get("datasets", ())
        return cls(sha256 if isinstance(sha256, str) else None, tuple(map(str, each)))

    def of(self, number: int) -> str | None:
        """Identity of a dataset by its number; None if it isn't known."""
        return self.each[number] if number < len(self.each) else None


def described(manifest: Manifest) -> str:
    """Text of the file for a run on this dataset."""
    each = {"sha256": manifest.identity, "datasets": identities(manifest)}
    return json.dumps({"name": manifest.name, **each})


def other_slice(name: str, index: int, other: str | None, sha256: str) -> DataError:
    """Error that a place has a slice of another hash, or None, in the place of one that a run began with."""
    error = other_dataset(name, [other or "missing"], sha256)
    return DataError(error.code, error.what, f"slice {index}: {error.got}", error.allowed, error.fix)


def other_dataset(name: str, others: Iterable[str], identity: str) -> DataError:
    """Error that a place has datasets of these identities, and not the one that a run began with."""
    what = f"dataset {name!r} has other samples now than the run began with"
    fix = "put the folder back as it was, or prepare it again by the same options; other samples need another run.name"
    return DataError(OTHER_SAMPLES, what, ", ".join(other[:12] for other in sorted(others)), identity[:12], fix)
