"""Nodes that vanish, nodes that are drained, and a node without enough memory for objects."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.worker import global_worker
from ray.cluster_utils import Cluster
from ray.util import list_named_actors

from hypha_ray.config import Job
from hypha_ray.telemetry.sinks.files import read_jsonl
from tests.support.clusters import SHARED, cluster_of
from tests.support.faults import events, is_back
from tests.support.jobs import MODEL, Outcome, job_of, run_job

DEADLINE_S = 90
SAMPLES = 240
"""Of a round of two workers: six seconds, so that a node is found to be drained before it ends."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without CPUs and two nodes with one each, none of which is needed for longer than a test."""
    with cluster_of([{"num_cpus": 1}] * 2) as found:
        yield found


class Running:
    """A job in a thread, and a look at how far it is."""

    def __init__(
        self, name: str, corpus: Path, folder: Path, samples: int, groups: list[dict[str, Any]] | None = None
    ) -> None:
        rounds = {"update_rounds": 60, "samples_between_updates": samples, "max_batch_size": 4, "evaluate_every": 0}
        job = job_of(name, corpus, groups, rounds=rounds, testing={"batch_s": 0.2}, worker={"lease_s": 4.0})
        self._directory, self._ended = folder / name, threading.Event()
        self._seen: list[dict[str, Any]] = []
        self._results: list[Outcome] = []
        self._thread = threading.Thread(target=lambda: self._run(job, corpus, folder))
        self._thread.start()

    def _run(self, job: Job, corpus: Path, folder: Path) -> None:
        self._results.append(run_job(job, folder, corpus, seen=self._seen.append, until=self._ended.is_set))

    def until_first_commit(self) -> None:
        self._until(lambda: any(self._directory.glob("commits/round_*.json")))

    def until_event(self, kind: str) -> None:
        self._until(lambda: bool(read_jsonl(self._directory / "events.jsonl", [kind])))

    def until_back(self, worker: int) -> None:
        """Until a worker that has gone once is back, and has a delta in a commit."""
        self._until(lambda: is_back(self._directory, worker, 1))

    def until_report(self, worker: int, round: int) -> None:
        """Until a worker has told of batches of a round, a second or so after it began with them."""
        told = "step", worker, round
        self._until(lambda: any((one["kind"], one.get("worker"), one.get("round")) == told for one in self._seen))

    def _until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not true():
            assert self._thread.is_alive() and time.monotonic() < deadline
            self._thread.join(0.05)

    def end(self) -> Outcome:
        """End the run at its next record."""
        self._ended.set()
        self._thread.join(DEADLINE_S)
        (outcome,) = self._results
        commits = outcome.commits()
        assert [commit["round"] for commit in commits] == list(range(len(commits)))
        assert set(outcome.used().values()) == {1}
        return outcome


def node_of(worker: str, run: str) -> str:
    """Id of the node that a worker is on."""
    assert {"name": worker, "namespace": run} in list_named_actors(all_namespaces=True)
    actor = ray.get_actor(worker, namespace=run)
    return str(ray._private.state.actors(actor._actor_id.hex())["Address"]["NodeID"])


def test_lost_node_costs_its_worker_and_a_new_node_gets_the_successor(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    running = Running("lost-node", corpus, tmp_path, 80)
    running.until_first_commit()
    lost = node_of("worker-1", "lost-node")
    cluster.remove_node(next(n for n in cluster.worker_nodes if n.node_id == lost), allow_graceful=False)
    cluster.add_node(num_cpus=1, wait=False, **SHARED)
    running.until_event("machine_loss")
    running.until_back(1)
    run = running.end()
    assert [loss["worker"] for loss in events(run, "loss")][:1] == [1]
    assert [event["workers"] for event in events(run, "machine_loss")] == [[1]]
    first, last = run.commits()[0], run.commits()[-1]
    incarnations = [next(d["incarnation"] for d in one["deltas"] if d["worker"] == 1) for one in (first, last)]
    assert incarnations[0] < incarnations[1]


@pytest.mark.long
def test_drained_node_lets_its_worker_hand_over_and_leave(cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    running = Running("drained-node", corpus, tmp_path, SAMPLES)
    running.until_first_commit()
    running.until_report(1, round=1)
    drained = node_of("worker-1", "drained-node")
    deadline_ms = int((time.time() + 60) * 1000)
    accepted, why = global_worker.gcs_client.drain_node(drained, 2, "the machine is wanted back", deadline_ms)
    assert accepted, why
    cluster.add_node(num_cpus=1, wait=False, **SHARED)
    running.until_back(1)
    run = running.end()
    assert [event["worker"] for event in events(run, "leaving")] == [1]
    assert [event["worker"] for event in events(run, "leave")] == [1]
    assert not events(run, "loss")
    leaver = events(run, "leaving")[0]["incarnation"]
    deltas = [d for one in run.commits() for d in one["deltas"]]
    parts = [d["samples"] for d in deltas if (d["worker"], d["incarnation"]) == (1, leaver)]
    assert 0 < parts[-1] < SAMPLES // 2


@pytest.mark.long
def test_lost_worker_of_the_second_group_is_replaced_on_a_node_of_its_group(corpus: Path, tmp_path: Path) -> None:
    kinds = ("small", "large", "large")
    with cluster_of([{"num_cpus": 1, "labels": {"gpu_type": kind}} for kind in kinds]) as cluster:
        running = Running("groups", corpus, tmp_path, 80, [{"gpu_type": "small"}, {"gpu_type": "large"}])
        running.until_first_commit()
        lost, small = node_of("worker-1", "groups"), node_of("worker-0", "groups")
        nodes = {node.node_id: node for node in cluster.worker_nodes}
        cluster.remove_node(nodes[lost], allow_graceful=False)
        running.until_back(1)
        assert node_of("worker-0", "groups") == small
        assert node_of("worker-1", "groups") == (nodes.keys() - {lost, small}).pop()
        run = running.end()
    assert [loss["worker"] for loss in events(run, "loss")][:1] == [1]
    assert [delta["worker"] for delta in run.commits()[-1]["deltas"]] == [0, 1]


def test_object_store_that_is_too_small_slows_a_job_down_and_no_more(corpus: Path, tmp_path: Path) -> None:
    """θ, momentum and two deltas of 20 MB each, for a round that ends and one that begins, in 80 MB."""
    ray.init(address="local", num_cpus=4, object_store_memory=80_000_000, include_dashboard=False, log_to_driver=False)
    try:
        model = {**MODEL, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 1}
        rounds = {"update_rounds": 3, "samples_between_updates": 8, "max_batch_size": 2, "evaluate_every": 0}
        run = run_job(job_of("small-store", corpus, model={"config": model}, rounds=rounds), tmp_path, corpus)
    finally:
        ray.shutdown()
    size = (run.directory / "checkpoints" / "round_000002" / "model.safetensors").stat().st_size
    assert 6 * size > 80_000_000
    assert [commit["round"] for commit in run.commits()] == [0, 1, 2]
    assert not events(run, "loss") and not events(run, "revive")
