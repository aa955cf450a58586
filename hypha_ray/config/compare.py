"""Differences between two jobs, and whether they still describe the same training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypha_ray.config.keys import KeyPath, arrays, dotted, free_tables, shown
from hypha_ray.config.load import resolved
from hypha_ray.config.schema import Job
from hypha_ray.errors import ConfigError

DATA: KeyPath = ("dataset",)
_OF_A_TRAINING: tuple[KeyPath, ...] = (
    ("model",),
    ("preprocessor",),
    ("dataset", "path"),
    ("dataset", "name"),
    ("dataset", "mix"),
    ("run", "seed"),
    ("run", "mode"),
    ("sync", "strategy"),
    ("sync", "fragments"),
    ("sync", "partition"),
    ("sync", "downward_codec"),
    ("inner_optimizer", "name"),
    ("outer_optimizer", "name"),
)
"""Keys that define the training: with other values, its commits can't be used."""
_OF_EVALUATIONS: tuple[KeyPath, ...] = (("model", "metrics"),)
"""Keys below those that define the training and that change no weight."""
_OF_A_COMMAND: tuple[KeyPath, ...] = (
    ("run", "name"),
    ("run", "dir"),
    ("run", "notes"),
    ("run", "tags"),
    ("testing",),
)
"""Keys that don't identify a run: its place and labels, and faults of tests."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose value differs between this job and the run to continue; None means unset."""

    path: KeyPath
    here: Any
    there: Any

    @property
    def forks(self) -> bool:
        """Whether the difference makes it another training, which can't continue from the run's commits."""
        return defines_training(self.path)

    @property
    def of_data(self) -> bool:
        """Whether the key locates the dataset, which may be the same one in another place."""
        return self.path[:1] == DATA and self.path[-1] != "weight"

    def __str__(self) -> str:
        return f"{dotted(self.path)} is {_value(self.here)} here and {_value(self.there)} in the run"


def defines_training(path: KeyPath) -> bool:
    """Whether another value of a key makes it another training."""
    return _is_below(path, _OF_A_TRAINING) and not _is_below(path, _OF_EVALUATIONS)


def differences(here: Job, there: Job) -> tuple[Difference, ...]:
    """Compare two jobs key by key, as their resolved job files have them; secrets are in neither."""
    ours = dict(_leaves(resolved(here), ()))
    theirs = dict(_leaves(resolved(there), ()))
    changed = []
    for path in ours | theirs:
        difference = Difference(path, ours.get(path), theirs.get(path))
        if difference.here != difference.there and not _is_below(path, _OF_A_COMMAND):
            changed.append(difference)
    return tuple(changed)


def settings_that_differ(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys of resolved job files whose values aren't all equal, with the value of each file; None: unset.

    Name, place and labels of the runs are left out.
    """
    leaves = [dict(_leaves(tree, ())) for tree in trees]
    paths: dict[KeyPath, None] = {}
    for settings in leaves:
        paths.update(dict.fromkeys(settings))
    different: dict[str, list[Any]] = {}
    for path in paths:
        values = [settings.get(path) for settings in leaves]
        if any(value != values[0] for value in values) and not _is_below(path, _OF_A_COMMAND):
            different[dotted(path)] = values
    return different


def refuse_changes(changed: Sequence[Difference], job: Job) -> None:
    """Refuse the name of a run by another job.

    Raises:
        ConfigError: RUN001, there are differences.

    """
    if changed:
        problem = f"run.name: there is a run {job.run.name!r} in {job.run.dir}, by another job: {changed[0]}"
        fix = "choose another run.name, or give --resume to go on with the run as it is told here"
        raise ConfigError("RUN001", problem, fix=fix)


def _is_below(path: KeyPath, keys: Iterable[KeyPath]) -> bool:
    """Whether a path is one of the keys, or leads into one of them."""
    return any(path[: len(key)] == key for key in keys)


def _leaves(tree: Mapping[str, Any], table: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Values by their paths; tables of an array are numbered."""
    for name, value in tree.items():
        path = (*table, name)
        inner = value
        if path in arrays():
            inner = {str(number): element for number, element in enumerate(value)}
        if isinstance(inner, dict) and (inner or path in free_tables()):
            yield from _leaves(inner, path)
        else:
            yield path, inner


def _value(value: Any) -> str:
    return "not set" if value is None else shown(value)
