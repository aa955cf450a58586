"""Python interface: train a job, and look at a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from hypha_ray.config import Job
from hypha_ray.config.load import Loaded, from_tables, load
from hypha_ray.driver.find_run import find_run
from hypha_ray.errors import CheckpointError
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import METRICS, read_json, read_jsonl

Source: TypeAlias = Job | Mapping[str, Any] | str | Path
"""A job, its tables, or the path of its job file."""


def train(job: Source, *, resume: bool = False) -> Run:
    """Train a job to its end, as `jobs/diloco.py` does.

    It joins the cluster that `RAY_ADDRESS` names, or starts Ray on this machine. An interrupted run goes on from its
    last commit.

    Args:
        job: the job, its tables as nested dicts, or the path of a job file.
        resume: whether to go on with the run even if the job has changed.

    Raises:
        HyphaError: the job is wrong, or an error ended the run.

    """
    from hypha_ray.driver.launch import run_job

    parsed = _job(job)
    kind = parsed.rl.algorithm or ("dpo" if parsed.preference.loss else parsed.sync.strategy)
    return Run(run_job(Loaded(parsed, resume=resume), kind=kind))


class Run:
    """A run of a training job, finished or not.

    Args:
        run: its name, its directory, or the URL of its mirror, from which it is copied here first.

    Raises:
        CheckpointError: there is no such run.

    """

    def __init__(self, run: str | Path) -> None:
        self._directory = RunDirectory(find_run(str(run), None, None))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._directory.path

    @property
    def model(self) -> Path:
        """The folder of the saved model; it isn't there before the last round or an `export`."""
        return self.path / "model"

    @cached_property
    def job(self) -> Job:
        """The resolved job, without secrets."""
        return load(["@", str(self._directory.config)]).job

    @property
    def committed_rounds(self) -> int:
        """Number of committed rounds."""
        from hypha_ray.driver.run_identity import committed

        return committed(self._directory)

    @property
    def summary(self) -> dict[str, Any]:
        """Figures of the whole run; empty before its end."""
        return read_json(self.path / "summary.json")

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the records of ``metrics.jsonl``, of one kind such as ``round`` or ``eval``, or all."""
        return read_jsonl(self.path / METRICS, None if kind is None else [kind])

    @property
    def newest_snapshot(self) -> int:
        """Round of the newest snapshot that is as it was written.

        Raises:
            CheckpointError: there is none yet.

        """
        from hypha_ray.store.snapshots import newest_good

        newest = newest_good(self.path)
        if newest is None:
            problem = f"run {self.path.name} has no checkpoint yet"
            raise CheckpointError("CKPT006", problem, fix="let it train until its first commit")
        return newest

    def require_snapshot(self, round: int) -> None:
        """Refuse a round, counted from 0, that has no snapshot.

        Raises:
            CheckpointError: STORE006, it has none.

        """
        from hypha_ray.store.snapshots import require_snapshot

        require_snapshot(self.path, round)

    def export(self, folder: Path | None = None, round: int | None = None, compatible: int | None = None) -> Path:
        """Save the weights after a round for `from_pretrained`, and return the folder.

        Args:
            folder: folder to write; None: `model` in the run directory.
            round: a round that has a snapshot, counted from 0; None: the newest.
            compatible: older release of transformers that is to load the folder, too: 4; None: none.

        Raises:
            CheckpointError: the round has no snapshot that is as it was written.

        """
        if round is None:
            round = self.newest_snapshot
        self.require_snapshot(round)
        folder = folder or self.model
        from hypha_ray.driver.datasets.data_source import run_copy

        source = run_copy(self.job.dataset, self._directory)
        from hypha_ray.driver.launch import export_round

        export_round(self.job, self._directory, source, round, folder, compatible)
        return folder


def _job(source: Source) -> Job:
    """Return a job from any of its forms."""
    if isinstance(source, Job):
        return source
    if isinstance(source, Mapping):
        return from_tables(source)
    return load(["@", str(source)]).job
