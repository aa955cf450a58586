"""Mistakes that no library is needed for are refused before torch, transformers or Ray are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.store.directory import RunDirectory
from tests.support.job_scripts import said
from tests.support.light_commands import LightCommands, light_commands

HEAVY = {"torch", "transformers", "ray", "datasets", "lm_eval", "matplotlib"}
LINES: tuple[tuple[str, int, str], ...] = (
    ("prepare --sorce digits", 2, "error[CFG001]: unknown flag --sorce. Fix: did you mean --source?"),
    ("evaluate --modle m", 2, "error[CFG001]: unknown flag --modle. Fix: did you mean --model?"),
    ("plot --rnu r", 2, "error[CFG001]: unknown flag --rnu. Fix: did you mean --run?"),
    ("export --rnu r", 2, "error[CFG001]: unknown flag --rnu. Fix: did you mean --run?"),
    ("generate --model m --top-p 2", 2, "error[CFG003]: --top-p is out of range — got 2.0, allowed above 0"),
    ("chaos --role worker", 2, "error[CFG001]: unknown flag --role. Fix: did you mean --roles?"),
    ("bench --onyl planner", 2, "error[CFG001]: unknown flag --onyl. Fix: did you mean --only?"),
    ("worker --conect h:1", 2, "error[CFG001]: unknown flag --conect. Fix: did you mean --connect?"),
    ("prepare --out d", 2, "error[CFG012]: --source is missing"),
    ("evaluate --model m", 2, "error[CFG012]: --dataset is missing"),
    ("plot", 2, "error[CFG012]: --run is missing"),
    ("chaos --rounds 3", 2, "error[CFG012]: --mean-rounds-between-kills is missing"),
    ("worker --device tpu --connect h:1", 2, "error[CFG003]: --device is out of range — got 'tpu', allowed"),
    ("prepare --source digits --out=d --seed x", 2, "error[CFG002]: --seed has the wrong type — got 'x'"),
    ("worker --connect h:1 --patience-s nan", 2, "error[CFG003]: --patience-s is out of range — got nan"),
    ("market --share fair", 2, "error[CFG011]: --share is for --open alone. Fix: leave it out, or give --open"),
    ("market --node x", 2, "error[CFG011]: --node is for --offer or --withdraw alone"),
    ("market --whole", 2, "error[CFG011]: --whole is for --offer alone. Fix: leave it out, or give --offer"),
    ("data --check a --node b", 2, "error[CFG011]: --node is for --serve or --withdraw alone"),
    ("market --offer --price=-1", 2, "error[CFG003]: the terms are out of range — got price = -1.0"),
    ("market --offer --accepts all", 2, "error[CFG003]: the terms are out of range — got accepts = all"),
    ("market --price 0", 2, "error[CFG011]: --price is for --offer alone"),
    ("market --offer --withdraw", 2, "error[CFG011]: --offer and --withdraw exclude each other"),
    ("market --open --close", 2, "error[CFG011]: --open and --close exclude each other"),
    ("rerun r --anywya", 2, "error[CFG001]: unknown flag --anywya. Fix: did you mean --anyway?"),
    ("rerun r --resume", 2, "error[CFG001]: unknown flag --resume. Fix: leave it out"),
    ("rerun nosuch", 5, "error[CKPT001]: there is no run 'nosuch'"),
    ("rerun", 2, "error[CFG012]: --run is missing"),
    ("simulate", 2, "error[CFG012]: --scenario is missing"),
    ("simulate --scenario lap", 2, "error[CFG015]: there is no such scenario — got 'lap', allowed"),
    ("simulate --scenario laptop --workers 0", 2, "error[CFG003]: --workers is out of range"),
    ("simulate --scenario laptop --days 2 --rivals", 2, "error[CFG011]: --days and --rivals exclude each other"),
    ("simulate --scenario laptop --days 2 --plot a.png", 2, "error[CFG011]: --days and --plot exclude each other"),
    ("simulate --scenaro laptop", 2, "error[CFG001]: unknown flag --scenaro. Fix: did you mean --scenario?"),
    ("simulate --scenario laptop --rounds 1 --json no/such/file", 2, "error[CFG008]: --json can't be used"),
    ("doctor --jsn f", 2, "error[CFG001]: unknown flag --jsn. Fix: did you mean --json?"),
    ("doctor --json no/such/file", 2, "error[CFG008]: --json can't be used"),
    ("prepare digits", 2, "error[CFG015]: unexpected argument 'digits'"),
    ("plot --run no\udcff", 5, "error[CKPT001]: "),
    ("prepare --source no\udcff.txt --out d", 3, "error[DATA030]: there is no file or folder no?.txt"),
    ("generate --model nosuch", 5, "error[CKPT001]: "),
    ("generate --model early", 5, "error[CKPT006]: "),
    ("generate --model early --round 3", 5, "error[STORE006]: "),
    ("export nosuch", 5, "error[CKPT001]: "),
    ("export early", 5, "error[CKPT006]: "),
    ("export early --round 3", 5, "error[STORE006]: "),
    ("plot nosuch", 5, "error[CKPT001]: "),
    ("plot early", 3, "error[DATA044]: "),
    ("evaluate --model nosuch --dataset data", 5, "error[CKPT001]: "),
    ("evaluate --model ./nosuch --dataset data", 2, "error[HUB001]: "),
    ("evaluate --model ./data --dataset data", 5, "error[MODEL005]: "),
    ("evaluate --model ./model --dataset nosuch", 3, "error[DATA001]: "),
    ("evaluate --model ./model --dataset data --type causal", 2, "error[MODEL001]: "),
    ("evaluate --model nosuch --lm-eval arc_easy", 5, "error[CKPT001]: "),
    ("prepare --source nosuch.txt --tokenizer ./model --out d", 3, "error[DATA030]: "),
    ("prepare --source nosuch/*.txt --tokenizer ./model --out d", 3, "error[DATA030]: "),
    ("prepare --source rows.jsonl --tokenizer ./nosuch --out d", 2, "error[HUB001]: "),
    ("prepare --source rows.jsonl --image-column a --preprocessor ./nosuch --out d", 2, "error[HUB001]: "),
    ("prepare --source rows.jsonl --chat --chat-template nosuch --out d", 2, "error[PREP009]: "),
    ("diloco --resume nosuch", 5, "error[CKPT001]: "),
    ("diloco @ job.toml --run.name new --resume", 5, "error[CKPT001]: "),
    ("diloco @ job.toml --dataset.path nosuch", 3, "error[DATA001]: "),
    ("diloco @ job.toml --dataset.path nosuch --dry-run", 3, "error[DATA001]: "),
    ("diloco @ job.toml --model.repository ./nosuch --model.config none", 2, "error[HUB001]: "),
    ("diloco @ job.toml --preprocessor.repository ./nosuch", 2, "error[HUB001]: "),
    ("diloco @ job.toml --inner_optimizer.warmup_steps 5", 2, "error[OPT001]: "),
    ("diloco @ job.toml --worker.device cuda", 2, "error[CFG011]: "),
    ("diloco @ job.toml --run.name early", 2, "error[RUN001]: "),
    ("diloco @ job.toml --run.name early --dry-run", 2, "error[RUN001]: "),
    ("grpo @ job.toml --rl.reward.functions exactly", 2, "error[RWD003]: "),
)
"""Command lines, with the exit code and the beginning of the error."""


@pytest.fixture(scope="module")
def light_command() -> Iterator[LightCommands]:
    with light_commands() as run:
        yield run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder with rows, a dataset, a run and a model."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "data").symlink_to(corpus)
    (folder / "rows.jsonl").write_text('{"a": "b"}\n')
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    tables: dict[str, Any] = {"model": {"config": {"model_type": "llama"}}, "dataset": {"path": str(folder / "data")}}
    job = Job.model_validate(tables)
    (folder / "job.toml").write_text(resolved_toml(job))
    tables["rounds"] = {"samples_between_updates": 7}
    RunDirectory.create(folder / "home", "early", resolved_toml(Job.model_validate(tables)))
    return folder


@pytest.mark.parametrize(("line", "code", "error"), LINES)
def test_mistake_that_needs_no_library_is_refused_before_one_is_loaded(
    light_command: LightCommands, folder: Path, line: str, code: int, error: str
) -> None:
    done = light_command(*line.split(), cwd=folder, HYPHA_RAY_HOME=str(folder / "home"))
    (printed,) = said(done.stderr).splitlines()
    assert done.returncode == code
    assert not done.stdout or "--dry-run" in line
    assert printed.startswith(error) and " Fix: " in printed
    assert HEAVY.isdisjoint(done.modules)
