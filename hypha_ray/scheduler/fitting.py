"""Whether a job's model and its dataset fit each other: checks on the model's skeleton and the dataset's manifest.

`CHECKS` is the list that `preflight` goes through, the cheap ones first. Each takes a `Case` and raises, or is content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from hypha_ray.config import Job
from hypha_ray.data.manifest import Manifest
from hypha_ray.errors import DataError
from hypha_ray.model.build import Facts
from hypha_ray.model.layout import layout_of
from hypha_ray.model.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Case:
    """A job, its dataset, and its model on torch's meta device, where tensors have shapes and no values."""

    job: Job
    folder: Path
    """The dataset's."""
    manifest: Manifest
    network: PreTrainedModel
    task: Task
    facts: Facts

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of a sample of each of the dataset's tensors."""
        return {tensor.name: tensor.shape for tensor in self.manifest.tensors}


def check_cut(case: Case) -> None:
    """Refuse more fragments than the model can be cut into."""
    layout_of(case.network, case.job.sync.fragments, case.job.sync.partition)


def check_ranges(case: Case) -> None:
    """Refuse token ids and labels that the model has no row for."""
    case.manifest.require(case.facts.vocab_size, case.facts.num_labels)


def check_positions(case: Case) -> None:
    """Refuse sequences that are longer than the model has positions for."""
    longest, *_ = case.shapes.get("input_ids", (0,))
    if case.facts.positions is not None and longest > case.facts.positions:
        what = f"the sequences of dataset {case.manifest.name!r} are too long for the model"
        fix = "prepare the dataset with a shorter --seq-len, or give the model more positions"
        raise DataError("DATA024", what, f"{longest} tokens", f"up to {case.facts.positions}", fix)


def check_channels(case: Case) -> None:
    """Refuse images with other channels than the model takes."""
    channels, *_ = case.shapes.get("images", (case.facts.channels,))
    if case.facts.channels not in (None, channels):
        what = f"the images of dataset {case.manifest.name!r} don't fit the model"
        fix = "set num_channels in model.config, or prepare the images for this model"
        raise DataError("DATA025", what, f"{channels} channels", f"{case.facts.channels}", fix)


Check: TypeAlias = Callable[[Case], None]

CHECKS: Final[tuple[Check, ...]] = (check_cut, check_ranges, check_positions, check_channels)
"""All checks of a model and its dataset, in the order in which they are made."""
