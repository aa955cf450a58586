"""Workers with several GPUs, on a Ray that is told of GPUs which aren't there: leases and processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from hypha_ray.children import own_gpus
from hypha_ray.market.cluster import lease_entries
from tests.support.clusters import single_node
from tests.support.descendants import processes_of
from tests.support.jobs import job_of, run_job


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[None]:
    with single_node(num_gpus=4):
        yield


@pytest.mark.usefixtures("four_gpus")
def test_each_gpu_of_a_worker_has_a_process_and_all_are_in_one_lease(corpus: Path, tmp_path: Path) -> None:
    leases: list[dict[str, float]] = []
    processes: list[int] = []

    def look(record: dict[str, Any]) -> None:
        if record["kind"] == "round" and record["round"] == 1:
            leases.extend(dict(entry.amounts) for entry in lease_entries("gpus") if entry.name.startswith("worker-"))
            processes.append(len(processes_of("Member")))

    tables: dict[str, Any] = {"resources": {"num_workers": 2, "worker": {"gpu": 2}}, "worker": {"device": "cpu"}}
    run = run_job(job_of("gpus", corpus, **tables), tmp_path, corpus, seen=look)
    assert leases == [{"CPU": 1.0, "GPU": 2.0}] * 2
    assert processes == [2]
    assert len(run.commits()) == 3 and set(run.used().values()) == {1}


@pytest.mark.usefixtures("four_gpus")
def test_actor_knows_the_gpus_of_its_lease_on_a_machine_that_has_more() -> None:
    """Ray leaves CUDA_VISIBLE_DEVICES as it is for an actor without GPUs, which would see all of them."""

    class Leased:
        def gpus(self) -> float:
            return own_gpus()

    leased: list[float] = []
    for gpus in (0, 0.5, 2):
        actor: Any = ray.remote(Leased).options(num_gpus=gpus).remote()
        leased.append(ray.get(actor.gpus.remote()))
        ray.kill(actor)
    assert leased == [0, 0.5, 2]
