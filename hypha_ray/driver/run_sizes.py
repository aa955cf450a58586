"""Sizes of a run's model and data beside its records: from its dataset's manifest, and from the model's skeleton."""

from __future__ import annotations

from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.data.manifest import MANIFEST, Manifest, read_manifest
from hypha_ray.errors import HyphaError
from hypha_ray.simulation.calibration import PROVENANCE
from hypha_ray.simulation.what_if.run_scenario import FLOAT32_BYTES, DataSize
from hypha_ray.telemetry.sinks.files import read_json


class RunSizes:
    """Gives sizes under other settings of a run.

    Args:
        folder: the run directory.

    """

    def __init__(self, folder: Path) -> None:
        self._manifest = _manifest(folder)
        self._fragments: dict[tuple[int, str], tuple[int, ...]] = {}
        """Parameters of each fragment, by the number of fragments and the partition."""

    def __call__(self, job: Job) -> DataSize:
        """Sizes under a job.

        Raises:
            ConfigError: MODEL009, the model has fewer tensors or layers than fragments.

        """
        parameters: tuple[int, ...] = ()
        notes: tuple[str, ...] = ()
        if job.sync.fragments > 1:
            key = job.sync.fragments, job.sync.partition
            if key not in self._fragments:
                self._fragments[key] = _fragment_parameters(job)
            parameters = self._fragments[key]
            if not parameters:
                notes = ("the model can't be built here, so its fragments are taken to be of even size",)
        if self._manifest is None:
            return DataSize(fragment_parameters=parameters, notes=notes)
        slice_samples = max(info.samples for info in self._manifest.of("train"))
        return DataSize(self._manifest.sample_bytes, slice_samples, parameters, notes)


def _manifest(folder: Path) -> Manifest | None:
    """Manifest of the run's dataset; None if it isn't on this machine."""
    dataset = read_json(folder / PROVENANCE).get("dataset") or {}
    for place in dataset.get("places") or ():
        path = Path(place)
        if (path / MANIFEST).is_file():
            try:
                return read_manifest(path)
            except HyphaError:
                continue
    return None


def _fragment_parameters(job: Job) -> tuple[int, ...]:
    """Parameters of each fragment, from the model on torch's meta device; empty if it can't be built here."""
    from hypha_ray.model.layout import layout_of
    from hypha_ray.model.trained import sketch_trained

    try:
        network = sketch_trained(job)
    except HyphaError:
        return ()
    layout = layout_of(network, job.sync.fragments, job.sync.partition)
    return tuple(layout.bytes(fragment) // FLOAT32_BYTES for fragment in range(job.sync.fragments))
