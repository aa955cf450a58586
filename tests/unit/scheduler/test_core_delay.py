"""Delays as long as a round, or longer: a delta is made of what comes after the merge, and there is always some."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.types import Plan, samples_of
from tests.support import weather
from tests.support.walk import Walk

ROUNDS, WORKERS = 8, 3


class Watched(Walk):
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
        world = Watched(seed)
        world.run()
        for (worker, number), plan in world.plans.items():
            before = world.plans.get((worker, number - 1))
            ahead = samples_of(before.ahead) if before is not None else 0
            assert ahead <= delay * plan.batch_size
            assert not ahead or (plan.samples > ahead and plan.spans[: len(before.ahead)] == before.ahead)  # type: ignore[union-attr]
            went_ahead += ahead > 0
    assert went_ahead > ROUNDS
