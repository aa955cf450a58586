"""Mistakes that no library is needed for are refused before torch, transformers or Ray are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.bridge.access import make_token
from hypha_ray.bridge.channel import Listener
from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.store.directory import RunDirectory
from tests.support.forked_process import run_script
from tests.support.job_scripts import said
from tests.support.light_commands import LightCommands, light_commands
from tests.support.recorded_run import write_run

HEAVY = {"torch", "transformers", "ray", "datasets", "lm_eval", "matplotlib"}
LINES: tuple[tuple[str, int, str], ...] = (
    ("prepare --sorce digits", 2, "error[CFG001]: unknown flag --sorce. Fix: did you mean --source?"),
    ("evaluate --modle m", 2, "error[CFG001]: unknown flag --modle. Fix: did you mean --model?"),
    ("plot --rnu r", 2, "error[CFG001]: unknown flag --rnu. Fix: did you mean --run?"),
    ("export --rnu r", 2, "error[CFG001]: unknown flag --rnu. Fix: did you mean --run?"),
    ("generate --model m --top-p 2", 2, "error[CFG003]: --top-p is out of range — got 2.0, allowed above 0"),
    ("chaos --role worker", 2, "error[CFG001]: unknown flag --role. Fix: did you mean --roles?"),
    ("chaos --mean-rounds-between-kills 4 --rounds 5 --roles worker,boss --out o", 2,
     "error[CHAOS001]: --roles: no role 'boss'"),
    ("chaos --mean-rounds-between-kills 4 --rounds 5 --out model", 2, "error[CHAOS002]: --out:"),
    ("data", 2, "error[CFG012]: one thing has to be done"),
    ("data --list --check x", 2, "error[CFG012]: one thing has to be done"),
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
    ("simulate --from stedy", 5, "error[CKPT001]: there is no run 'stedy' in HOME. Fix: did you mean 'steady'?"),
    ("simulate --from short", 5, "error[SIM001]: run short is too short to simulate"),
    ("simulate --from steady --try sync.codek=int4", 2,
     "error[CFG001]: --try: unknown key sync.codek. Fix: did you mean `sync.codec`?"),
    ("simulate --from steady --try worker.compile=true", 2, "error[SIM003]"),
    ("simulate --from steady --deadline soon", 2,
     "error[CFG003]: --deadline is out of range — got 'soon', allowed a time in s, min, h or d"),
    ("simulate --from steady --scenario laptop", 2, "error[CFG011]: --from and --scenario exclude each other"),
    ("simulate --scenario laptop --try sync.codec=int4", 2, "error[CFG011]: --try is for --from alone"),
    ("simulate --scenaro laptop", 2, "error[CFG001]: unknown flag --scenaro. Fix: did you mean --scenario?"),
    ("simulate --scenario laptop --rounds 1 --json no/such/file", 2, "error[CFG008]: --json can't be used"),
    ("doctor --jsn f", 2, "error[CFG001]: unknown flag --jsn. Fix: did you mean --json?"),
    ("doctor --json no/such/file", 2, "error[CFG008]: --json can't be used"),
    ("prepare --source digits", 2, "error[CFG012]: --out is missing"),
    ("prepare --source digits --out d --seqlen 4", 2,
     "error[CFG001]: unknown flag --seqlen. Fix: did you mean --seq-len?"),
    ("prepare --source digits --out d --seq-len many", 2, "error[CFG002]: --seq-len has the wrong type — got 'many'"),
    ("prepare --source digits --out d --seq-len 1", 2, "error[PREP001]: --seq-len"),
    ("prepare --source stdlib --out d --chat", 2, "error[PREP007]: --chat has no effect on --source stdlib"),
    ("prepare digits", 2, "error[CFG015]: unexpected argument 'digits'"),
    ("plot --run no\udcff", 5, "error[CKPT001]: "),
    ("prepare --source no\udcff.txt --out d", 3, "error[DATA030]: there is no file or folder no?.txt"),
    ("generate --model m --temperature 1e-40", 2, "error[CFG003]: --temperature is out of range"),
    ("generate --model m --top-k 0", 2, "error[CFG003]: --top-k is out of range — got 0, allowed 1 or more"),
    ("generate --model ./model --prompt x --round 1", 2,
     "error[CFG011]: --round and the folder of a model exclude each other"),
    ("generate --model nosuch", 5, "error[CKPT001]: "),
    ("generate nosuch --prompt x", 5, "error[CKPT001]: "),
    ("generate --model early", 5, "error[CKPT006]: "),
    ("generate --model early --round 3", 5, "error[STORE006]: "),
    ("export nosuch", 5, "error[CKPT001]: "),
    ("export early", 5, "error[CKPT006]: run early has no checkpoint yet"),
    ("export nosuch --to /dev/null/there", 2, "error[CFG008]: --to can't be used — got /dev/null/there ("),
    ("export early --round 3", 5, "error[STORE006]: "),
    ("plot nosuch", 5, "error[CKPT001]: "),
    ("plot early", 3, "error[DATA044]: "),
    ("evaluate --model nosuch --dataset data", 5, "error[CKPT001]: "),
    ("evaluate nosuch --dataset data", 5, "error[CKPT001]: "),
    ("evaluate --model ./nosuch --dataset data", 2, "error[HUB001]: model folder doesn't exist — got "),
    ("evaluate --model ./model --dataset data --batch-size 0", 2,
     "error[CFG003]: --batch-size is out of range — got 0, allowed 1 or more"),
    ("evaluate --model ./model --dataset data --seed -1", 2,
     "error[CFG003]: --seed is out of range — got -1, allowed 0 or more"),
    ("evaluate --model ./model --lm-eval x --dataset x", 2,
     "error[CFG011]: --lm-eval and --dataset exclude each other"),
    ("evaluate --model ./model --lm-eval x --samples 2", 2,
     "error[CFG011]: --lm-eval and --samples exclude each other"),
    ("evaluate --model ./model --dataset x --include-path x", 2,
     "error[CFG011]: --include-path is for --lm-eval alone"),
    ("evaluate --model ./model --lm-eval x --include-path nosuch", 2,
     "error[CFG003]: --include-path is no folder — got nosuch"),
    ("evaluate --model ./data --dataset data", 5, "error[MODEL005]: "),
    ("evaluate --model ./model --dataset nosuch", 3, "error[DATA001]: there is no dataset at nosuch"),
    ("evaluate --model ./model --dataset data --type causal", 2, "error[MODEL001]: "),
    ("evaluate --model nosuch --lm-eval arc_easy", 5, "error[CKPT001]: "),
    ("prepare --source nosuch.txt --tokenizer ./model --out d", 3,
     "error[DATA030]: there is no file or folder nosuch.txt"),
    ("prepare --source nosuch/*.txt --tokenizer ./model --out d", 3, "error[DATA030]: "),
    ("prepare --source rows.jsonl --tokenizer ./nosuch --out d", 2, "error[HUB001]: "),
    ("prepare --source rows.jsonl --image-column a --preprocessor ./nosuch --out d", 2, "error[HUB001]: "),
    ("prepare --source rows.jsonl --chat --chat-template nosuch --out d", 2, "error[PREP009]: "),
    ("diloco --resume erly", 5, "error[CKPT001]: there is no run 'erly' in HOME. Fix: did you mean 'early'?"),
    ("diloco @ job.toml --run.name new --resume", 5, "error[CKPT001]: there is no run 'new' in HOME. "
     "Fix: give the name or folder of a run; to begin one, leave --resume out"),
    ("diloco @ wrong.toml", 2, "error[CFG001]: wrong.toml:4: unknown key inner_optimizer.learning_rte. "
     "Fix: did you mean `inner_optimizer.learning_rate`?"),
    ("diloco @ job.toml --rounds.update_round 3", 2, "error[CFG001]: unknown flag --rounds.update_round. "
     "Fix: did you mean `rounds.update_rounds`?"),
    ("diloco @ job.toml --inner_optimizer.learning_rate fast", 2,
     "error[CFG002]: --inner_optimizer.learning_rate has the wrong type — got 'fast', allowed number > 0"),
    ("diloco @ job.toml --resources.num_workers 0", 2,
     "error[CFG003]: --resources.num_workers is out of range — got 0, allowed integer ≥ 1"),
    ("diloco @ job.toml --resources.min_workers 3", 2,
     "error[CFG003]: --resources.min_workers is more than job.toml:"),
    ("diloco @ job.toml --model.repository owner/name", 2, "error[CFG011]: --model.repository and job.toml:"),
    ("diloco @ job.toml --model.config none", 2, "error[CFG012]: the job has no model. Fix: give model.repository"),
    ("diloco @ job.toml --dataset.path=", 2, "error[CFG012]: the job has no dataset. Fix: give dataset.path"),
    ("diloco @ job.toml --model.repository ./nosuch --model.config none", 2, "error[HUB001]: "),
    ("diloco @ job.toml --preprocessor.repository ./nosuch", 2, "error[HUB001]: "),
    ("grpo @ job.toml --rl.reward.functions exactly", 2,
     "error[RWD003]: there is no such reward function — got 'exactly', allowed exact, positions, contains, number, "
     "format, length, math, code, environment, judge, model. Fix: did you mean 'exact'?"),
    ("ppo @ job.toml --rl.algorithm=rloo --rl.group_size=1 --dry-run", 2,
     "error[CFG011]: --rl.group_size and rl.advantage"),
    ("ppo @ job.toml --sync.strategy=sync --dry-run", 2, "error[CFG011]: --rl.algorithm and sync.strategy"),
    ("ppo @ job.toml --rl.staleness=1 --dry-run", 2, "error[CFG011]: --rl.staleness and rl.model_workers"),
)  # fmt: skip
"""Command lines, with the exit code and the beginning of the error; HOME is the folder of runs."""
OF_DRY_RUNS_TOO: tuple[tuple[str, int, str], ...] = (
    ("--resources.worker.gpu=8 --worker.processes=2", 2,
     "error[CFG003]: resources.worker.gpu: a process of a worker uses one GPU, and worker.processes is 2"),
    ("--resources.min_gpus=2 --worker.processes=1", 2,
     "error[CFG003]: resources.min_gpus: a process of a worker uses one GPU, and worker.processes is 1 — got 2"),
    ("--resources.worker.gpu=2 --rounds.max_batch_size=1", 2,
     "error[CFG003]: rounds.max_batch_size: the 2 processes of a worker share each batch — got 1, allowed 2 or"),
    ("--worker.device=cuda", 2, 'error[CFG011]: worker.device = "cuda" and resources.worker.gpu = 0 exclude each'),
    ("--dataset.path dat", 3, "error[DATA001]: there is no dataset at dat in "),
    ("--inner_optimizer.warmup_steps 5", 2, "error[OPT001]: "),
    ("--run.name early", 2, "error[RUN001]: run.name: there is a run 'early' in HOME, by another job: "
     "rounds.samples_between_updates is 1200 here and 7 in the run. Fix: choose another run.name, or give --resume"),
)  # fmt: skip
"""Flags of a job that are refused by a dry run, too."""
LINES += tuple(
    (f"diloco @ job.toml {flags}{ending}", code, error)
    for flags, code, error in OF_DRY_RUNS_TOO
    for ending in ("", " --dry-run")
)


@pytest.fixture(scope="module")
def light_command() -> Iterator[LightCommands]:
    with light_commands() as run:
        yield run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder with rows, a dataset, runs and a model."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "data").symlink_to(corpus)
    (folder / "rows.jsonl").write_text('{"a": "b"}\n')
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    tables: dict[str, Any] = {"model": {"config": {"model_type": "llama"}}, "dataset": {"path": str(folder / "data")}}
    job = Job.model_validate(tables)
    (folder / "job.toml").write_text(resolved_toml(job))
    (folder / "wrong.toml").write_text("[rounds]\nupdate_rounds = 3\n[inner_optimizer]\nlearning_rte = 0.1\n")
    tables["rounds"] = {"samples_between_updates": 7}
    RunDirectory.create(folder / "home", "early", resolved_toml(Job.model_validate(tables)))
    write_run(folder / "home" / "steady")
    write_run(folder / "home" / "short", [(0.1, 0.2)])
    return folder


@pytest.mark.parametrize(("line", "code", "error"), LINES)
@pytest.mark.long(keep=30)
def test_mistake_that_needs_no_library_is_refused_before_one_is_loaded(
    light_command: LightCommands, folder: Path, line: str, code: int, error: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = light_command(*line.split(), cwd=folder, HYPHA_RAY_HOME=str(folder / "home"))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    (printed,) = said(done.stderr).splitlines()
    assert done.returncode == code
    assert not done.stdout or "--dry-run" in line
    assert printed.startswith(error.replace("HOME", str(folder / "home"))) and " Fix: " in printed
    assert HEAVY.isdisjoint(done.modules)


# ── workers that can't join ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def token(tmp_path: Path) -> Path:
    make_token(tmp_path / "token")
    return tmp_path / "token"


def refused(token_file: Path | None, *arguments: str | Path) -> tuple[int, str]:
    """The exit code of `jobs/worker.py`, and its one line."""
    words = ["--patience-s=0", *arguments, *([] if token_file is None else ["--token-file", token_file])]
    done = run_script("worker.py", *map(str, words), HYPHA_BRIDGE_TOKEN_FILE="")
    (line,) = said(done.stderr).splitlines()
    assert done.stdout == ""
    return done.returncode, line


def test_worker_without_a_token_or_with_one_that_others_may_read_is_refused(token: Path) -> None:
    code, line = refused(None, "--connect", "127.0.0.1:1")
    assert code == 2 and line.startswith("error[CFG021]: no file with the token.")
    code, line = refused(token, "--connect", "127.0.0.1:1", "--authority", "missing.pem")
    assert code == 2 and line.startswith("error[SEC005]: certificates missing.pem can't be used")
    token.chmod(0o644)
    code, line = refused(token, "--connect", "127.0.0.1:1")
    assert code == 4 and line.startswith(f"error[AUTH011]: {token}: others may read this token")


@pytest.mark.parametrize(("address", "code", "error"), [("127.0.0.1", 2, "CFG020"), ("192.0.2.1:1", 2, "SEC001")])
def test_worker_that_is_sent_nowhere_or_without_tls_is_refused(
    address: str, code: int, error: str, token: Path
) -> None:
    found, line = refused(token, "--connect", address)
    assert found == code and line.startswith(f"error[{error}]: ")


def test_worker_whom_nobody_awaits_may_try_again(token: Path) -> None:
    code, line = refused(token, "--connect", "127.0.0.1:1")
    assert code == 75 and line.startswith("error[NET010]: no process can be reached at 127.0.0.1:1")


def test_worker_with_another_token_is_refused(token: Path) -> None:
    listener = Listener("127.0.0.1:0", b"6" * 64, 5.0)
    code, line = refused(token, "--connect", listener.address)
    listener.close()
    assert code == 4 and line.startswith("error[AUTH002]: the driver says: the trainer has another token")
