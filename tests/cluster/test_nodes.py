"""A job over several nodes: every worker on a machine of its own, and a commit log that accounts for all of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private.state import actors, state
from ray.core.generated.gcs_pb2 import ActorTableData

from tests.support.clusters import cluster_of
from tests.support.forked_process import ROOT
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
    rows = state._connect_and_get_accessor().get_actor_table(None, None)
    names = {ActorTableData.FromString(row).repr_name for row in rows}
    namespace = ray.get_runtime_context().namespace
    expected = ("scheduler", "owner", "worker-0", "server-0", "shard-0", "store")
    assert names >= {f"{name} of {namespace}" for name in expected}


def test_doctor_measures_each_node(nodes: list[str], tmp_path: Path) -> None:
    token = (Path.home() / ".ray" / "auth_token").read_text().strip()
    address = ray.get_runtime_context().gcs_address
    own = {"RAY_ADDRESS": address, "RAY_AUTH_TOKEN": token, "HYPHA_RAY_HOME": str(tmp_path)}
    command = [sys.executable, "jobs/doctor.py", "--json", str(tmp_path / "doctor.json")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "doctor.json").read_text())
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        [row["state"], *row["check"].split()][:2] for row in rows
    ]
    assert token not in done.stdout + done.stderr + (tmp_path / "doctor.json").read_text()
    of_machine = [row["check"] for row in rows if row["node"] is None]
    assert of_machine == ["versions", "gpu", "/dev/shm", "open files", "disk", "token", "cluster"]
    assert rows[6]["value"].startswith("4 nodes, 3 CPUs, 0 GPUs, ")
    of_nodes = [row["check"] for row in rows if row["node"] is not None]
    assert sorted(of_nodes) == sorted(3 * ["ports", "versions", "gpu", "/dev/shm", "open files", "clock", "link"])
    for row in rows[7:]:
        if row["check"] == "clock":
            offset_s, uncertainty_s = re.findall(r"[\d.]+(?= s)", row["value"])
            assert float(offset_s) <= float(uncertainty_s) + 0.01  # All of them have the clock of this machine.
        if row["check"] == "link":
            assert re.fullmatch(r"\S+bit/s from it, \S+bit/s to it, \S+ ms a call", row["value"])
        if row["check"] == "versions":
            assert row["value"] == "as here"
