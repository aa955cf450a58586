"""cluster.yaml: what `ray up` would refuse, and whether the jobs that it is made for find room on its machines."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from hypha_ray.config import Job
from hypha_ray.market.requirements import NodeResources, needs, shortage, worker_needs, workers_to_start

ROOT = Path(__file__).parents[3]


@pytest.fixture
def cluster() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def nodes(cluster: dict[str, Any], count: str) -> list[NodeResources]:
    """The head, and as many machines of each worker type as `count` (min_workers or max_workers) says."""
    found = []
    for name, kind in cluster["available_node_types"].items():
        amount = 1 if name == cluster["head_node_type"] else kind[count]
        found += [NodeResources(name, kind["resources"], kind["resources"], kind["labels"])] * amount
    return found


def test_cluster_yaml_passes_rays_own_validation(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(cluster))


def test_cluster_yaml_misspelt_key_would_be_found(cluster: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="max_wokers"):
        validate_config(prepare_config(cluster | {"max_wokers": 8}))


def test_cluster_yaml_worker_types_carry_the_labels_that_jobs_ask_for(cluster: dict[str, Any]) -> None:
    workers = {name: kind for name, kind in cluster["available_node_types"].items() if kind["resources"].get("GPU")}
    assert workers
    for kind in workers.values():
        assert {"gpu_type", "site"} <= kind["labels"].keys()
        need, *_ = worker_needs(
            Job.model_validate({"resources": {"worker": {"gpu": 1, "gpu_type": kind["labels"]["gpu_type"]}}})
        )
        assert shortage({need: kind["min_workers"]}, nodes(cluster, "min_workers")) is None


def test_cluster_yaml_holds_the_job_that_it_is_made_for(cluster: dict[str, Any]) -> None:
    job = Job.model_validate(tomllib.loads((ROOT / "jobs/configs/diloco.toml").read_text(encoding="utf-8")))
    assert shortage(needs(job, job.num_workers), nodes(cluster, "max_workers")) is None
    assert len(workers_to_start(job, nodes(cluster, "min_workers"))) >= job.resources.min_workers


def test_cluster_yaml_every_ray_start_has_token_authentication_on(cluster: dict[str, Any]) -> None:
    commands = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2
    assert all(command.startswith("RAY_AUTH_MODE=token ") for command in starts)
    assert any(target.endswith("/.ray/auth_token") for target in cluster["file_mounts"])
    assert not any("dashboard-host=0.0.0.0" in command for command in starts)


def test_cluster_yaml_image_has_the_ray_that_is_tested(cluster: dict[str, Any]) -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    version = next(line.removeprefix("ray==") for line in constraints if line.startswith("ray=="))
    assert all(f"ray:{version}-py311" in cluster["docker"][image] for image in ("head_image", "worker_image"))
