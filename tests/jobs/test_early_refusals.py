"""Mistakes that no library is needed for are refused before torch, transformers or Ray are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.store.directory import RunDirectory
from tests.support.job_scripts import said

ROOT = Path(__file__).parents[2]
WITHOUT_LIBRARIES = """
import contextlib, io, json, runpy, sys
sys.modules |= dict.fromkeys(("torch", "transformers", "ray", "datasets", "lm_eval", "matplotlib"))
sys.path.insert(0, f"{sys.argv[1]}/jobs")
refusals = []
for line in json.load(sys.stdin):
    sys.argv, errors, code = line, io.StringIO(), 0
    with contextlib.redirect_stderr(errors):
        try:
            runpy.run_path(f"{sys.path[0]}/{line[0]}.py", run_name="__main__")
        except SystemExit as end:
            code = end.code
        except ImportError as error:
            print(error, file=errors)
    refusals.append((code, errors.getvalue()))
print(json.dumps(refusals))
"""
"""A process that runs job scripts one after the other; to load one of these libraries is an error."""

LINES: tuple[tuple[str, int, str], ...] = (
    ("generate --model nosuch", 5, "CKPT001"),
    ("generate --model early", 5, "CKPT006"),
    ("generate --model early --round 3", 5, "STORE006"),
    ("export nosuch", 5, "CKPT001"),
    ("export early", 5, "CKPT006"),
    ("export early --round 3", 5, "STORE006"),
    ("plot nosuch", 5, "CKPT001"),
    ("plot early", 3, "DATA044"),
    ("evaluate --model nosuch --dataset data", 5, "CKPT001"),
    ("evaluate --model ./nosuch --dataset data", 2, "HUB001"),
    ("evaluate --model ./data --dataset data", 5, "MODEL005"),
    ("evaluate --model ./model --dataset nosuch", 3, "DATA001"),
    ("evaluate --model ./model --dataset data --type causal", 2, "MODEL001"),
    ("evaluate --model nosuch --lm-eval arc_easy", 5, "CKPT001"),
    ("prepare --source nosuch.txt --tokenizer ./model --out d", 3, "DATA030"),
    ("prepare --source nosuch/*.txt --tokenizer ./model --out d", 3, "DATA030"),
    ("prepare --source data --tokenizer ./nosuch --out d", 2, "HUB001"),
    ("prepare --source data --image-column a --preprocessor ./nosuch --out d", 2, "HUB001"),
    ("prepare --source data --chat --chat-template nosuch --out d", 2, "PREP009"),
    ("diloco --resume nosuch", 5, "CKPT001"),
    ("diloco @ job.toml --run.name new --resume", 5, "CKPT001"),
    ("diloco @ job.toml --dataset.path nosuch", 3, "DATA001"),
    ("diloco @ job.toml --dataset.path nosuch --dry-run", 3, "DATA001"),
    ("diloco @ job.toml --model.repository ./nosuch --model.config none", 2, "HUB001"),
    ("diloco @ job.toml --preprocessor.repository ./nosuch", 2, "HUB001"),
    ("diloco @ job.toml --inner_optimizer.warmup_steps 5", 2, "OPT001"),
    ("diloco @ job.toml --worker.device cuda", 2, "CFG011"),
    ("diloco @ job.toml --run.name early", 2, "RUN001"),
    ("diloco @ job.toml --run.name early --dry-run", 2, "RUN001"),
    ("grpo @ job.toml --rl.reward.functions exactly", 2, "RWD003"),
)
"""Command lines, with the exit code and the code of the error."""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[tuple[int, str]]:
    """Exit code and standard error of each of the lines, in a folder with a dataset, a run and a model."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "data").symlink_to(corpus)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    tables: dict[str, Any] = {"model": {"config": {"model_type": "llama"}}, "dataset": {"path": str(folder / "data")}}
    job = Job.model_validate(tables)
    (folder / "job.toml").write_text(resolved_toml(job))
    tables["rounds"] = {"samples_between_updates": 7}
    RunDirectory.create(folder / "home", "early", resolved_toml(Job.model_validate(tables)))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES, str(ROOT)],
        input=json.dumps([line.split() for line, _, _ in LINES]),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HYPHA_RAY_HOME": str(folder / "home"), "RAY_ADDRESS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [(code, said(errors)) for code, errors in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.parametrize(("number", "line", "code", "error"), [(n, *line) for n, line in enumerate(LINES)])
def test_mistake_that_needs_no_library_is_refused_before_one_is_loaded(
    refusals: list[tuple[int, str]], number: int, line: str, code: int, error: str
) -> None:
    given, errors = refusals[number]
    assert (given, errors.count("\n")) == (code, 1), errors
    assert errors.startswith(f"error[{error}]: ")
