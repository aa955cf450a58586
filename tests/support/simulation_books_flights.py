"""What must hold in simulated runs with several exchanges under way, beside what holds in all, see simulation_books."""

from __future__ import annotations

from typing import Any

from hypha_ray.exchange_schedule import version_due
from hypha_ray.types import Plan, Source
from tests.support.simulation_books import Books


class FlightBooks(Books):
    """Rounds are planned before the ones before them are committed."""

    def _due(self, source: Source, plan: Plan) -> int:
        wanted = max(self.began, version_due(self.job, plan.round))
        assert wanted <= len(self.log) <= plan.round, "a round is begun before the weights are there that are due in it"
        assert plan.round - len(self.log) < self.job.sync.in_flight, "more exchanges are under way than may be"
        return plan.round

    def _check_round(self, strategy: Any, leased: set[int]) -> None:
        in_flight = {number for one in strategy._in_flight for number in one.deltas}
        super()._check_round(strategy, leased | in_flight)
        for one in strategy._in_flight:
            assert one.deltas and one.number >= len(self.log), "nothing is in flight"
