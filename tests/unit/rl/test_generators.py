"""Pieces of batches among generators: each is answered once, whatever dies, is silent, comes late or never comes."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypha_ray.errors import ConfigError
from hypha_ray.market.buyer import workers_to_hire
from hypha_ray.rl.dataflow.graph import step_text
from hypha_ray.rl.dataflow.requests import Meta, Sample
from hypha_ray.rl.generator_pool import (
    Arrival,
    Dispatch,
    GeneratorLostError,
    GeneratorPool,
    Piece,
    SharedWeights,
    pieces_of,
)
from tests.support.rl import job
from tests.unit.market.nodes import node

DEADLINE_S = 10.0
STORED = SharedWeights(1, "weights")


def prompts(count: int, batch: int = 0) -> Sample:
    ids = tuple(f"{batch}-0-{row}" for row in range(count))
    return Sample(Meta(ids, {"keys": ((1,),) * count}), {"keys": np.array([[batch, 0, row] for row in range(count)])})


def pieces(batch: int, count: int, size: int = 1, weights: SharedWeights = STORED) -> list[Piece]:
    return list(pieces_of(batch, prompts(count, batch), size, weights, {}))


def test_a_batch_is_divided_in_order_into_pieces_of_one_size_and_a_rest() -> None:
    divided = pieces(3, 7, 3)

    assert [piece.prompts.ids for piece in divided] == [
        ("3-0-0", "3-0-1", "3-0-2"),
        ("3-0-3", "3-0-4", "3-0-5"),
        ("3-0-6",),
    ]
    assert [piece.key for piece in divided] == [(3, 0), (3, 1), (3, 2)]


def test_generators_get_a_piece_each_those_of_earlier_batches_first() -> None:
    dispatch = Dispatch[str](DEADLINE_S)
    dispatch.join("a")
    dispatch.join("b")
    dispatch.add(pieces(2, 2))
    dispatch.add(pieces(1, 1))

    assert [(name, piece.key) for name, piece in dispatch.assign(0.0)] == [("a", (1, 0)), ("b", (2, 0))]
    assert dispatch.assign(0.0) == []


def test_pieces_whose_weights_are_not_stored_go_to_no_generator() -> None:
    dispatch = Dispatch[str](DEADLINE_S)
    dispatch.join("a")
    dispatch.add(pieces(1, 1, weights=SharedWeights(1, None)))

    assert dispatch.assign(0.0) == []
    assert dispatch.take(1) is not None


def test_an_overdue_piece_goes_to_another_generator_and_the_silent_one_gets_nothing_until_it_answers() -> None:
    dispatch = Dispatch[str](DEADLINE_S)
    dispatch.join("a")
    dispatch.add(pieces(1, 1))
    [(_, piece)] = dispatch.assign(0.0)
    assert dispatch.expire(DEADLINE_S) == ()
    assert dispatch.expire(DEADLINE_S + 0.1) == ("a",)
    assert dispatch.usable == ()
    dispatch.join("b")
    dispatch.add(pieces(2, 1))

    assert [name for name, _ in dispatch.assign(11.0)] == ["b"]
    dispatch.answer("b", piece, "of b")
    dispatch.answer("a", piece, "of a")

    assert [part.answer for part in dispatch.answers(1) or ()] == ["of b"]
    assert dispatch.usable == ("a", "b")
    assert [name for name, _ in dispatch.assign(12.0)] == ["a"]


class Fleet(RuleBasedStateMachine):
    """A worker with two batches on their way, and generators that die, are silent, answer, and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatch = Dispatch[tuple[str, tuple[int, int]]](DEADLINE_S)
        self.now = 0.0
        self.asked: dict[str, Piece] = {}
        self.sent: list[Piece] = []
        self.batch = 0

    @rule(count=st.integers(1, 4))
    def send(self, count: int) -> None:
        self.batch += 1
        self.sent += pieces(self.batch, count)
        self.dispatch.add(pieces(self.batch, count))

    @rule(name=st.sampled_from("abc"))
    def join(self, name: str) -> None:
        if name not in self.asked:
            self.dispatch.join(name)

    @rule(name=st.sampled_from("abc"))
    def lose(self, name: str) -> None:
        self.asked.pop(name, None)
        self.dispatch.lose(name)

    @rule()
    def assign(self) -> None:
        for name, piece in self.dispatch.assign(self.now):
            assert name not in self.asked
            self.asked[name] = piece

    @rule(name=st.sampled_from("abc"))
    def answer(self, name: str) -> None:
        piece = self.asked.pop(name, None)
        if piece is not None:
            self.dispatch.answer(name, piece, (name, piece.key))

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.dispatch.expire(self.now)

    @rule()
    def help(self) -> None:
        """The worker responds to a piece itself."""
        for batch in range(1, self.batch + 1):
            piece = self.dispatch.take(batch)
            if piece is not None:
                self.dispatch.answer("worker", piece, ("worker", piece.key))
                return

    @invariant()
    def every_piece_is_answered_queued_or_under_way(self) -> None:
        answered: list[tuple[int, int]] = []
        for answers in self.dispatch._answers.values():
            answered += [part.piece.key for part in answers.values()]
        assert len(answered) == len(set(answered))
        known = {*answered, *self.dispatch._queue, *(piece.key for piece in self.asked.values())}
        assert known >= {piece.key for piece in self.sent}

    def teardown(self) -> None:
        """Once generators are gone, the worker finishes all batches alone."""
        for name in "abc":
            self.lose(name)
        for batch in range(1, self.batch + 1):
            while (piece := self.dispatch.take(batch)) is not None:
                self.dispatch.answer("worker", piece, ("worker", piece.key))
            answers = self.dispatch.answers(batch)
            assert answers is not None
            assert [part.piece.key for part in answers] == [piece.key for piece in self.sent if piece.batch == batch]
            assert all(part.answer == (part.responder, part.piece.key) for part in answers)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Line:
    """Generators that answer when a test says so."""

    def __init__(self) -> None:
        self.found: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.asked: queue.SimpleQueue[tuple[int, str, Piece]] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[Arrival[str]] = queue.SimpleQueue()
        self._count = 0

    def look(self) -> Sequence[str]:
        names = []
        while not self.found.empty():
            names.append(self.found.get())
        return names

    def ask(self, name: str, piece: Piece) -> int:
        self._count += 1
        self.asked.put((self._count, name, piece))
        return self._count

    def wait(self, references: Sequence[Any], timeout_s: float) -> Sequence[Arrival[str]]:
        try:
            return [self._arrivals.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def answer(self, reference: int, answer: str | Exception) -> None:
        self._arrivals.put(Arrival(reference, answer))


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def pool(line: Line) -> Iterator[GeneratorPool[str]]:
    line.found.put("a")
    pool = GeneratorPool[str](line, "worker-0", 60.0, start_s=0.0)
    yield pool
    pool.close()


def alone(piece: Piece) -> str:
    return f"worker's {piece.index}"


def test_the_piece_of_a_lost_generator_is_answered_by_the_worker_which_says_so(
    line: Line, pool: GeneratorPool[str]
) -> None:
    pool.send(pieces(1, 1))
    reference, name, _ = line.asked.get(timeout=30)
    line.answer(reference, GeneratorLostError("its node died"))

    [part] = pool.collect(1, alone, helps=False)

    assert (name, part.responder, part.answer, part.is_shared) == ("a", "worker-0", "worker's 0", False)
    assert pool.take_problems() == (
        "a is lost, and others respond in its place: its node died",
        "worker-0 reaches no generator, and responds itself meanwhile",
    )
    assert pool.take_problems() == ()


def test_a_generator_that_comes_late_responds_to_what_is_left(line: Line, pool: GeneratorPool[str]) -> None:
    pool.send(pieces(1, 2))
    first, _, _ = line.asked.get(timeout=30)
    line.found.put("b")
    second, name, piece = line.asked.get(timeout=30)
    assert (name, piece.key) == ("b", (1, 1))
    line.answer(second, "of b")
    line.answer(first, "of a")

    parts = pool.collect(1, alone, helps=False)

    assert [(part.responder, part.answer) for part in parts] == [("a", "of a"), ("b", "of b")]
    assert all(part.is_shared for part in parts)
    assert pool.take_problems() == ()


def test_a_worker_that_helps_leaves_to_generators_what_they_have(line: Line, pool: GeneratorPool[str]) -> None:
    pool.send(pieces(1, 2))
    reference, _, _ = line.asked.get(timeout=30)

    def respond(piece: Piece) -> str:
        line.answer(reference, "of a")
        return alone(piece)

    assert [part.answer for part in pool.collect(1, respond, helps=True)] == ["of a", "worker's 1"]


def test_an_error_of_the_users_code_in_a_generator_is_raised_by_the_worker(
    line: Line, pool: GeneratorPool[str]
) -> None:
    pool.send(pieces(1, 1))
    reference, _, _ = line.asked.get(timeout=30)
    line.answer(reference, ConfigError("RWD001", "a reward function failed"))

    with pytest.raises(ConfigError, match="RWD001"):
        pool.collect(1, alone, helps=False)


def test_an_answer_to_a_dropped_batch_frees_its_generator_and_counts_nowhere(
    line: Line, pool: GeneratorPool[str]
) -> None:
    pool.send(pieces(1, 1))
    reference, _, _ = line.asked.get(timeout=30)
    pool.drop(1)
    pool.send(pieces(2, 1))
    line.answer(reference, "of the dropped one")
    reference, name, piece = line.asked.get(timeout=30)
    assert (name, piece.key) == ("a", (2, 0))
    line.answer(reference, "of the next one")

    assert [part.answer for part in pool.collect(2, alone, helps=False)] == ["of the next one"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--rl.model_workers=2"], r"CFG011.*rl\.generators.*rl\.model_workers"),
        (["--rl.refill=1", "--rl.drop_equal_groups=true"], r"CFG011.*rl\.generators.*rl\.refill"),
        (["--rl.generation.engine=server", '--rl.generation.server.command="a {model} {port}"'], r"CFG011.*server"),
        (["--run.mode=replay", "--resources.generator.cpu=2"], r"CFG011.*resources\.generator.*replay"),
    ],
)
def test_what_generators_do_not_go_with_is_refused(flags: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        job(*flags, generators=2)


def test_generators_are_refused_where_owners_have_terms() -> None:
    wanted = job("--resources.num_workers=1", generators=1)
    assert workers_to_hire(wanted, [node("a", 4)], "a") == [0]
    with pytest.raises(ConfigError, match=r"CFG011.*rl\.generators"):
        workers_to_hire(wanted, [node("a", 4, price=1.0)], "a")


def test_the_graph_of_a_step_names_generators_before_it() -> None:
    first, second, *_ = step_text(job(generators=2).rl).splitlines()
    assert first.startswith("before, by up to 2 generators  rollout (rollout.generate): prompts, keys, reward_data -> ")
    assert second.startswith("0  advantage_inf")
