"""A job over several nodes: every worker on a machine of its own, and a commit log that accounts for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private.state import actors

from tests.support.clusters import cluster_of
from tests.support.jobs import job_of, run_job


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """Ids of a head without CPUs, which the driver is on, and of three nodes with one CPU each."""
    with cluster_of([{"num_cpus": 1}] * 3) as cluster:
        yield [node.node_id for node in (cluster.head_node, *cluster.worker_nodes)]


def test_job_over_three_nodes_has_a_worker_on_each_and_commits_what_all_did(
    nodes: list[str], corpus: Path, tmp_path: Path
) -> None:
    rounds = {"update_rounds": 4, "samples_between_updates": 96}
    job = job_of("spread", corpus, rounds=rounds, resources={"num_workers": 3, "min_workers": 3})
    run = run_job(job, tmp_path, corpus, export=True)

    places = {actor["Name"]: actor["Address"]["NodeID"] for actor in actors().values()}
    assert sorted(places[f"worker-{number}"] for number in range(3)) == sorted(nodes[1:])
    assert {places[name] for name in ("scheduler", "store", "telemetry", "shard-0")} == {nodes[0]}

    assert [record["workers"] for record in run.of_kind("round")] == [3, 3, 3, 3]
    commits = run.commits()
    assert [[delta["worker"] for delta in commit["deltas"]] for commit in commits] == [[0, 1, 2]] * 4
    assert [commit["rejected"] for commit in commits] == [[]] * 4
    assert [commit["parent_sha256"] for commit in commits[1:]] == [commit["theta_sha256"] for commit in commits[:-1]]
    used = run.used()
    assert set(used.values()) == {1}
    assert len(used) == sum(delta["samples"] for commit in commits for delta in commit["deltas"]) >= 4 * 96
    assert sum(commits[-1]["cursors"].values()) == len(used)
    assert (run.directory / "model" / "model.safetensors").stat().st_size > 0
