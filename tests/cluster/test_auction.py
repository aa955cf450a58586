"""Runs that compete for three machines, with an open auction between them."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.config.value_types import CLUSTER
from hypha_ray.driver.cluster_offers import lines, overview
from hypha_ray.market.auction import AUCTION, close_auction, open_auction
from tests.support.clusters import cluster_of, until
from tests.support.descendants import processes_of
from tests.support.faults import events
from tests.support.job_scripts import jobs_in
from tests.support.jobs import Outcome, job_of, run_job

pytestmark = pytest.mark.timeout(600)
WAIT_S = 240.0
SOON_S = 5.0
"""Longest time until nothing is left of a run whose driver was killed, and until a new machine is taken."""
TTL_S = 20.0
"""Silence after which a run's leases end: a minute by default."""
BATCH_S = 0.2
LONG = 40
"""Rounds of a run that goes on while others come and go, and is ended then: minutes."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    with cluster_of([{"num_cpus": 1}] * 3) as cluster:
        assert open_auction("bid", TTL_S) and not open_auction("bid")
        yield cluster
        assert close_auction() and not close_auction()
        assert overview()["runs"] is None


def bidder(name: str, bid: float, workers: int, rounds: int, corpus: Path, least: int = 1, batches: int = 20) -> Job:
    """A job whose rounds take four seconds with all workers, unless a worker's batches in a round are given."""
    resources = {"num_workers": workers, "min_workers": least, "worker_price": {"bid": bid}}
    plan = {
        "update_rounds": rounds,
        "samples_between_updates": 4 * batches * workers,
        "max_batch_size": 4,
        "evaluate_every": 0,
    }
    return job_of(name, corpus, rounds=plan, resources=resources, testing={"batch_s": BATCH_S})


def pause() -> None:
    threading.Event().wait(0.05)


class Running:
    """A job in a thread."""

    def __init__(self, job: Job, corpus: Path, folder: Path) -> None:
        self.commits, self._results = folder / str(job.run.name) / "commits", list[Outcome]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(job, corpus, folder))
        self._thread.start()

    def _run(self, job: Job, corpus: Path, folder: Path) -> None:
        self._results.append(run_job(job, folder, corpus, until=self._ended.is_set))

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    @property
    def rounds(self) -> int:
        """Number of committed rounds."""
        return len(list(self.commits.glob("round_*.json")))

    def until(self, condition: Callable[[], bool], within_s: float = WAIT_S) -> None:
        """Wait for a state that comes before the job's end, and after at most some seconds."""
        until(lambda: condition() or not self.runs, within_s)
        assert self.runs, "\n".join(lines(overview()))

    def end(self) -> Outcome:
        """End a long run at its next record."""
        self._ended.set()
        return self.result()

    def result(self) -> Outcome:
        self._thread.join(WAIT_S)
        (outcome,) = self._results
        return outcome


def created() -> dict[str, str]:
    """Names of the leases that are placed, by id; never more on a machine than it has room for."""
    rows = {key: row for key, row in placement_group_table().items() if row["state"] == "CREATED"}
    assert max(Counter(row["bundles_to_node_id"][0] for row in rows.values()).values(), default=0) <= 1
    return {key: row["name"] for key, row in rows.items()}


def held(run: str) -> int:
    return sum(name.startswith(f"{run}/") for name in created().values())


def quotas() -> dict[str, int]:
    return {one["run"]: one["quota"] for one in overview()["runs"]}


def first_commit_s(run: Outcome) -> float:
    return min(float(event["monotonic_s"]) for event in events(run, "commit"))


def auction_pid() -> int:
    """The process of the auction, once one answers."""
    while True:
        with suppress(RayError):
            return int(ray.get(ray.get_actor(AUCTION, namespace=CLUSTER).ping.remote(), timeout=WAIT_S))


def require_whole(run: Outcome, rounds: int | None = None) -> None:
    """Nothing is lost: all rounds are there, each sample once, and no worker had to be replaced.

    Nor is there a cost: no owner has named a price. A run that was ended has any number of rounds, but some.
    """
    assert len(run.commits()) == rounds or (rounds is None and len(run.commits()) >= 2)
    assert set(run.used().values()) == {1}
    assert not events(run, "loss") and not events(run, "cost")
    assert not any("price" in lease for lease in events(run, "lease"))
    assert all(record.get("cost") is None for record in [*run.of_kind("round"), run.records[-1]])


@pytest.mark.long
def test_gangs_that_do_not_fit_together_train_one_after_the_other_the_highest_bid_first(
    corpus: Path, tmp_path: Path
) -> None:
    """Two gangs start at the same time. A third one bids more, and comes before either has committed a round."""
    ten = Running(bidder("ten", 10, 3, 1, corpus, least=3, batches=60), corpus, tmp_path)
    twenty = Running(bidder("twenty", 20, 3, 1, corpus, least=3, batches=80), corpus, tmp_path)
    runs, looks, thirty = [ten, twenty], 0, None
    while any(run.runs for run in runs):
        every, looks = [held(name) for name in ("ten", "twenty", "thirty")], looks + 1
        assert sum(every) <= 3
        if thirty is None and every[1] == 3:
            thirty = Running(bidder("thirty", 30, 3, 1, corpus, least=3), corpus, tmp_path)
            runs.append(thirty)
        pause()
    assert looks >= 300 and thirty is not None
    third, second, first = ten.result(), twenty.result(), thirty.result()
    assert first_commit_s(first) < first_commit_s(second) < first_commit_s(third)
    assert any("waiting for its turn" in record["text"] for record in second.of_kind("status"))
    assert [event["attempt"] for event in events(second, "attempt")] == [1, 2]
    for run in (first, second, third):
        require_whole(run, 1)


def test_outbid_run_hands_back_machines_with_its_deltas_and_one_that_waits_takes_a_machine_that_comes(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    """Three machines, which one run has; a fourth for a run that bids as much; and a bid that takes two of them."""
    low = Running(bidder("low", 10, 3, LONG, corpus), corpus, tmp_path)
    low.until(lambda: held("low") == 3 and low.rounds >= 1)
    other = Running(bidder("other", 10, 3, 3, corpus, batches=7), corpus, tmp_path)
    low.until(lambda: quotas().get("other") == 0)
    (waiting,) = (one for one in overview()["waiting"] if one["run"] == "other")
    assert (waiting["need"], waiting["count"]) == ("1 CPU", 3)
    assert waiting["nearest"] in {row["bundles_to_node_id"][0] for row in placement_group_table().values()}
    node = cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    low.until(lambda: held("other") == 1, SOON_S)
    places = [lease["node"] for lease in overview()["leases"] if lease["run"] == "other"]
    assert places == [node.node_id]
    high = Running(bidder("high", 20, 2, 2, corpus), corpus, tmp_path)
    low.until(lambda: held("high") == 2)
    assert held("low") == 1
    assert {run: quota for run, quota in quotas().items() if run != "other"} == {"low": 1, "high": 2}
    shown = list(lines(overview()))
    assert "1. run high bids 20 for 2 workers, at least 1: may hold 2" in shown
    assert any(line.startswith("low waits for 2 × worker with 1 CPU: 1 CPU per worker is needed") for line in shown)
    won, beside = high.result(), other.result()
    low.until(lambda: held("low") == 3 and low.rounds >= 2)
    lost = low.end()
    for run, rounds in ((won, 2), (beside, 3), (lost, None)):
        require_whole(run, rounds)
    left = events(lost, "leaving")
    assert [event["reason"] for event in left] == ["high bids 20, and this run 10"] * 2
    for event in left:
        ends = [one["round"] for one in events(lost, "commit") if one["monotonic_s"] > event["monotonic_s"]]
        deltas = next(commit["deltas"] for commit in lost.commits() if commit["round"] == min(ends))
        assert (event["worker"], event["incarnation"]) in {(one["worker"], one["incarnation"]) for one in deltas}
    assert not events(won, "leaving") and not events(beside, "leaving")
    cluster.remove_node(node)


def test_death_and_silence_of_the_auction_cost_nothing(corpus: Path, tmp_path: Path) -> None:
    runs = [Running(bidder(name, 10, 1, LONG, corpus), corpus, tmp_path) for name in ("one", "two")]
    runs[0].until(lambda: held("one") == held("two") == 1)
    before = created()
    for _ in range(10):
        pid = auction_pid()
        os.kill(pid, signal.SIGKILL)
        runs[0].until(lambda pid=pid: auction_pid() != pid)  # type: ignore[misc]
        assert created() == before
    stopped = auction_pid()
    os.kill(stopped, signal.SIGSTOP)
    late = Running(bidder("late", 5, 1, 1, corpus), corpus, tmp_path)
    require_whole(late.result(), 1)
    assert all(run.runs for run in runs) and before.items() <= created().items()
    assert auction_pid() != stopped
    for run in runs:
        require_whole(run.end())


def namespaces() -> set[str]:
    return {str(actor["namespace"]) for actor in list_named_actors(all_namespaces=True)}


def seen(run: str) -> bool:
    """Whether Ray or the auction knows anything of a run."""
    told: dict[str, Any] = overview()
    return run in namespaces() or any(run == one["run"] for part in ("leases", "runs", "waiting") for one in told[part])


@pytest.mark.long
def test_nothing_is_left_of_a_killed_driver_and_leases_of_a_stopped_one_end_later(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    """Two workers of the killed one have two processes each, and its fourth machine is there for the time."""
    node = cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    other = Running(bidder("other", 10, 1, LONG, corpus), corpus, tmp_path)
    killed = bidder("killed", 10, 2, LONG, corpus)
    killed = killed.model_copy(update={"worker": killed.worker.model_copy(update={"processes": 2})})
    with jobs_in(tmp_path) as jobs:

        def start(job: Job) -> int:
            file = tmp_path / f"{job.run.name}.toml"
            file.write_text(resolved_toml(job), encoding="utf-8")
            return jobs.start("@", file, env={"RAY_ADDRESS": cluster.address}).pid

        driver, killed_driver = start(bidder("stopped", 10, 1, LONG, corpus)), start(killed)
        other.until(lambda: held("stopped") > 0 and bool(quotas().get("stopped")))
        other.until(lambda: held("killed") == 2 and len(processes_of("Member")) == 2)
        members = processes_of("Member")
        scheduler = int(ray.get(ray.get_actor("scheduler", namespace="stopped").ping.remote()))
        for process in (driver, scheduler):
            os.kill(process, signal.SIGSTOP)
        os.kill(killed_driver, signal.SIGKILL)
        other.until(lambda: not seen("killed"), SOON_S)
        assert psutil.wait_procs(members, timeout=SOON_S)[1] == []
        assert held("stopped") == 1
        other.until(lambda: not held("stopped"))
        for process in (driver, scheduler):
            os.kill(process, signal.SIGKILL)
    require_whole(other.end())
    cluster.remove_node(node)
