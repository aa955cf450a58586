"""Runs with long delays and several exchanges under way: each delta is of what comes after the merge."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.types import Plan, samples_of
from tests.support import weather
from tests.support.walk import Walk

ROUNDS, WORKERS, IN_FLIGHT = 8, 3, 3
JOB = Job.model_validate(
    {
        "rounds": {"update_rounds": ROUNDS, "samples_between_updates": 12, "max_batch_size": 1, "evaluate_every": 1},
        "sync": {"fragments": 4, "in_flight": IN_FLIGHT, "delay_steps": 1},
        "resources": {"num_workers": WORKERS},
    }
)


class WatchedPlans(Walk):
    """Keeps the newest version of each plan."""

    def __init__(self, seed: int) -> None:
        self.plans: dict[tuple[int, int], Plan] = {}
        super().__init__(seed, storm=False)

    def obey(self, command: c.Command) -> None:
        if isinstance(command, c.Assign):
            self.plans[command.worker, command.plan.round] = command.plan
        super().obey(command)


@pytest.mark.slow
@pytest.mark.parametrize("sync", [{}, {"fragments": 2, "in_flight": 2}, {"dynamic_local_steps": False}])
@pytest.mark.parametrize("delay", [1, 3, 50])
@pytest.mark.long(keep=3)
def test_every_round_has_a_batch_after_those_that_the_delay_is_made_of(
    delay: int, sync: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {
        "rounds": {"update_rounds": ROUNDS, "samples_between_updates": 25, "max_batch_size": 2},
        "sync": {"delay_steps": delay, **sync},
        "resources": {"num_workers": WORKERS},
    }
    monkeypatch.setattr(weather, "_job", lambda rng: Job.model_validate(tables))
    went_ahead = 0
    for seed in range(12):
        world = WatchedPlans(seed)
        world.run()
        for (worker, number), plan in world.plans.items():
            before = world.plans.get((worker, number - 1))
            ahead = samples_of(before.ahead) if before is not None else 0
            assert ahead <= delay * plan.batch_size
            assert not ahead or (plan.samples > ahead and plan.spans[: len(before.ahead)] == before.ahead)  # type: ignore[union-attr]
            went_ahead += ahead > 0
    assert went_ahead > ROUNDS


class Watched(Walk):
    """Keeps what its core commands, and how many rounds are in flight."""

    def __init__(self, seed: int) -> None:
        self.merges: list[c.Merge] = []
        self.written: list[tuple[str, int]] = []
        self.in_flight: set[int] = set()
        super().__init__(seed, storm=False)

    def obey(self, command: c.Command) -> None:
        match command:
            case c.Merge():
                self.merges.append(command)
            case c.LogMetric(fields=fields) if fields["kind"] in ("eval", "round"):
                self.written.append((fields["kind"], fields["round"]))
        self.in_flight.add(len(self.core.view().strategy.in_flight))  # type: ignore[attr-defined]
        super().obey(command)


@pytest.fixture(scope="module")
def worlds() -> list[Watched]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weather, "_job", lambda rng: JOB)
        found = [Watched(seed) for seed in range(12)]
    for world in found:
        world.run()
    return found


@pytest.mark.slow
def test_every_worker_is_sent_every_result_once_and_all_weights_only_at_its_start(worlds: list[Watched]) -> None:
    for world in worlds:
        for worker in range(WORKERS):
            sent = [(merge.version, merge.whole) for merge in world.merges if merge.worker == worker]
            joined = sent[0][0]
            assert [number for number, _ in sent] == list(range(joined, ROUNDS + 1))
            assert joined or [number for number, whole in sent if whole] == [0]


@pytest.mark.slow
def test_as_many_exchanges_are_under_way_as_may_be(worlds: list[Watched]) -> None:
    assert {number for world in worlds for number in world.in_flight} == set(range(IN_FLIGHT + 1))


@pytest.mark.slow
def test_all_rounds_are_recorded_and_weights_evaluated_that_are_due_in_one(worlds: list[Watched]) -> None:
    for world in worlds:
        assert world.books.recorded == list(range(ROUNDS))
        validated = any(one.split == "validation" for one in world.weather.slices)
        assert [number for kind, number in world.written if kind == "eval"] == ([0, 1, 2, 3, 6, 7] if validated else [])
        before = {number: world.written[: world.written.index(("round", number))] for number in range(ROUNDS)}
        assert all(("eval", number) in before[number] for kind, number in world.written if kind == "eval")
