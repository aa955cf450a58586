"""Packages and members that are missing: refused before Ray begins to start, which happens after `check_early`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.driver.preflight.checks import check_early, check_plugins
from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.families import CODECS
from hypha_ray.kernels import compiled

MISSING = {"bitsandbytes", "wandb", "mlflow", "tensorboard"}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"inner_optimizer": {"name": "adamw8bit"}}, "error[OPT007]: inner_optimizer.name = 'adamw8bit' needs"),
        ({"inner_optimizer": {"name": "adagradd"}}, "Fix: write adagrad"),
        ({"telemetry": {"sinks": ["wandb"]}}, "error[CFG022]: telemetry.sinks has wandb, which isn't installed"),
        ({"telemetry": {"sinks": ["console", "mlflow"]}}, "error[CFG022]: telemetry.sinks has mlflow"),
        (
            {"model": {"repository": ".", "quantization": "nf4", "lora": {"rank": 4}}},
            "model.quantization needs bitsandbytes",
        ),
    ],
    ids=["eight bits", "optimizer", "wandb", "mlflow", "quantization"],
)
def test_missing_package_is_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any], words: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in MISSING else find_spec(name))
    with pytest.raises(HyphaError) as caught:
        check_early(Job.model_validate(tables), None, resume=False)
    assert words in str(caught.value)


@pytest.mark.parametrize("key", ["codec", "downward_codec"])
def test_codec_whose_loops_cannot_be_compiled_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    job = Job.model_validate({"sync": {key: "visible"}})
    check_plugins(job)
    monkeypatch.setitem(sys.modules, "hypha_ray.kernels.compiled_patches", None)
    compiled.cache_clear()
    try:
        with pytest.raises(ConfigError, match="COD002"):
            check_plugins(job)
    finally:
        compiled.cache_clear()


@pytest.mark.parametrize("name", CODECS.members)
def test_codec_that_is_built_in_passes_its_trial(name: str) -> None:
    assert check_plugins(Job.model_validate({"sync": {"codec": name, "downward_codec": name}})) == []


@pytest.mark.slow
def test_usual_job_is_checked_without_ray_and_torch() -> None:
    """Ray loads variables for workers that aren't forked, so it has to be loaded after its start."""
    code = """
import sys
from hypha_ray.config import Job
from hypha_ray.driver.preflight.checks import check_early
sinks = {"sinks": ["console", "jsonl", "prometheus"]}
check_early(Job.model_validate({"telemetry": sinks}), None, False)
print(sorted({"ray", "torch"} & sys.modules.keys()))
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "[]\n"
