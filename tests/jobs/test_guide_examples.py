"""Every example of the training guide, held against a cluster."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_scripts import Jobs

MODEL = {"repository": "microsoft/resnet-50", "type": "vision-classification"}
EXAMPLES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "training-worker": (
        """
        [[executors]]
        class = "train"
        name = "diloco-transformer"
        runtime = "process"
        cmd = "uv"
        args = ["run", "--no-project", "--", "accelerate", "launch", "--socket", "{SOCKET_PATH}", "--job", "{JOB_JSON}"]
        """,
        {},
    ),
    "parameter-server": (
        """
        [[executors]]
        class = "aggregate"
        name = "parameter-server"
        runtime = "parameter-server"
        """,
        {},
    ),
    "training-job": (
        """
        [scheduler.job]
        dataset_name = "my-dataset"

        [scheduler.job.model]
        repository = "microsoft/resnet-50"
        type = "vision-classification"

        [scheduler.job.preprocessor]
        repository = "microsoft/resnet-50"

        [scheduler.job.inner_optimizer]
        learning_rate = 0.001
        schedule = "cosine-with-warmup"
        warmup_steps = 2000
        total_steps = 500000

        [scheduler.job.outer_optimizer]
        learning_rate = 0.7
        momentum = 0.9
        """,
        {
            "dataset": {"name": "my-dataset"},
            "model": MODEL,
            "preprocessor": {"repository": "microsoft/resnet-50"},
            "inner_optimizer": {
                "learning_rate": 0.001,
                "schedule": "cosine-with-warmup",
                "warmup_steps": 2000,
                "total_steps": 500000,
            },
            "outer_optimizer": {"learning_rate": 0.7, "momentum": 0.9},
        },
    ),
    "model-type": (
        """
        [scheduler.job.model]
        repository = "microsoft/resnet-50"
        type = "vision-classification"
        """,
        {"model": MODEL},
    ),
    "prices": (
        """
        [scheduler.job.resources]
        num_workers = 2
        worker = {cpu = 1.0}
        parameter_server = {cpu = 1.0}
        worker_price = {bid = 110.0, max = 160.0}
        parameter_server_price = {bid = 30.0, max = 50.0}
        """,
        {
            "resources": {
                "num_workers": 2,
                "worker_price": {"bid": 110.0, "max": 160.0},
                "parameter_server_price": {"bid": 30.0, "max": 50.0},
            }
        },
    ),
    "aim": (
        """
        [scheduler]
        status_bridge = "0.0.0.0:61000"
        """,
        {"telemetry": {"status_bridge": "0.0.0.0:61000"}},
    ),
}
RESOURCES = """
    [scheduler.job.resources]
    min_memory_mb = 8192
    min_gpus = 1
    gpu_type = "{gpu_type}"
    """


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_resolved_and_fits_the_cluster(run_job: Jobs, tmp_path: Path, name: str) -> None:
    text, expected = EXAMPLES[name]
    file = tmp_path / "job.toml"
    file.write_text(text)
    done = run_job("@", file, "--dry-run")
    if "dataset" in expected:
        assert (done.returncode, done.stderr.splitlines()[-1][:16]) == (3, "error[DATA001]: "), done.stderr
        config = done.stdout
    else:
        assert done.returncode == 0, done.stderr
        config, resources = done.stdout.rstrip().rsplit("\n", 1)
        assert resources == "resources: 2 of 2 workers fit; nodes: 1"
        assert all(line.startswith(f"note: {file}") for line in done.stderr.splitlines())
    resolved = tomllib.loads(config)
    found = {table: {key: resolved[table].get(key) for key in keys} for table, keys in expected.items()}
    assert found == expected
    assert ("executors" in done.stderr) == ("executors" in text)
    assert not run_job.home.exists()


@pytest.mark.parametrize(
    ("gpu_type", "missing"),
    [
        ("nvidia", "no node has gpu_type nvidia for a worker; no node has a label gpu_type"),
        ("any", "1 GPU per worker is needed; the closest node, [0-9.]+, has 0 of its 0 left"),
    ],
)
def test_example_that_asks_for_a_gpu_is_told_that_there_is_none(
    run_job: Jobs, tmp_path: Path, gpu_type: str, missing: str
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(RESOURCES.format(gpu_type=gpu_type))
    done = run_job("@", file, "--dry-run")
    assert done.returncode == 75
    assert tomllib.loads(done.stdout)["resources"]["min_gpus"] == 1
    assert re.match(rf"error\[CFG004\]: the cluster is too small: {missing}", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


def test_resolved_example_is_a_job_file_that_resolves_to_itself(run_job: Jobs, tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(EXAMPLES["training-job"][0].replace('dataset_name = "my-dataset"', ""))
    printed = run_job("@", first, "--dry-run").stdout
    second.write_text(printed.rsplit("resources:", 1)[0])
    again = run_job("@", second, "--dry-run")
    note = f"note: {second}: the job has no dataset, so what depends on one isn't checked\n"
    assert (again.returncode, again.stdout, again.stderr) == (0, printed, note)
