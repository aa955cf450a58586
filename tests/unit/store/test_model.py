"""The store beside a model: any sequence of steps, random walks, and defects that these walks must find."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.support.mutants_store import MUTANTS, mutant
from tests.support.store_bench import PARTS, POINTS, flip
from tests.support.store_model import ROOM, Books
from tests.support.store_walk import Walker, cut

BUDGET = 40
"""Walks in which every defect has to show."""


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of a walk is a power failure, so waiting for the disk changes nothing."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class CheckpointStoreMachine(RuleBasedStateMachine):
    """Any sequence of steps on a store; a run that is lost is followed by another."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.start_anew()

    @precondition(lambda self: self.books.is_lost())
    @rule()
    def start_anew(self) -> None:
        directory = Path(tempfile.mkdtemp(dir=self.folder.name)) / "run"
        directory.mkdir()
        self.books = Books(ROOM, directory, 2, 2)

    def goes_on(self) -> bool:
        return not self.books.is_lost()

    @precondition(goes_on)
    @rule(hits=st.sets(st.integers(1, 8), max_size=3))
    def commit(self, hits: set[int]) -> None:
        self.books.commit(sorted(hits))

    @precondition(goes_on)
    @rule(point=st.sampled_from(POINTS), hit=st.integers(1, 6))
    def crash(self, point: str, hit: int) -> None:
        self.books.crash(point, hit)

    @precondition(goes_on)
    @rule()
    def restart(self) -> None:
        self.books.restart()

    @precondition(lambda self: self.goes_on() and any(shot.sound for shot in self.books.model.shots.values()))
    @rule(name=st.sampled_from(PARTS), spoil=st.sampled_from([flip, cut, Path.unlink]))
    def damage(self, name: str, spoil: Callable[[Path], None]) -> None:
        shots = self.books.model.shots
        self.books.damage(max(number for number in shots if shots[number].sound), name, spoil)

    def teardown(self) -> None:
        self.folder.cleanup()


CheckpointStoreMachine.TestCase.settings = settings(
    deadline=None, derandomize=True, max_examples=15, stateful_step_count=15, print_blob=True
)
TestCheckpointStoreMachine = CheckpointStoreMachine.TestCase


@pytest.fixture
def directories(tmp_path: Path) -> Iterator[Path]:
    """New run directories, one after the other."""
    return (made for number in range(10_000) if not (made := tmp_path / f"run-{number}").mkdir())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(BUDGET))
@pytest.mark.long(keep=11)
def test_random_walk_beside_the_model_agrees(directories: Iterator[Path], seed: int) -> None:
    Walker(ROOM, next(directories), seed).walk()


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.long(keep=12)
def test_random_walks_find_the_defect(directories: Iterator[Path], name: str) -> None:
    assert any(dies(name, next(directories), seed) for seed in range(BUDGET)), f"nobody noticed: {name}"


def dies(name: str, directory: Path, seed: int) -> bool:
    """Does a walk with a defective store fail, however it fails?"""
    store, walker = mutant(name), None
    try:
        walker = Walker(store, directory, seed)
        walker.walk()
    except Exception as failure:
        print(f"{name}: seed {seed}, step {walker.step if walker else 0}: {failure!r}")
        return True
    return False
