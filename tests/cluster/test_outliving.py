"""Workers and parameter servers outlive their scheduler and work on under the next; who doesn't answer is replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.support.faults import events
from tests.support.jobs import Outcome, job_of, run_job

pytestmark = pytest.mark.usefixtures("local_ray")

Strike = Callable[[str], None]
ROLES = ("worker-0", "worker-1", "server-0")


def pid(run: str, name: str) -> int:
    """The process of an actor."""
    actor = ray.get_actor(name, namespace=run)
    call = actor.pid if name.startswith("worker") else actor.ping
    return int(ray.get(call.remote()))


def send(what: signal.Signals, name: str) -> Strike:
    """Sends a signal to an actor."""
    return lambda run: os.kill(pid(run, name), what)


class Observed:
    """A run that is struck after its first round, and whose processes are noted before that and after its last."""

    def __init__(self, run: str, *strikes: Strike) -> None:
        self.run, self._strikes = run, strikes
        self.before: dict[str, int] = {}
        self.after: dict[str, int] = {}

    def __call__(self, record: dict[str, Any]) -> None:
        """See a record of the run."""
        if record["kind"] != "round":
            return
        if record["round"] == 0 and not self.before:
            self.before = self._pids()
            for strike in self._strikes:
                strike(self.run)
        elif record["round"] == 4:
            self.after = self._pids()

    @property
    def same(self) -> set[str]:
        """Actors that were one process all the time."""
        return {name for name in ROLES if self.before[name] == self.after[name]}

    def _pids(self) -> dict[str, int]:
        return {name: pid(self.run, name) for name in ROLES}


def outcome(observed: Observed, corpus: Path, folder: Path, **tables: dict[str, Any]) -> Outcome:
    """Run the job to its end: every commit is there, and every sample in it once."""
    base = {
        "rounds": {"update_rounds": 6, "samples_between_updates": 160, "max_batch_size": 4, "evaluate_every": 0},
        "testing": {"batch_s": 0.05},
        "worker": {"lease_s": 4.0},
    }
    run = run_job(job_of(observed.run, corpus, **{**base, **tables}), folder, corpus, seen=observed)
    assert [commit["round"] for commit in run.commits()] == list(range(6))
    assert set(run.used().values()) == {1}
    assert observed.before.keys() == observed.after.keys() == set(ROLES)
    return run


def kept(run: Outcome) -> dict[int, list[bool]]:
    """For each worker, in order, whether it was taken over."""
    leases = events(run, "lease")
    return {worker: [lease["kept"] for lease in leases if lease["worker"] == worker] for worker in (0, 1)}


@pytest.mark.parametrize(("how", "cpu"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 0.0)])
@pytest.mark.long(keep=1)
def test_workers_and_server_outlive_a_scheduler_and_work_on_under_the_next(
    how: signal.Signals, cpu: float, corpus: Path, tmp_path: Path
) -> None:
    observed = Observed(f"outlive-{how.name.lower()}", send(how, "scheduler"))
    resources = {"num_workers": 2, "worker": {"cpu": cpu}, "parameter_server": {"cpu": cpu}}
    run = outcome(observed, corpus, tmp_path, resources=resources)
    assert [event["attempt"] for event in events(run, "attempt")] == [1, 2]
    assert observed.same == set(ROLES)
    assert kept(run) == {0: [False, True], 1: [False, True]}
    grown = {event["incarnation"] for event in events(run, "join")}
    assert {source // 10_000 for source in grown} == {1, 2}


@pytest.mark.long
def test_stopped_worker_and_stopped_server_are_not_taken_over(corpus: Path, tmp_path: Path) -> None:
    stops = [send(signal.SIGSTOP, name) for name in ("worker-1", "server-0")]
    observed = Observed("stopped", *stops, send(signal.SIGKILL, "scheduler"))
    run = outcome(observed, corpus, tmp_path)
    assert observed.same == {"worker-0"}
    assert kept(run) == {0: [False, True], 1: [False, False]}


@pytest.mark.long
def test_worker_that_is_leaving_is_not_taken_over(corpus: Path, tmp_path: Path) -> None:
    observed = Observed("leaving", send(signal.SIGKILL, "scheduler"), send(signal.SIGTERM, "worker-1"))
    run = outcome(observed, corpus, tmp_path)
    assert observed.same == {"worker-0", "server-0"}
    assert kept(run) == {0: [False, True], 1: [False, False]}


@pytest.mark.long
def test_killed_owner_takes_workers_and_server_along_and_others_are_started(corpus: Path, tmp_path: Path) -> None:
    observed = Observed("owner", send(signal.SIGKILL, "owner"))
    run = outcome(observed, corpus, tmp_path)
    assert observed.same == set()
    assert [event["attempt"] for event in events(run, "attempt")] == [1]
    assert not any(kept(run)[0] + kept(run)[1])
