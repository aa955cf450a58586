"""The run directory: one folder that tells a run's whole story."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.errors import ConfigError


def home() -> Path:
    """Folder of all runs and datasets: ``$HYPHA_RAY_HOME``, or ``~/hypha_ray``."""
    return Path(os.environ.get("HYPHA_RAY_HOME") or Path.home() / "hypha_ray").absolute()


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @classmethod
    def create(cls, parent: Path, name: str, config: str) -> RunDirectory:
        """Make the folder of a new run, with its resolved configuration.

        Raises:
            ConfigError: there is a run of that name, or the folder can't be written.

        """
        directory = cls(parent.expanduser().absolute() / name)
        if (directory.path / "config.toml").exists():
            what = f"run.name: there is a run {name!r} in {parent}"
            raise ConfigError("RUN001", what, fix="choose another run.name, or leave it out to get a new one")
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            (directory.path / "config.toml").write_text(config, encoding="utf-8")
        except OSError as error:
            what = f"run.dir: {directory.path} can't be written"
            raise ConfigError("CFG008", what, got=error.strerror or str(error), fix="choose another run.dir") from None
        return directory

    def log_to_file(self) -> None:
        """Send this process's log to a new file of ``logs/``, one for each attempt; ``logs/latest`` links to it."""
        folder = self.path / "logs"
        folder.mkdir(exist_ok=True)
        file = folder / f"attempt_{len(list(folder.glob('attempt_*.log'))):03d}.log"
        handler = logging.FileHandler(file, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.getLogger("hypha_ray").setLevel(logging.INFO)
        latest = folder / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(file.name)
