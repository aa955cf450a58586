"""A worker as a Ray actor: signs of life, leaving on SIGTERM, and where failpoints let it die."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayActorError

from hypha_ray.config import Job
from hypha_ray.failpoints import hits
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.types import Alive, Delta, FragmentUpdate, Leaving, Left, Plan, Ready, Report, Source, Span
from hypha_ray.worker.actor import TrainWorker

MODEL = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
WORKER = 3
SAMPLES = 64
LONG = tuple(Span(epoch, 0, 0, SAMPLES) for epoch in range(1000))
"""A plan that nobody waits for the end of."""

pytestmark = pytest.mark.usefixtures("local_ray")


class Seat:
    """A worker, its orders, and its stream."""

    def __init__(self, **tables: dict[str, Any]) -> None:
        beside: dict[str, dict[str, Any]] = {
            "resources": {"num_workers": WORKER + 1},
            "worker": {"report_every_s": 0.2, "lease_s": 0.8},
        }
        tables = {"model": {"config": MODEL}, **beside, **tables}
        self.job = Job.model_validate(tables)
        self.source = Source("test", WORKER, 7)
        cls = ray.remote(concurrency_groups={"control": 1}, allow_out_of_order_execution=True)(TrainWorker)
        self.worker = cls.options(num_cpus=1, max_restarts=0, max_task_retries=0).remote(self.job, self.source)
        self._listen()

    def reset(self, times: int = 1) -> Seat:
        """The same worker under a later incarnation; those in between never ran."""
        successor = copy(self)
        for _ in range(times):
            successor.source = replace(successor.source, incarnation=successor.source.incarnation + 1)
            assert ray.get(self.worker.reset.remote(successor.source))
        successor._listen()
        return successor

    def _listen(self) -> None:
        self._stream = self.worker.run.remote(self.source)
        self.said: list[Any] = []

    def start(self, spans: tuple[Span, ...], number: int = 0) -> None:
        model = build_model(self.job.model, self.job.run.seed)
        ids = np.random.default_rng(0).integers(0, 256, (SAMPLES, 32)).astype(np.int32)
        self.worker.feed.remote(0, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        self.worker.assign.remote(self.source, Plan(number, 0, spans, 4, keep=frozenset({0})))
        self.worker.merge.remote(self.source, FragmentUpdate(number, 0), gather(model, layout_of(model), 0))

    def __iter__(self) -> Iterator[Any]:
        for ref in self._stream:
            self.said.append(ray.get(ref))
            yield self.said[-1]

    def until(self, kind: type) -> Any:
        """Listen up to the first item of a kind."""
        return next(item for item in self if isinstance(item, kind))

    def of(self, kind: type) -> list[Any]:
        """What it has said of a kind."""
        return [item for item in self.said if isinstance(item, kind)]

    @property
    def names(self) -> list[str]:
        """What it has said, signs of life left out."""
        return [type(item).__name__ for item in self.said if not isinstance(item, Alive)]


@pytest.fixture
def seat() -> Iterator[Callable[..., Seat]]:
    seats: list[Seat] = []

    def take(**tables: dict[str, Any]) -> Seat:
        seats.append(Seat(**tables))
        return seats[-1]

    yield take
    for one in seats:
        ray.kill(one.worker)


def sigterm(one: Seat) -> None:
    os.kill(ray.get(one.worker.pid.remote()), signal.SIGTERM)


def order(one: Seat) -> None:
    ray.get(one.worker.leave.remote("drained"))


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_worker_says_that_it_is_alive_while_it_builds_the_model_and_while_it_waits(
    seat: Callable[..., Seat], tmp_path: Path
) -> None:
    one = seat(testing={"failpoints": ["worker.start=pause@1"], "failpoint_log": str(tmp_path / "hits")})
    one.until(Ready)
    idle = Alive(one.source, machine=socket.gethostname())
    assert one.said[0] == idle
    waiting = iter(one)
    assert [next(waiting) for _ in range(3)] == [idle] * 3


@pytest.mark.parametrize(("tell", "reason"), [(sigterm, "SIGTERM"), (order, "drained")])
def test_worker_told_to_leave_hands_over_what_it_has_done_and_ends_its_stream(
    tell: Callable[[Seat], None], reason: str, seat: Callable[..., Seat]
) -> None:
    one = seat()
    one.start(LONG)
    one.until(Report)
    tell(one)
    tell(one)
    list(one)
    assert one.of(Leaving) == [Leaving(one.source, reason)]
    assert one.names[-3:] == ["Delta", "dict", "Left"]
    delta, weights = one.of(Delta)[0], one.of(dict)[0]
    assert delta.samples == sum(report.samples for report in one.of(Report))
    assert delta.samples == sum(span.samples for span in delta.spans) < len(LONG) * SAMPLES
    assert delta.spans[:-1] == LONG[: len(delta.spans) - 1]
    other = seat()
    other.start(delta.spans)
    assert same(weights, other.until(dict))


def test_idle_worker_told_to_leave_only_says_so(seat: Callable[..., Seat]) -> None:
    one = seat()
    one.until(Ready)
    sigterm(one)
    rest = [item for item in one if not isinstance(item, Alive)]
    assert rest == [Leaving(one.source, "SIGTERM"), Left(one.source)]


def test_stopped_worker_ends_its_stream_without_a_word(seat: Callable[..., Seat]) -> None:
    one = seat()
    one.start(LONG)
    one.until(Report)
    one.worker.stop.remote()
    list(one)
    assert set(one.names) == {"Ready", "Merged", "Report"}


def test_replay_mode_hands_over_weights_and_then_inner_state(seat: Callable[..., Seat]) -> None:
    one = seat(run={"mode": "replay"})
    one.start((Span(0, 0, 0, 16),))
    assert one.until(Delta).inner_state
    assert set(one.until(dict)) == {"parameters/float32"}
    assert float(one.until(dict)["0/0/step"]) == 4.0


@pytest.mark.parametrize(
    ("point", "hit", "never"),
    [
        ("worker.start", 1, Ready),
        ("worker.step", 3, Delta),
        ("worker.before_delta", 1, Delta),
        ("worker.mid_delta", 1, dict),
    ],
)
def test_worker_killed_at_a_point_never_says_what_comes_after(
    point: str, hit: int, never: type, seat: Callable[..., Seat], tmp_path: Path
) -> None:
    log = tmp_path / "hits.jsonl"
    one = seat(testing={"failpoints": [f"{point}:{WORKER}=kill@{hit}"], "failpoint_log": str(log)})
    one.start((Span(0, 0, 0, 16),))
    with pytest.raises(RayActorError):
        list(one)
    assert hits(log, point) == 1 and not one.of(never)


def test_payload_that_was_taken_survives_the_worker(seat: Callable[..., Seat], tmp_path: Path) -> None:
    log = tmp_path / "hits.jsonl"
    one = seat(testing={"failpoints": [f"worker.after_delta:{WORKER}=kill@1"], "failpoint_log": str(log)})
    one.start((Span(0, 0, 0, 16),))
    with pytest.raises(RayActorError):
        list(one)
    assert hits(log, "worker.after_delta") == 1
    other = seat()
    other.start((Span(0, 0, 0, 16),))
    assert same(one.of(dict)[0], other.until(dict))


def test_reset_worker_ends_its_stream_and_works_under_another_name_from_nothing(seat: Callable[..., Seat]) -> None:
    one = seat()
    one.start(LONG)
    one.until(Report)
    pid = ray.get(one.worker.pid.remote())
    successor = one.reset()
    list(one)
    assert set(one.names) == {"Ready", "Merged", "Report"}
    successor.start((Span(0, 0, 0, 16),))
    assert successor.until(dict) and successor.names[:2] == ["Ready", "Merged"]
    assert {item.source for item in successor.said if not isinstance(item, dict)} == {successor.source}
    assert ray.get(successor.worker.pid.remote()) == pid
    other = seat()
    other.start((Span(0, 0, 0, 16),))
    assert same(successor.of(dict)[0], other.until(dict))


def test_reset_worker_doesnt_hear_orders_that_were_given_before(seat: Callable[..., Seat]) -> None:
    late = seat()
    late.until(Ready)
    one = late.reset()
    late.start((Span(0, 0, 0, 32),), number=5)
    one.start((Span(0, 0, 0, 16),))
    assert (one.until(Delta).round, one.of(Delta)[0].samples) == (0, 16)
    one.worker.stop.remote()
    assert not list(late.worker.run.remote(late.source))


def test_worker_reset_twice_before_it_runs_works(seat: Callable[..., Seat]) -> None:
    one = seat()
    one.start(LONG)
    one.until(Report)
    last = one.reset(times=2)
    last.start((Span(0, 0, 0, 16),))
    assert last.until(Delta).samples == 16


def test_leaving_worker_refuses_to_be_reset(seat: Callable[..., Seat]) -> None:
    one = seat()
    one.until(Ready)
    order(one)
    assert not ray.get(one.worker.reset.remote(Source("test", WORKER, 8)))
