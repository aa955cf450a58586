"""The ledger beside a model: any sequence of steps, random walks, and defects that these walks must find."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from hypha_ray.scheduler.ledger import Ledger
from hypha_ray.types import window
from tests.support.ledger_model import WORKERS, Books, Walker
from tests.support.mutants_slices import MUTANTS, mutant

BUDGET = 60
"""Walks in which every defect has to show."""

workers = st.sampled_from(WORKERS)


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of steps on a ledger of four slices, and then a drain."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(Ledger, 5, 1, 8, 3)

    @rule(worker=workers, samples=st.integers(0, 40), cached=st.sets(st.integers(0, 4)))
    def assign(self, worker: int, samples: int, cached: set[int]) -> None:
        self.books.assign(worker, samples, cached)

    @rule(worker=workers, keep=st.integers(0, 20))
    def release(self, worker: int, keep: int) -> None:
        self.books.release(worker, keep)

    @rule(cuts=st.dictionaries(workers, st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1))
    def commit(self, cuts: dict[int, tuple[int, int]]) -> None:
        held = {worker: tuple(self.books.ledger.held.get(worker, ())) for worker in cuts}
        self.books.commit({worker: window(held[worker], *cut) for worker, cut in cuts.items()})

    @precondition(lambda self: any(self.books.model.held.values()))
    @rule(thief=workers, worker=workers)
    def steal(self, thief: int, worker: int) -> None:
        loot = tuple(self.books.ledger.held.get(worker, ()))
        if loot and thief != worker:
            self.books.refuse({thief: (*tuple(self.books.ledger.held.get(thief, ())), loot[0])})

    @rule(worker=workers, samples=st.integers(1, 40))
    def restart(self, worker: int, samples: int) -> None:
        self.books.restart(worker, samples)

    def teardown(self) -> None:
        self.books.drain()


LedgerMachine.TestCase.settings = settings(
    deadline=None, derandomize=True, max_examples=40, stateful_step_count=40, print_blob=True
)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.mark.parametrize("seed", range(BUDGET))
def test_random_walk_beside_the_model_agrees_and_drains(seed: int) -> None:
    Walker(Ledger, seed).walk()


@pytest.mark.parametrize("name", MUTANTS)
def test_random_walks_find_the_defect(name: str) -> None:
    assert any(dies(name, seed) for seed in range(BUDGET)), f"nobody noticed: {name}"


def dies(name: str, seed: int) -> bool:
    """Does a walk with a defective ledger fail, however it fails?"""
    walker = Walker(mutant(name), seed)
    try:
        walker.walk()
    except Exception as failure:
        print(f"{name}: seed {seed}, step {walker.step}: {failure!r}")
        return True
    return False
