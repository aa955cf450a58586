"""A run of very many short rounds, through the real core and the real store: the last ones take no more than the first.

python -m pytest tests/unit/scheduler/test_long_run.py                  # as many rounds as CI has time for
python -m pytest tests/unit/scheduler/test_long_run.py --rounds 20000   # as synchronous training has in an hour
"""

from __future__ import annotations

import builtins
import gc
import os
from collections import Counter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from hypha_ray.config.training import Checkpoint
from hypha_ray.scheduler import messages as c
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.types import Saved
from tests.support.fleet import Fleet, job_of, rounds, slices_of
from tests.support.store_bench import LAYOUT, flats

ROUNDS = 640
"""In CI."""
SAMPLES, SLICES = 8, 20
"""Of a round, and of the dataset, of which each has as many samples as eight rounds: an epoch has 160 rounds."""
EPOCH = SLICES * 64 // SAMPLES
CALLS = ("open", "scandir", "listdir", "stat", "rename", "link", "unlink", "mkdir", "fsync")
"""Calls by which a commit asks the system for something."""


class LongRun(Fleet):
    """A fleet on a virtual clock whose commits are written by a store; of what has happened nothing is kept."""

    def __init__(self, directory: Path, update_rounds: int, strategy: str) -> None:
        job = job_of(rounds=rounds(update_rounds, SAMPLES, evaluate_every=0), sync={"strategy": strategy})
        super().__init__(job, [0.1, 0.13], slices_of(SLICES, 64, validation=0))
        self.kept = CommitWriter(directory, Checkpoint(every_rounds=50), update_rounds)
        self.kept.begin(LAYOUT, *flats(0)[:2])
        self.sizes: dict[int, int] = {}
        self.calls: dict[int, Counter[str]] = {}
        self._asked: Counter[str] = Counter()

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, name in [(os, name) for name in CALLS] + [(builtins, "open")]:
            monkeypatch.setattr(module, name, self._counted(name, getattr(module, name)))

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            self._asked[name] += 1
            if name in ("scandir", "listdir"):
                result = list(result)
                self._asked["names"] += len(result)
                return _Listing(result)
            return result

        return counted

    def saved(self, command: c.Persist) -> Saved:
        super().saved(command)
        self._asked.clear()
        saved = self.kept.commit(command, LAYOUT, (), *flats(command.round))
        assert saved.problem is None
        self.calls[command.round] = Counter(self._asked)
        for seen in (self.commands, self.records, self.notes, self.persisted, self.reduces, self.commits):
            seen.clear()
        if command.round % EPOCH == EPOCH - 1:
            self.sizes[command.round] = reachable(self.core, self.kept)
        return saved


class _Listing(list[Any]):
    """A list of names that was counted, where the system gives an iterator that can be closed."""

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass


def reachable(*roots: object) -> int:
    """Objects that can be come to from these, but for code."""
    seen, waiting = set[int](), list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
            seen.add(id(one))
            waiting += gc.get_referents(one)
    return len(seen)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("strategy", ["sync", "diloco", "async"])
@pytest.mark.long(keep=1)
def test_late_rounds_take_no_more_memory_and_ask_no_more_of_the_disk_than_early_ones(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("rounds", None) or ROUNDS
    run = LongRun(tmp_path, count, strategy)
    run.watch(monkeypatch)
    run.run(limit=1000 * count)
    assert run.error is None
    first, *others = [size for round, size in sorted(run.sizes.items()) if round >= EPOCH]
    assert others and max(others) < 1.05 * first, run.sizes
    early, late = run.calls[EPOCH + 1], run.calls[count - 30]
    assert early == late and early["fsync"] >= 2
    assert early["names"] < 2 * Checkpoint().keep + 2, "the log is listed"
