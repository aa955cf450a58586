"""A payload that goes with its node before a server has it: nobody is killed for that, and nobody is blamed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from hypha_ray.failpoints import hits
from tests.cluster.test_node_faults import node_of
from tests.support.clusters import SHARED, cluster_of
from tests.support.faults import events, faulty
from tests.support.jobs import Outcome, run_job

DEADLINE_S = 60
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""A lost node is known after some seconds: before the driver takes a scheduler that is stopped for dead."""
POINT = "scheduler.before_fetch"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, where everything but workers is."""
    with cluster_of([], _system_config=dict(QUICK)) as found:
        yield found


def lose_a_payload(cluster: Cluster, name: str, corpus: Path, folder: Path, workers: int, **tables: Any) -> Outcome:
    """Run a job whose last worker's node is killed when its second payload is there, and nowhere else."""
    for _ in range(workers):
        cluster.add_node(num_cpus=1, wait=False, **SHARED)
    cluster.wait_for_nodes()
    log, last, results = folder / "hits.jsonl", workers - 1, list[Outcome]()
    resources = {"num_workers": workers, "min_workers": 1}
    job = faulty(name, corpus, [f"{POINT}:{last}=stop@2"], log, resources=resources, worker={"lease_s": 6.0}, **tables)
    thread = threading.Thread(target=lambda: results.append(run_job(job, folder, corpus)))
    thread.start()
    deadline, scheduler = time.monotonic() + DEADLINE_S, None
    while not hits(log, POINT):
        assert thread.is_alive() and time.monotonic() < deadline
        if scheduler is None and hits(log, POINT, fired=False):
            scheduler = ray.get(ray.get_actor("scheduler", namespace=name).ping.remote(), timeout=DEADLINE_S)
        thread.join(0.02)
    assert scheduler is not None
    assert node_of("server-0", name) == ray.get_runtime_context().get_node_id(), "it reserves nothing"
    lost = node_of(f"worker-{last}", name)
    cluster.remove_node(next(n for n in cluster.worker_nodes if n.node_id == lost), allow_graceful=False)
    while any(node["Alive"] for node in ray.nodes() if node["NodeID"] == lost):
        assert time.monotonic() < deadline
        thread.join(0.05)
    os.kill(scheduler, signal.SIGCONT)
    cluster.add_node(num_cpus=1, wait=False, **SHARED)
    thread.join(DEADLINE_S)
    (run,) = results
    assert [commit["round"] for commit in run.commits()] == [0, 1, 2, 3]
    assert set(run.used().values()) == {1}
    assert not events(run, "revive") and not events(run, "exclude")
    return run


def test_round_goes_on_without_a_payload_that_went_with_its_node(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    run = lose_a_payload(cluster, "lost-payload", corpus, tmp_path, workers=2, sync={"strikes": 1})
    assert [(one["worker"], one["reason"]) for one in events(run, "reject")] == [
        (1, "its payload was lost with its node")
    ]
    assert run.commits()[1]["rejected"] == [
        {"worker": 1, "reason": "its payload was lost with its node", "blamed": False}
    ]
    assert len(events(run, "attempt")) == 1


@pytest.mark.long
def test_round_whose_only_payload_is_lost_is_trained_again(cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    run = lose_a_payload(cluster, "lost-round", corpus, tmp_path, workers=1)
    assert [one["next_round"] for one in events(run, "attempt")] == [0, 1]
    (text,) = [one["text"] for one in run.of_kind("status") if "last commit" in one["text"]]
    assert text == "round 2 has to be trained again; going on from the last commit"


@pytest.mark.long
def test_replay_that_lost_a_payload_ends_as_one_that_lost_none(cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    replay = {"mode": "replay"}
    calm_folder = tmp_path / "calm"
    run = lose_a_payload(cluster, "lost-replay", corpus, tmp_path, workers=2, run={"name": "lost-replay", **replay})
    job = faulty("calm", corpus, [], tmp_path / "none.jsonl", run={"name": "calm", **replay})
    calm = run_job(job, calm_folder, corpus)
    assert [one["theta_sha256"] for one in run.commits()] == [one["theta_sha256"] for one in calm.commits()]
