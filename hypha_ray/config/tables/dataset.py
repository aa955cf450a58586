"""The table of the job file about the dataset."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hypha_ray.config.value_types import Count, NotNegative, Place, Positive, Table


class DatasetShare(Table):
    """One dataset of a mixture."""

    path: Place | None = Field(None, description="as dataset.path")
    name: str | None = Field(None, description="as dataset.name")
    weight: Positive = Field(1.0, description="share of the samples, relative to the other weights")


class Dataset(Table):
    """The prepared dataset: a folder or URL, a name by which data nodes serve it, or a mixture of several."""

    path: Place | None = Field(None, description="prepared folder, or its URL: s3, gs, http, https, hf or file")
    name: str | None = Field(None, description="name in $HYPHA_RAY_HOME/datasets, or of data nodes")
    mix: list[DatasetShare] = Field([], fail_fast=True, description="datasets that every batch is mixed of, by weight")
    shards: Count = Field(1, description="data shard actors that serve it")
    cache_gb: NotNegative | None = Field(
        None, description="disk of each machine for slices of URLs; default: a fifth of what is free, at most 50"
    )
    locality: Literal["ignore", "prefer"] = Field(
        "ignore",
        description="prefer: of a dataset in parts, a worker first gets slices that its machine or site serves",
    )
    allow_quarantine: bool = Field(
        False,
        description="train on without damaged slices instead of ending; leave out bad samples, not their batches",
    )

    @property
    def given(self) -> bool:
        """Whether there is a dataset."""
        return bool(self.path or self.name or self.mix)

    @property
    def parts(self) -> list[Dataset]:
        """Datasets of the mixture, or this one alone."""
        parts = []
        for share in self.mix:
            source: dict[str, Any] = {"path": share.path, "name": share.name, "mix": []}
            parts.append(self.model_copy(update=source))
        return parts or [self]
