"""The table of settings that fit into GPUs is what its command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.benchmarks import fitting

DOCS = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def needed() -> dict[str, int | None]:
    """Bytes that the smallest model needs by each settings."""
    return fitting.needs_of(fitting.SIZES[0])


def test_table_of_the_docs_has_the_models_of_the_command_and_the_first_of_them_is_computed_alike(
    needed: dict[str, int | None],
) -> None:
    first = DOCS.index(next(fitting.table()))
    rows = DOCS[first + 2 : first + 2 + len(fitting.SIZES)]
    assert [row.split(" | ")[0] for row in rows] == [f"| {size.name}" for size in fitting.SIZES]
    assert rows[0] == fitting.row(fitting.SIZES[0], needed)


def test_needed_memory_grows_with_what_is_trained_and_shrinks_by_checkpointing(needed: dict[str, int | None]) -> None:
    whole, again, narrow, _, adapter, lean, half, least = (needed[name] or 0 for name in fitting.SETTINGS)
    assert whole > again > lean > 124_000_000 * 4 and least > 124_000_000 * 2
    assert whole > narrow and whole > adapter > lean and adapter > half > least
