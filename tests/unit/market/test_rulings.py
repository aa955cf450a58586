"""Rulings of the auction in time: one for all runs, and answers from memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from hypha_ray.market.allotment import Ruling
from hypha_ray.market.auction import Rulings

RUNS = [f"run-{number}" for number in range(50)]


class Cluster:
    """Rules on the runs that have spoken, and counts how often; a later ruling has a larger quota."""

    def __init__(self) -> None:
        self.spoken, self.looks = list[str](), 0

    def rule(self) -> Mapping[str, Ruling]:
        self.looks += 1
        return dict.fromkeys(self.spoken, Ruling(self.looks))


async def asked(rulings: Rulings, cluster: Cluster, runs: list[str]) -> list[int]:
    """Quotas of runs that ask at the same time."""
    cluster.spoken += [run for run in runs if run not in cluster.spoken]
    return [ruling.quota for ruling in await asyncio.gather(*(rulings.of(run) for run in runs))]


def test_fifty_runs_that_ask_at_once_and_again_cost_one_ruling() -> None:
    async def scene() -> None:
        cluster = Cluster()
        rulings = Rulings(cluster.rule, every_s=600.0)
        for _ in range(4):
            assert await asked(rulings, cluster, RUNS) == [1] * 50
        assert cluster.looks == 1

    asyncio.run(scene())


def test_run_that_comes_between_two_rulings_is_ruled_on_in_the_next_one_with_all_others() -> None:
    async def scene() -> None:
        cluster = Cluster()
        rulings = Rulings(cluster.rule, every_s=0.2)
        began = asyncio.get_running_loop().time()
        assert await asked(rulings, cluster, ["first"]) == [1]
        assert await asked(rulings, cluster, RUNS) == [2] * 50
        assert asyncio.get_running_loop().time() - began >= 0.2
        assert rulings.latest["first"].quota == cluster.looks == 2

    asyncio.run(scene())


def test_ruling_that_is_older_than_the_interval_is_not_told_again() -> None:
    async def scene() -> None:
        cluster = Cluster()
        rulings = Rulings(cluster.rule, every_s=0.0)
        assert [await asked(rulings, cluster, ["run"]) for _ in range(3)] == [[1], [2], [3]]

    asyncio.run(scene())


def test_ruling_that_fails_is_told_to_those_that_wait_and_the_next_one_is_tried() -> None:
    async def scene() -> None:
        cluster, failures = Cluster(), [OSError("the control service doesn't answer")]

        def rule() -> Mapping[str, Ruling]:
            if failures:
                raise failures.pop()
            return cluster.rule()

        rulings = Rulings(rule, every_s=0.0)
        cluster.spoken = ["run"]
        found = await asyncio.gather(*(rulings.of("run") for _ in range(3)), return_exceptions=True)
        assert [str(one) for one in found] == ["the control service doesn't answer"] * 3
        assert (await rulings.of("run")).quota == 1

    asyncio.run(scene())
