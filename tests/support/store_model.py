"""A store beside the simplest thing that could be one: a list of complete rounds, and what of them is on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hypha_ray.config.training import Checkpoint
from hypha_ray.errors import CheckpointError, TryAgainError
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.commits import CommitLog, check_chain
from hypha_ray.store.restore_point import restart
from tests.support.store_bench import GROUP, LAYOUT, PARTS, WORKERS, armed, ask, flats, inner_state, persist

ROOM = SimpleNamespace(CommitWriter=CommitWriter, restart=restart)
"""The real store; a mutant is one with a defect."""
UPDATE_ROUNDS = 1000


@dataclass
class Round:
    """A round that was committed, by the seed of its numbers."""

    seed: int
    recorded: bool = False
    """Its record is on disk, and not only in the store's memory."""


@dataclass
class Shot:
    """A snapshot on disk."""

    seed: int
    sound: bool = True
    first: bool = False
    """There was no record on disk before it."""
    looks_sound: bool = True
    """Its own record is sound; more isn't looked at before older ones are removed."""


@dataclass
class Model:
    """What has to be there."""

    every: int
    keep: int
    failures: int
    rounds: list[Round] = field(default_factory=list)
    shots: dict[int, Shot] = field(default_factory=dict)
    failed: int = 0

    @property
    def recorded(self) -> int:
        """Number of records on disk."""
        return sum(one.recorded for one in self.rounds)

    def usable(self) -> int | None:
        """The round that a restart goes on from."""
        return max((number for number in self.shots if self.fits(number) and self.shots[number].sound), default=None)

    def fits(self, number: int) -> bool:
        """Whether a snapshot is that of a record on disk."""
        return number < self.recorded and self.shots[number].seed == self.rounds[number].seed

    def is_half_begun(self) -> bool:
        """The first snapshot was late, and the disk did not take all records that had waited for it."""
        late = any(shot.first and shot.looks_sound for shot in self.shots.values())
        return late and 0 < self.recorded <= min(self.shots)

    def is_due(self, number: int) -> bool:
        return (number + 1) % self.every == 0 or number == 0 or self.failed > 0

    def writing(self, seed: int) -> Iterator[str]:
        """Write a round: gives every place where the store might die, with what is done until then done."""
        number, due = len(self.rounds), self.is_due(len(self.rounds))
        yield "before_snapshot"
        if self.recorded:
            yield from self._catch_up()
        if due:
            yield from ("write", "after_weights", "write", "write", "write", "write", "before_publish")
            self.shots[number] = Shot(seed, first=not self.recorded)
        yield "before_record"
        self.rounds.append(Round(seed))
        yield from self._catch_up()
        yield "after_record"
        self.failed = 0
        self.prune()

    def refused(self, seed: int, hits: Collection[int]) -> bool:
        """Write a round while the disk refuses some writes; was any of them refused?"""
        number, writes = len(self.rounds), iter(range(1, 100))
        steps = self.recorded > 0
        fine = not steps or self._flush(writes, hits)
        if fine and self.is_due(number):
            fine = all(next(writes) not in hits for _ in PARTS)
            if fine:
                self.shots[number] = Shot(seed, first=not self.recorded)
        self.rounds.append(Round(seed))
        if fine or steps:
            fine = self._flush(writes, hits) and fine
        self.failed = 0 if fine else self.failed + 1
        if fine:
            self.prune()
        return not fine

    def prune(self) -> None:
        """Older snapshots than the newest that look sound are gone."""
        counted = sorted(number for number in self.shots if self.fits(number) and self.shots[number].looks_sound)
        first = min(counted[-self.keep :], default=0)
        self.shots = {number: shot for number, shot in self.shots.items() if number >= first}

    def _catch_up(self) -> Iterator[str]:
        for one in self.rounds[self.recorded :]:
            yield from ("write", "before_link")
            one.recorded = True

    def _flush(self, writes: Iterator[int], hits: Collection[int]) -> bool:
        for one in self.rounds[self.recorded :]:
            if next(writes) in hits:
                return False
            one.recorded = True
        return True


class Books:
    """Does everything to a store and to the model, and compares them after each step."""

    def __init__(self, room: Any, directory: Path, every: int, keep: int) -> None:
        self.room, self.directory, self.hits = room, directory, directory.with_suffix(".hits")
        self.checkpoint = Checkpoint(every_rounds=every, keep=keep, failures=3)
        self.model = Model(every, keep, self.checkpoint.failures)
        self.log = CommitLog(directory)
        self._seeds = iter(range(1, 1000))
        self.store = self.revived()

    def revived(self) -> Any:
        """A store in a new process."""
        return self.room.CommitWriter(self.directory, self.checkpoint, UPDATE_ROUNDS)

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def commit(self, hits: Collection[int] = ()) -> None:
        """Commit the next round, while the disk refuses some writes."""
        number, seed = len(self.model.rounds), next(self._seeds)
        refused = self.model.refused(seed, hits)
        saved, specs = None, [f"store.write=nospace@{','.join(map(str, hits))}"] if hits else []
        with armed(self.hits, *specs), suppress(TryAgainError):
            saved = ask(self.store, number, seed)
        assert (saved is None) == (self.model.failed == self.model.failures), "the run ends too early or too late"
        if saved is None:
            self.restart()
            return
        assert saved.commit.round == number and bool(saved.problem) == refused, "the answer is wrong"
        assert not list(self.directory.glob("*/*.tmp")), "temporary files are left"
        self.compare()

    def crash(self, point: str, hit: int) -> None:
        """The store dies somewhere in a commit; the one that takes over is asked again."""
        number, seed = len(self.model.rounds), next(self._seeds)
        places: Counter[str] = Counter()
        for place in self.model.writing(seed):
            places[place] += 1
            if (place, places[place]) == (point, hit):
                break
        with armed(self.hits, f"store.{point}=error@{hit}"):
            try:
                ask(self.store, number, seed)
            except RuntimeError:
                self.store = None
        assert (self.store is None) == (places[point] == hit), "it died elsewhere"
        if self.store is None:
            self._die()
            self._ask_again(number, seed)
        self.compare()

    def repeat(self) -> None:
        """The answer to the newest commit was lost, and maybe its store, too."""
        number, seed = len(self.model.rounds) - 1, self.model.rounds[-1].seed
        shot = self.model.shots.get(number)
        good = shot is not None and shot.looks_sound and self.model.fits(number)
        if self.model.is_due(number) and not good:
            self.model.shots[number] = Shot(seed)
        newest = self.log.newest()
        assert ask(self.store, number, seed).commit == newest == self.log.newest(), "another record was given"
        self.model.prune()
        self.compare()

    def refuse(self, number: int, store: Any = None) -> None:
        """Commit something impossible."""
        try:
            ask(store or self.store, number, next(self._seeds))
        except (CheckpointError, TryAgainError):
            self.compare()
        else:
            raise AssertionError(f"round {number} was committed")

    def rival(self) -> None:
        """Two stores write the same round."""
        other = self.revived()
        self.commit()
        self.refuse(len(self.model.rounds) - 1, other)

    def damage(self, number: int, name: str, spoil: Callable[[Path], None]) -> None:
        """Damage a file of a snapshot."""
        spoil(self.directory / "checkpoints" / f"round_{number:06d}" / name)
        shot = self.model.shots[number]
        shot.sound, shot.looks_sound = False, shot.looks_sound and name != "state.json"
        self.compare()

    def damage_record(self, spoil: Callable[[Path], None]) -> None:
        """The scheduler dies, and the newest record is damaged."""
        self._die()
        spoil(self.log.path(self.model.recorded - 1))
        self.model.rounds.pop()
        self.restart()

    def restart(self) -> None:
        """A new scheduler goes on from what is on disk."""
        self._die()
        found = self.room.restart(self.directory)
        if found is not None:
            found.rewind()
        del self.model.rounds[found.next_round if found else 0 :]
        assert self.log.rounds() == list(range(len(self.model.rounds))), "the log isn't cut where the run goes on"
        self.store = self.revived()
        seed = self.model.rounds[-1].seed if self.model.rounds else 0
        self.store.begin(LAYOUT, *flats(seed)[:2])
        self.compare()

    def is_lost(self) -> bool:
        """There are commits, and no snapshot that can be used."""
        return self.model.recorded > 0 and self.model.usable() is None and not self.model.is_half_begun()

    # ── comparisons ───────────────────────────────────────────────────────────────────────────────────────────────

    def compare(self) -> None:
        """What would a restart find?"""
        check_chain(self.log.read())
        assert self.log.rounds() == list(range(self.model.recorded)), "a record is lost, or one too many"
        present = {int(path.name[6:]) for path in (self.directory / "checkpoints").glob("round_*[0-9]")}
        assert present == set(self.model.shots), "other snapshots are there"
        usable = self.model.usable()
        if self.model.is_half_begun():
            return  # A restart would set its records aside.
        try:
            found = self.room.restart(self.directory)
        except CheckpointError:
            assert self.is_lost(), "a good snapshot isn't used"
            return
        assert not self.is_lost(), "a damaged snapshot is used"
        assert (None if found is None else found.next_round - 1) == usable, "another round is the newest usable one"
        if found is not None and usable is not None:
            self._compare_contents(found, self.model.rounds[usable].seed)
            self._compare_books(found, usable)

    def _compare_contents(self, found: Any, seed: int) -> None:
        a, b, *momentum = (flat[GROUP] for flat in flats(seed))
        for tensors, expected in ((found.theta, (a, b)), (found.outer, momentum)):
            assert all(np.array_equal(tensors[n].ravel(), x) for n, x in zip("ab", expected, strict=True)), "weights"
        assert found.inner.keys() == set(WORKERS) and found.state == {"seed": seed}, "states are missing"
        for worker in WORKERS:
            state = inner_state(worker, seed)
            assert all(np.array_equal(found.inner[worker][name], state[name]) for name in state), "a state differs"

    def _compare_books(self, found: Any, usable: int) -> None:
        epoch = (usable + 1) // 2
        spans = [span for number in range(usable + 1) for _, part in persist(number, 0).spans for span in part]
        used = sorted([span.epoch, span.slice, span.start, span.stop] for span in spans if span.epoch >= epoch)
        assert (found.epoch, found.used) == (epoch, used), "the used samples are wrong"
        for number in range(usable + 1, self.model.recorded):
            said = f"checkpoint round {number + 1}:" if number in self.model.shots else "no checkpoint"
            assert any(said in line for line in found.skipped), "nobody says what was passed over"

    def _die(self) -> None:
        """What is only in the store's memory is gone."""
        self.store, self.model.failed = None, 0
        del self.model.rounds[self.model.recorded :]

    def _ask_again(self, number: int, seed: int) -> None:
        self.compare()
        self.store = self.revived()
        if number > len(self.model.rounds):
            self.refuse(number)
            self.restart()
        elif number < len(self.model.rounds):
            self.repeat()
        else:
            for _ in self.model.writing(seed):
                pass
            assert ask(self.store, number, seed).problem is None, "a commit was refused"
