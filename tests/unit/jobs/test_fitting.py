"""The table of settings that fit into GPUs is what its command prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import fitting

DOCS = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines()


WEIGHTS = 50_257 * 768 + 1024 * 768 + 2 * (12 * 768**2 + 13 * 768) + 2 * 768
"""Weights of GPT-2 with two of its layers: both tables, the layers, and the last norm."""


@pytest.mark.slow
def test_table_of_the_docs_has_the_models_of_the_command_and_the_first_of_them_is_computed_alike() -> None:
    """Its fastest settings fit into every GPU, so the others need not be computed."""
    first = DOCS.index(next(fitting.table()))
    rows = DOCS[first + 2 : first + 2 + len(fitting.SIZES)]
    smallest = fitting.SIZES[0]
    assert [row.split(" | ")[0] for row in rows] == [f"| {size.name}" for size in fitting.SIZES]
    fastest = next(iter(fitting.SETTINGS))
    needed = {fastest: fitting.needed_bytes(smallest.config, fitting.SETTINGS[fastest])}
    assert rows[0] == fitting.row(smallest, needed) == f"| {' | '.join([smallest.name, *[fastest] * 4])} |"


@pytest.mark.slow
def test_needed_memory_grows_with_what_is_trained_and_shrinks_by_checkpointing() -> None:
    shallow = fitting.SIZES[0]._replace(config={**fitting.SIZES[0].config, "n_layer": 2})
    needed = fitting.needs_of(shallow)
    whole, again, narrow, _, adapter, lean, half, least = (needed[name] or 0 for name in fitting.SETTINGS)
    assert whole > again > lean > WEIGHTS * 4 and least > WEIGHTS * 2
    assert whole > narrow and whole > adapter > lean and adapter > half > least
