"""Sink into a local Aim repository, shown by `aim up`. Aim has no wheels for new Pythons, so it is imported late."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from collections import Counter
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.errors import AuthenticationError, ConfigError
from hypha_ray.telemetry.sinks.files import Record, plain
from hypha_ray.telemetry.sinks.inputs import TIME_SHARES, Labels, SinkPlace

OLDEST = (3, 29)
"""Oldest supported version; where Aim has no wheel, pip installs a much older one."""


def _require_installed() -> None:
    fix = "leave aim out of telemetry.sinks, or use Python 3.11 or 3.12: later ones have no wheel of it"
    try:
        version = importlib.metadata.version("aim")
    except importlib.metadata.PackageNotFoundError:
        problem = "telemetry.sinks has aim, which isn't installed"
        raise ConfigError("CFG022", problem, "", "", fix) from None
    numbers = re.findall(r"\d+", version)
    if tuple(map(int, numbers[:2])) < OLDEST:
        oldest_text = ".".join(map(str, OLDEST))
        problem = "telemetry.sinks has aim, which is too old"
        raise ConfigError("CFG022", problem, f"aim {version}", f"{oldest_text} or newer", fix)


def local(repository: str) -> Path:
    """Return the path of a repository that is a folder.

    A server is refused: Aim's client, up to 3.29 at least, imports and calls whatever the server names.

    Raises:
        AuthenticationError: SEC002, the repository is a URL.

    """
    if "://" in repository:
        raise AuthenticationError(
            "SEC002",
            "telemetry.aim_repository is a remote server, which could run code here",
            repository,
            "a local folder",
            "give a local folder, or leave it out to use the run directory",
        )
    return Path(repository).expanduser().absolute()


class Aim:
    """A sink into a local Aim repository, one Aim run for every attempt of the job.

    Round figures carry the context ``{"subset": "train"}``, evaluations ``{"subset": "val"}``, a worker's figures
    ``{"worker": "3"}``; steps of rounds and evaluations are round numbers, those of workers count reports. An Aim run
    may be open in one process only.

    Raises:
        AuthenticationError: SEC002, the repository is not a local folder.

    """

    @staticmethod
    def check(job: Job) -> None:
        """Refuse Aim where it isn't installed, and a repository that is no folder.

        Raises:
            ConfigError: CFG022, there is no Aim, or an old one.
            AuthenticationError: SEC002, the repository is a URL.

        """
        _require_installed()
        local(job.telemetry.aim_repository or "")

    def __init__(self, sink_place: SinkPlace) -> None:
        self._name = sink_place.run
        self._repository = local(sink_place.aim_repository or str(sink_place.folder))
        self._reports: Counter[str] = Counter()

    def start(self, config: Record) -> None:
        """Open an Aim run; neither environment variables nor terminal output nor system load are tracked."""
        from aim import Run

        self._repository.mkdir(parents=True, exist_ok=True)
        self._run = Run(
            repo=str(self._repository),
            experiment=self._name,
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        self._run["config"] = plain(config)
        labels = Labels.of(config)
        if labels.notes is not None:
            self._run.description = labels.notes
        for tag in labels.tags:
            self._run.add_tag(tag)

    def record(self, record: Record) -> None:
        """Track every number of a record under its own name."""
        match record.get("kind"):
            case "round":
                self._round(record)
            case "eval":
                self._track(record, record["round"], {"subset": "val"})
            case "step":
                worker = str(record["worker"])
                self._track(record, self._reports[worker], {"worker": worker}, leave_out={"worker"})
                self._reports[worker] += 1

    def event(self, event: Record) -> None:
        """Do nothing: events stay in events.jsonl."""

    def summary(self, figures: Record) -> None:
        """Keep the figures beside the configuration."""
        self._run["summary"] = plain(figures)

    def close(self) -> None:
        """End the Aim run and index it: Aim's readers see nothing else."""
        from aim.sdk.index_manager import RepoIndexManager

        self._run.close()
        with contextlib.suppress(Exception):  # a running `aim up` has the index locked, and sees to it itself
            RepoIndexManager.get_index_manager(self._run.repo).index(self._run.hash)

    def _round(self, record: Record) -> None:
        self._track(record, record["round"], {"subset": "train"})
        for name in ("batches", "batch_s"):
            by_worker = record.get(name) or {}
            for worker, value in by_worker.items():
                self._track({name: value}, record["round"], {"worker": str(worker)})
        for use, share in (record.get(TIME_SHARES) or {}).items():
            self._track({TIME_SHARES: share}, record["round"], {"kind": use})

    def _track(
        self, record: Record, step: int, context: dict[str, Any], leave_out: frozenset[str] | set[str] = frozenset()
    ) -> None:
        for name, value in plain(record).items():
            if isinstance(value, int | float) and name not in {"round", *leave_out}:
                self._run.track(value, name=name, step=step, epoch=record.get("round"), context=context)
