"""Search for the saved model that a command line means: a folder, or a run by its name or directory.

Job scripts import this to parse their command line, so heavy modules are imported late.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypha_ray.errors import ConfigError
from hypha_ray.store.directory import RunDirectory

_CONFIGURATIONS = ("config.json", "adapter_config.json")


@contextmanager
def saved_model(wanted: str, round: int | None = None) -> Iterator[Path]:
    """Yield the folder of a model; that of a run's snapshot is there until the context ends.

    Args:
        wanted: folder from `save_pretrained` or PEFT, or a run by its name or directory.
        round: round of a run, counted from 0, that has a snapshot; None: the saved model, or else the newest snapshot.

    Raises:
        ConfigError: CFG011, a round of a folder that is no run.
        CheckpointError: there is no such run, or no snapshot of the round.

    """
    folder = Path(wanted).expanduser()
    if any((folder / name).is_file() for name in _CONFIGURATIONS):
        if round is not None:
            fix = "leave --round out, or give the run"
            raise ConfigError("CFG011", "--round and the folder of a model exclude each other", fix=fix)
        yield folder
        return
    from hypha_ray.driver.run import Run

    run = Run(wanted)
    if round is None and run.model.is_dir():
        yield run.model
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield run.export(Path(scratch, "model"), round)


@contextmanager
def saved_model_or_folder(wanted: str) -> Iterator[Path]:
    """Yield the folder of a model, as `saved_model` does, or a path as it is if it leads to no run."""
    folder = Path(wanted).expanduser()
    if "/" in wanted and not RunDirectory(folder).begun:
        yield folder
        return
    with saved_model(wanted) as found:
        yield found
