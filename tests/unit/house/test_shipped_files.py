"""Files beside the package: recipes, cluster.yaml, and the page of the Python interface."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

import hypha_ray
from hypha_ray.config import Job
from hypha_ray.config.load import load
from hypha_ray.market.requirements import NodeResources, needs, shortage, worker_needs, workers_to_start
from tests.support.api_page import PAGE, renewed

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
COMMAND = re.compile(r"(?:python jobs/diloco\.py|hypha-ray diloco) (@ .*)")


def yaml_of(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def arguments_of(text: str) -> list[str]:
    """Arguments of the one training that a recipe starts from a job file, variables as they are."""
    (command,) = COMMAND.findall(text.replace("\\\n", " "))
    return shlex.split(command.split(" || ")[0])


def container_resources(group: dict[str, Any]) -> dict[str, str]:
    (container,) = group["template"]["spec"]["containers"]
    requests = container["resources"]["requests"]
    assert requests == container["resources"]["limits"]
    assert isinstance(requests, dict)
    return requests


def test_skypilot_starts_a_run_that_its_resume_finds() -> None:
    recipe = yaml_of("skypilot.yaml")
    mirror = "s3://$BUCKET/runs"
    assert f'mirror="{mirror}"' in recipe["run"]
    job = load([*arguments_of(recipe["run"].replace("$mirror", mirror).replace("$RUN", "texts-1"))]).job
    assert (job.checkpoint.mirror, job.run.name, job.resources.worker.gpu) == (mirror, "texts-1", 1)
    assert '--resume "$mirror/$RUN"' in recipe["run"]
    assert recipe["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert subprocess.run(["bash", "-n"], input=recipe["run"], text=True, check=False).returncode == 0


def test_slurm_gives_a_requeued_job_the_name_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (RECIPES / "slurm.sh").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('[dataset]\npath = "data"\n')
    arguments = arguments_of(script.replace('"$@"', "job.toml").replace("$SLURM_JOB_ID", "17"))
    assert load(arguments).job.run.name == "slurm-17"
    assert "#SBATCH --requeue\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_kuberay_keeps_the_run_where_the_next_attempt_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = yaml_of("kuberay.yaml")["spec"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text("")
    job = load(arguments_of(spec["entrypoint"].replace("/workspace/job.toml", "job.toml"))).job
    head = spec["rayClusterSpec"]["headGroupSpec"]
    (container,) = head["template"]["spec"]["containers"]
    claims = [one["name"] for one in head["template"]["spec"]["volumes"] if "persistentVolumeClaim" in one]
    kept = [one["mountPath"] for one in container["volumeMounts"] if one["name"] in claims]
    assert job.run.name is not None
    assert any(str(job.run.dir).startswith(f"{folder}/") for folder in kept)
    assert spec["backoffLimit"] > 0


def test_kuberay_has_rays_version_its_token_and_gpus_for_workers() -> None:
    cluster = yaml_of("kuberay.yaml")["spec"]["rayClusterSpec"]
    pinned = re.search(r"(?m)^ray==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert pinned is not None
    assert cluster["rayVersion"] == pinned[1]
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    assert container_resources(workers)["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in container_resources(cluster["headGroupSpec"])
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]


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


def test_page_of_the_interface_is_that_of_its_docstrings() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert renewed(text) == text, "run: python -m tests.support.api_page"
    for name in set(hypha_ray.__all__) - {"__version__"}:
        assert f"\n## {name}\n" in text
    assert "### Run.frame" in text and "### Training.result" in text
