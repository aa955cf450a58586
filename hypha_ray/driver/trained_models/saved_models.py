"""Search for the saved model that a command line means: a folder, or a run by its name or directory.

    find_model ──► ModelSource ──(libraries are loaded)──► ModelSource.opened

Job scripts import this to parse their command line, so heavy modules are imported late: to find a model takes none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hypha_ray.errors import ConfigError
from hypha_ray.model.loading.folders import local_folder, read_config
from hypha_ray.store.directory import RunDirectory

if TYPE_CHECKING:
    from hypha_ray.driver.run import Run

_ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that exists: a folder, or a snapshot of a run.

    `folder` is None for a snapshot, which `run` and `round` identify.
    """

    folder: Path | None
    run: Run | None = None
    round: int | None = None

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Yield the folder of the model; the folder of a snapshot exists until the context ends.

        Raises:
            HyphaError: the snapshot can't be saved as a model.

        """
        if self.folder is not None:
            yield self.folder
            return
        assert self.run is not None
        with tempfile.TemporaryDirectory() as scratch:
            yield self.run.export(Path(scratch, "model"), self.round)


def find_model(model: str, round: int | None = None) -> ModelSource:
    """Find a model.

    Args:
        model: folder from `save_pretrained` or PEFT, or a run by its name or directory.
        round: round of a run, counted from 0, that has a snapshot; None: the saved model, otherwise the newest one.

    Raises:
        ConfigError: CFG011, a round of a folder that is no run.
        CheckpointError: there is no such run, or no snapshot of the round.

    """
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file() or (folder / _ADAPTER).is_file():
        if round is not None:
            fix = "leave --round out, or give the run"
            raise ConfigError("CFG011", "--round and the folder of a model exclude each other", fix=fix)
        return ModelSource(folder)
    from hypha_ray.driver.run import Run

    run = Run(model)
    if round is not None:
        run.require_snapshot(round)
        return ModelSource(None, run, round)
    if run.model.is_dir():
        return ModelSource(run.model)
    return ModelSource(None, run, run.newest_snapshot)


def find_model_or_folder(model: str) -> ModelSource:
    """Find a model as `find_model` does; a path that leads to no run has to be the folder of a model.

    Raises:
        HyphaError: there is no such folder or run, or no configuration in the folder.

    """
    folder = Path(model).expanduser()
    if "/" not in model or RunDirectory(folder).begun:
        return find_model(model)
    local_folder(str(folder.absolute()))
    if not (folder / _ADAPTER).is_file():
        read_config(folder)
    return ModelSource(folder)
