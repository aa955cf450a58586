"""The server beside a plain model: random rounds, and defects that these rounds must find."""

from __future__ import annotations

import pytest

from hypha_ray.server import reduce as reducer
from tests.support.mutants_server import MUTANTS, mutant
from tests.support.server_model import examine

BUDGET = 200
"""Rounds in which every defect has to show."""


@pytest.mark.parametrize("seed", range(BUDGET))
def test_random_round_beside_the_model_agrees(seed: int) -> None:
    examine(reducer, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(BUDGET))
@pytest.mark.usefixtures("compiled_steps")
def test_random_round_that_is_compiled_agrees_too(seed: int) -> None:
    examine(reducer, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.usefixtures("compiled_steps")
@pytest.mark.long(keep=13)
def test_random_rounds_find_the_defect(name: str) -> None:
    assert any(dies(name, seed) for seed in range(BUDGET)), f"nobody noticed: {name}"


def dies(name: str, seed: int) -> bool:
    """Does a defective server fail in a round, however it fails?"""
    server = mutant(name)
    try:
        examine(server, seed)
    except Exception as failure:
        print(f"{name}: seed {seed}: {failure!r}")
        return True
    return False
