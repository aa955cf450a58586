"""Recipes of recipes/: their files are well-formed, and the commands in them are ones that a job understands."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hypha_ray.config.load import load

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
