"""A tool that a policy learns to use from few right conversations: the commands of docs/rl.md, with fewer rounds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hypha_ray.telemetry.sinks.files import read_jsonl
from tests.support.forked_process import ROOT
from tests.support.job_scripts import jobs_in

PAGE = (ROOT / "docs/rl.md").read_text(encoding="utf-8")
FEWER = {"grpo": ["--rounds.update_rounds", "4"]}
"""Flags of a job that trains as far as a test has time for. To learn to copy takes the start all its rounds."""


@pytest.mark.long
def test_a_tool_is_learned_from_few_right_conversations(head: str, tmp_path: Path) -> None:
    (program,) = re.findall(r"(?s)```\n(# calls\.py\n.*?)```", PAGE)
    (tmp_path / "calls.py").write_text(program, encoding="utf-8")
    subprocess.run([sys.executable, "calls.py"], cwd=tmp_path, check=True)
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    (block,) = re.findall(r"(?s)```\npython calls\.py\n(.*?)```", PAGE)
    run = ""
    with jobs_in(tmp_path / "hypha_ray", tmp_path, head) as run_job:
        for command in block.replace("\\\n", " ").splitlines():
            _, script, *words = shlex.split(command.replace("RUN", run))
            job = Path(script).stem
            done = run_job(*words, *FEWER.get(job, []), script=job)
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            run = done.stdout.splitlines()[-1].removeprefix("run: ")
    records = read_jsonl(Path(run) / "metrics.jsonl")
    (evaluation,) = (record for record in records if record["kind"] == "eval")
    first_round, *_ = (record for record in records if record["kind"] == "round")
    assert first_round["reward"] <= 0.15
    assert evaluation["reward"] >= 0.4
    assert evaluation["turns"] > 1.8
