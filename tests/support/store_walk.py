"""Random steps on a store and on its model, compared after each."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.store_bench import PARTS, POINTS, flip
from tests.support.store_model import Books


class Walker:
    """Takes random steps until it is lost, or has taken enough; `step` tells how far it came."""

    STEPS = 20

    def __init__(self, room: Any, directory: Path, seed: int) -> None:
        self._dice = random.Random(seed)
        self._books = Books(room, directory, self._dice.randint(1, 3), self._dice.randint(1, 3))
        self.step = 0

    def walk(self) -> None:
        books = self._books
        moves = [books.commit, self._fill_up, self._crash, self._repeat, books.restart, self._damage, self._refuse]
        weights = [8, 4, 6, 2, 3, 3, 2]
        while self.step < self.STEPS and not books.is_lost():
            self.step += 1
            begins = books.model.recorded == 0 and self._dice.random() < 0.5
            (self._fill_up if begins else self._dice.choices(moves, weights)[0])()

    def _fill_up(self) -> None:
        """The disk refuses one write, or all from one on."""
        first = self._dice.randint(1, 8)
        self._books.commit(range(first, self._dice.choice([first + 1, 40])))
        if self._books.model.is_half_begun():
            self._books.restart()

    def _crash(self) -> None:
        point = self._dice.choice(POINTS)
        self._books.crash(point, self._dice.randint(1, 6) if point == "write" else 1)

    def _repeat(self) -> None:
        model = self._books.model
        if model.rounds and model.recorded == len(model.rounds) and not model.failed:
            if self._dice.random() < 0.5:
                self._books.store = self._books.revived()
            self._books.repeat()

    def _damage(self) -> None:
        model = self._books.model
        spoil = self._dice.choice([partial(flip, place=self._dice.random()), cut, Path.unlink])
        if self._dice.random() < 0.3 and model.recorded == len(model.rounds) > 1:
            usable, newest = model.usable(), model.recorded - 1
            if usable is not None and (usable < newest or len(model.shots) > 1):
                self._books.damage_record(flip)
            return
        whole = [number for number, shot in model.shots.items() if shot.sound]
        if whole:
            self._books.damage(self._dice.choice(whole), self._dice.choice(PARTS), spoil)
            if self._dice.random() < 0.3:
                self._repeat()

    def _refuse(self) -> None:
        rounds = len(self._books.model.rounds)
        if rounds == self._books.model.recorded and self._dice.random() < 0.5:
            self._books.rival()
        else:
            self._books.refuse(
                self._dice.choice([number for number in (rounds - 2, rounds - 1, rounds + 1) if number >= 0])
            )


def cut(path: Path) -> None:
    """Take a file's second half away."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
