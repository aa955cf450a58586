"""Names of classes in Hugging Face datasets, whose columns of labels have numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hypha_ray.data.preparation.sources.tables import Column


def named_classes(rows: Iterable[Mapping[str, Any]], features: Any, columns: Iterable[Column]) -> Iterator[Any]:
    """Rows with the names of classes instead of their numbers, in the columns that ask for it."""
    names = {column.name: _names_of(features, column) for column in columns if column.classes is not None}
    for row in rows:
        yield {key: _named(value, names.get(key)) for key, value in row.items()}


def _names_of(features: Any, column: Column) -> list[str] | None:
    feature = (features or {}).get(column.name)
    found: list[str] | None = getattr(getattr(feature, "feature", feature), "names", None)
    if found is not None and column.classes is not None:
        column.classes[:] = found
    return found


def _named(value: Any, names: list[str] | None) -> Any:
    """The names of one or several numbers; a number without a name, such as -1, stands for no label."""
    if names is None or value is None:
        return value
    if isinstance(value, list):
        return [_named(one, names) for one in value]
    return names[value] if 0 <= value < len(names) else None
