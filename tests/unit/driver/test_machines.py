"""Lines of a dry run about machines."""

from __future__ import annotations

from hypha_ray.config import Job
from hypha_ray.driver.preflight.run_costs import machine_lines
from hypha_ray.market.requirements import NodeResources

NODES = [NodeResources("10.0.0.1", {"CPU": 4, "memory": 8e9}, {"CPU": 4, "memory": 8e9})]


def test_machine_lines_of_groups_say_what_each_needs_and_how_many_fit() -> None:
    groups = [{"count": 2, "gpu": 1, "gpu_type": "l4"}, {"count": 3, "memory_gb": 4}, {"kind": "bridged"}]
    job = Job.model_validate({"workers": groups})
    assert list(machine_lines(job, NODES, "head")) == [
        "workers 0 to 1, each with 1 CPU, 1 GPU, gpu_type l4: 0 of 2 fit",
        "workers 2 to 4, each with 1 CPU, 4 GB of memory: 2 of 3 fit",
        "worker 5 with no reservation: 1 of 1 fit",
        "resources: 3 of 6 workers fit; nodes: 1",
    ]


def test_machine_lines_of_a_job_without_groups_are_one() -> None:
    job = Job.model_validate({"resources": {"num_workers": 6}})
    assert list(machine_lines(job, NODES, "head")) == ["resources: 4 of 6 workers fit; nodes: 1"]
