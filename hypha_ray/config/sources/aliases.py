"""Aliases of keys: names of the training guide, and of hypha, the system that the guide describes."""

from __future__ import annotations

from collections.abc import Sequence

from hypha_ray.config.keys import CONFIG, LABELS, KeyPath, free_table

GUIDE: KeyPath = ("scheduler", "job")
"""The table that contains all tables of a job in the guide."""

CONTAINERS = frozenset([(), GUIDE[:1], GUIDE])
"""Tables that contain only tables of the job file."""

GUIDE_NAMES: dict[KeyPath, KeyPath] = {
    ("type",): ("sync", "strategy"),
    ("dataset_name",): ("dataset", "name"),
    ("scheduler", "status_bridge"): ("telemetry", "status_bridge"),
}
RENAMED: dict[KeyPath, KeyPath] = GUIDE_NAMES | {
    ("status_bridge",): ("telemetry", "status_bridge"),
    ("dataset", "dataset"): ("dataset", "name"),
    ("rounds", "avg_samples_between_updates"): ("rounds", "samples_between_updates"),
    ("resources", "worker", "memory"): ("resources", "worker", "memory_gb"),
    ("resources", "parameter_server", "memory"): ("resources", "parameter_server", "memory_gb"),
}

_PREPARED = "a dataset is preprocessed when it is prepared"
_NO_STORAGE = "Ray doesn't lease disk space"
IGNORED: dict[KeyPath, str] = {
    ("executors",): "a Ray worker needs no executor command",
    ("model", "filenames"): "transformers knows which files it needs",
    ("preprocessor", "filenames"): "transformers knows which files it needs",
    ("preprocessor", "type"): _PREPARED,
    ("preprocessor", "input_names"): _PREPARED,
    ("resources", "worker", "storage"): _NO_STORAGE,
    ("resources", "parameter_server", "storage"): _NO_STORAGE,
}


def inside(path: Sequence[str]) -> KeyPath:
    """A key as it would be written outside the guide's table."""
    return tuple(path[len(GUIDE) :] if tuple(path[: len(GUIDE)]) == GUIDE else path)


def own(path: Sequence[str]) -> KeyPath:
    """The schema's name of a key; unknown names are returned unchanged, with ``_`` for ``-``."""
    name = inside(path)
    ours = len(free_table(tuple(part.replace("-", "_") for part in name)) or name)
    name = (*(part.replace("-", "_") for part in name[:ours]), *name[ours:])
    if name[:1] == CONFIG[:1] and name[1:2] and name[1] in LABELS:
        return (*CONFIG, *name[1:])
    return RENAMED.get(name, name)
