"""How a run was made, and its repetition: command line, versions, hosts, and what is told of changes since."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hypha_ray.config import Job
from hypha_ray.config.load import load
from hypha_ray.data.catalogue import load as load_manifest
from hypha_ray.data.manifest import Manifest, TensorInfo
from hypha_ray.data.mixture import described
from hypha_ray.data.storage import Place
from hypha_ray.driver.credentials import variables_in_use
from hypha_ray.driver.data_source import DataSource
from hypha_ray.driver.rerun import arguments_of, job_folder_of, rerun, split_words
from hypha_ray.driver.run_provenance import (
    CHECKOUT,
    PROVENANCE,
    changes_since,
    code_changes,
    commit_of,
    data_changes,
    record_devices,
    record_start,
    recorded_error,
    version_changes,
    versions,
)
from hypha_ray.errors import CheckpointError, ConfigError, DataError
from hypha_ray.model.sources import identity_of
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import JsonLines
from hypha_ray.types import SliceInfo
from jobs.rerun import Rerun
from tests.support.plugins import Written, written
from tests.support.run_folders import make_run

NODE = {
    "Alive": True,
    "NodeManagerHostname": "rack-1",
    "NodeManagerAddress": "192.0.2.7",
    "Resources": {"CPU": 4.0, "GPU": 2.0, "accelerator_type:T4": 1.0, "memory": 8e9},
}
MANIFEST = Manifest(
    name="texts",
    modality="language",
    slices=(SliceInfo(0, "slice-00000.safetensors", "0" * 64, 6, "train"),),
    tensors=(TensorInfo("input_ids", "int32", (2,), 0, 11),),
)
SOURCE = DataSource(MANIFEST, Path("texts"), (Place("texts"), Place("s3://key:s3cret@store/texts")), lambda info: {})
__all__ = ["written"]


def account_of(directory: RunDirectory) -> dict[str, Any]:
    account: dict[str, Any] = json.loads((directory.path / PROVENANCE).read_text())
    return account


def test_versions_are_those_that_pip_tells() -> None:
    listed = subprocess.run([sys.executable, "-m", "pip", "list", "--format=json"], capture_output=True, check=True)
    known = {entry["name"].lower(): entry["version"] for entry in json.loads(listed.stdout)}
    told = versions()
    assert all(told[name] == known[name] for name in ("ray", "torch", "transformers", "safetensors"))


def test_start_is_recorded_with_hosts_and_dataset_and_a_second_one_keeps_the_first(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    record_start(directory, SOURCE, ["python", "jobs/diloco.py"], [NODE, {"Alive": False}])
    first = account_of(directory)
    assert first["hosts"] == [
        {"host": "rack-1", "address": "192.0.2.7", "cpus": 4.0, "gpus": 2.0, "gpu_type": "T4", "memory_bytes": 8e9}
    ]
    assert first["dataset"]["sha256"] == MANIFEST.identity
    assert first["dataset"]["places"] == [str(Path.cwd() / "texts"), "s3://key:***@store/texts"]
    events = JsonLines(directory.path / "events.jsonl")
    for worker, device in ((0, "cpu"), (1, "cuda:0")):
        events.write({"wall_time": "2999-01-01T00:00:00.000+00:00", "kind": "join", "worker": worker, "device": device})
    record_start(directory, SOURCE, None, [])
    second = account_of(directory)
    assert (second["command"], second["hosts"]) == (None, [])
    assert [start["command"] for start in second["earlier"]] == [["python", "jobs/diloco.py"]]
    assert second["earlier"][0]["devices"] == {"worker-0": "cpu", "worker-1": "cuda:0"}


def test_error_of_a_start_is_recorded_until_a_later_part_ends_well(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    record_start(directory, SOURCE, None, [])
    assert account_of(directory)["error"] is None
    with pytest.raises(CheckpointError), recorded_error(directory):
        raise CheckpointError("CKPT001", "there is no run", fix="look at sftp://me:s3cret@store")
    assert account_of(directory)["error"] == ("error[CKPT001]: there is no run. Fix: look at sftp://me:***@store")
    with recorded_error(directory):
        pass
    assert account_of(directory)["error"] is None
    with pytest.raises(ValueError, match="twice"), recorded_error(directory):
        raise ValueError("twice\nor once")
    record_start(directory, SOURCE, None, [])
    account = account_of(directory)
    assert (account["error"], account["earlier"][0]["error"]) == (None, "ValueError: twice or once")


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_interruption_is_no_error(tmp_path: Path, end: type[BaseException]) -> None:
    directory = RunDirectory(tmp_path / "run")
    record_start(directory, SOURCE, None, [])
    with pytest.raises(end), recorded_error(directory):
        raise end
    assert account_of(directory)["error"] is None


def test_settings_that_failed_with_the_first_batch_are_disabled_in_the_account_of_their_worker(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    record_start(directory, SOURCE, None, [])
    events = JsonLines(directory.path / "events.jsonl")
    time = {"wall_time": "2999-01-01T00:00:00.000+00:00"}
    chosen = {"settings": {"autocast": "bf16", "compile": True}, "reasons": {"autocast": "a", "compile": "b"}}
    for worker, incarnation in ((0, 10), (1, 11), (0, 12)):
        events.write(
            {**time, "kind": "join", "worker": worker, "incarnation": incarnation, "device": "cuda:0", **chosen}
        )
    for worker, incarnation, names in ((0, 10, ["autocast"]), (0, 12, ["compile"])):
        events.write({**time, "kind": "disable", "worker": worker, "incarnation": incarnation, "settings": names})
    record_devices(directory)
    account = account_of(directory)
    failed = "what was chosen doesn't work here"
    assert account["settings"] == {"worker-0": {"autocast": "bf16", "compile": False}, "worker-1": chosen["settings"]}
    assert account["reasons"] == {"worker-0": {"autocast": "a", "compile": failed}, "worker-1": chosen["reasons"]}


def test_devices_of_a_folder_that_cannot_be_written_are_left_out(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    record_start(directory, SOURCE, None, [])
    (directory.path / f".{PROVENANCE}.part").mkdir()
    record_devices(directory)
    assert account_of(directory)["devices"] == {}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_is_that_of_the_folder_and_changes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    (tmp_path / "job.py").write_text("pass\n")
    git("init", "--quiet")
    git("add", "job.py")
    git("commit", "--quiet", "-m", "one")
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(tmp_path / "run")
    record_start(directory, SOURCE, None, [])
    assert account_of(directory)["working_folder"] == {"commit": git("rev-parse", "HEAD"), "uncommitted_changes": False}
    (tmp_path / "job.py").write_text("print()\n")
    record_start(directory, SOURCE, None, [])
    assert account_of(directory)["working_folder"]["uncommitted_changes"] is True


def dataset(folder: Path, token: int = 3) -> Path:
    """A dataset of bare slices."""
    folder.mkdir(parents=True)
    ids = np.full((8, 4), token, np.int32)
    for split in ("train", "validation"):
        save_file({"input_ids": ids, "attention_mask": np.ones_like(ids)}, folder / f"{split}.safetensors")
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory that the run was started in, with its data."""
    dataset(tmp_path / "project" / "data" / "texts")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def run_in(project: Path, name: str = "texts-1", **fields: Any) -> Path:
    """The directory of a run that was started in a project, with the account that a start now would write."""
    provenance = {
        "command": ["python", "jobs/sync.py", "@", "job.toml"],
        "folder": str(project),
        "versions": versions(),
        "commit": commit_of(CHECKOUT)["commit"],
        "uncommitted_changes": False,
        "working_folder": None,
        "secrets": [],
        **fields,
    }
    run = make_run(project.parent / "runs", name, provenance=provenance)
    (run / "dataset.json").write_text(described(load_manifest(project / "data" / "texts")))
    (run / "identity.json").write_text("{}")
    return run


def changes(run: Path, *words: str) -> list[str]:
    """Changes since a run but for those of this checkout, in which a developer may work."""
    provenance = json.loads((run / "provenance.json").read_text())
    lines = changes_since(run, provenance, load(arguments_of(run, provenance, words)).job)
    return [line for line in lines if not line.startswith("hypha_ray ha")]


@pytest.mark.parametrize(
    ("words", "own", "others"),
    [
        ("texts-1", "texts-1", ""),
        ("--anyway texts-1 --dry-run", "texts-1 --anyway --dry-run", ""),
        ("--run texts-1 --run.name b", "--run texts-1", "--run.name b"),
        ("--rounds.epochs 5 texts-1 --sync.quorum=3", "texts-1", "--rounds.epochs 5 --sync.quorum=3"),
        ("texts-1 @ a.toml b.toml @c --dir=d", "texts-1 --dir=d", "@ a.toml @ b.toml @ c"),
        ("-h", "-h", ""),
    ],
)
def test_words_are_those_of_the_repetition_or_of_the_job(words: str, own: str, others: str) -> None:
    assert split_words(words.split(), Rerun) == (own.split(), others.split())


@pytest.mark.parametrize(
    ("flag", "fix"), [("--anywya", "did you mean --anyway"), ("--rnu", "did you mean --run"), ("--resume", "show.py")]
)
def test_flag_that_is_no_key_names_the_nearest(flag: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=rf"CFG001.*{flag}.*{fix}"):
        split_words(["texts-1", flag], Rerun)


def test_arguments_are_the_job_file_of_the_run_under_a_new_name(project: Path) -> None:
    run = run_in(project, "texts-20260102-030405")
    (run / "identity.json").write_text(json.dumps({"model.revision": "c0ffee"}))
    file, name, directory, revision = 1, 3, 5, 7
    words = arguments_of(run, {}, ["--rounds.epochs", "5"])
    assert (words[file], words[directory], words[revision]) == (str(run / "config.toml"), str(run.parent), "c0ffee")
    assert words[name].startswith("texts-") and words[name] != "texts-20260102-030405" and words[name].count("-") == 2
    job = load(words).job
    assert (job.rounds.epochs, job.run.name, job.dataset.path) == (5, words[name], "data/texts")
    assert "--model.revision" not in arguments_of(run, {}, ["--model.repository", "gpt2"])
    assert load(arguments_of(run, {}, ["--run.name", "again"])).job.run.name == "again"


def test_names_of_the_user_and_of_the_run_mean_folders_of_each(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(project)
    provenance = json.loads((run / "provenance.json").read_text())
    elsewhere = tmp_path / "elsewhere"
    dataset(elsewhere / "mine")
    (elsewhere / "more.toml").write_text('[telemetry]\ntrackers = "shared"\n')
    monkeypatch.chdir(elsewhere)
    assert job_folder_of(provenance) == project
    words = arguments_of(run, provenance, ["@", "more.toml", "--dataset.path", "mine", "--run.dir", "out"])
    monkeypatch.chdir(project)
    job = load(words).job
    assert job.dataset.path == str(elsewhere / "mine")
    assert (job.run.dir, job.telemetry.trackers) == (str(elsewhere / "out"), str(elsewhere / "shared"))
    assert load(arguments_of(run, provenance, ["@", "tiny"])).job.dataset.path == "data/texts"


def test_another_checkout_is_no_working_directory_and_its_data_is_found(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(project)
    provenance = json.loads((run / "provenance.json").read_text())
    (project / "hypha_ray").mkdir()
    (project / "hypha_ray" / "__init__.py").touch()
    clone = tmp_path / "clone"
    clone.mkdir()
    monkeypatch.chdir(clone)
    assert job_folder_of(provenance) == clone
    assert load(arguments_of(run, provenance, [])).job.dataset.path == str(project / "data/texts")
    assert changes(run) == []
    dataset(clone / "data" / "texts")
    assert load(arguments_of(run, provenance, [])).job.dataset.path == "data/texts"
    assert job_folder_of({"folder": str(tmp_path / "gone")}) == clone


def test_nothing_has_changed_and_data_may_lie_elsewhere(project: Path) -> None:
    run = run_in(project)
    assert changes(run) == []
    dataset(project / "moved")
    assert changes(run, "--dataset.path", "moved") == []


def test_other_samples_and_missing_data_are_told(project: Path) -> None:
    run = run_in(project)
    dataset(project / "other", token=4)
    assert changes(run, "--dataset.path", "other") == ["dataset other has other samples here than in the run"]
    (line,) = changes(run, "--dataset.path", "gone")
    assert line.startswith("there is no dataset at gone in ")
    (run / "dataset.json").unlink()
    (line,) = changes(run)
    assert "identity of its dataset" in line


def test_parts_of_a_mixture_are_compared_one_by_one(project: Path) -> None:
    dataset(project / "other", token=4)
    from hypha_ray.data.mixture import RunDataset, identities, mixed

    manifests = [load_manifest(project / "data" / "texts"), load_manifest(project / "other")]
    mixture = mixed(manifests)
    begun = RunDataset(mixture.identity, tuple(identities(mixture)))

    def told(*paths: str) -> list[str]:
        job = Job.model_validate({"dataset": {"mix": [{"path": path} for path in paths]}})
        return list(data_changes(begun, job))

    assert told("data/texts", "other") == []
    assert told("data/texts", "data/texts") == ["dataset data/texts has other samples here than in the run"]
    assert told("other", "other") == ["dataset other has other samples here than in the run"]
    assert told("other") == ["the run has 2 datasets, and here are 1"]


def test_versions_that_differ_are_told_and_the_platform_is_not() -> None:
    then = {"python": "3.11.2", "torch": "2.13.0", "peft": "0.18", "platform": "Linux-6"}
    now = {"python": "3.11.2", "torch": "2.14.0", "platform": "Linux-7", "bitsandbytes": "1"}
    assert list(version_changes(then, now)) == [
        "torch is 2.14.0 here, and was 2.13.0 in the run",
        "peft isn't installed here, and was 0.18 in the run",
    ]


def test_another_commit_and_uncommitted_changes_are_told(project: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(["git", *identity, *arguments], cwd=project, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "-m", "one")
    commit = git("rev-parse", "HEAD")
    then = {**commit_of(CHECKOUT), "working_folder": {"commit": commit, "uncommitted_changes": False}}

    def told(provenance: dict[str, Any]) -> list[str]:
        return [line for line in code_changes(provenance) if line.startswith(str(project))]

    assert told(then) == []
    (project / "job.py").touch()
    git("add", "job.py")
    assert told(then) == [f"{project} has uncommitted changes here"]
    git("commit", "--quiet", "-m", "two")
    here = git("rev-parse", "HEAD")[:12]
    assert told(then) == [f"{project} is at commit {here} here, and was at commit {commit[:12]} in the run"]
    then["working_folder"] = {"commit": git("rev-parse", "HEAD"), "uncommitted_changes": True}
    assert told(then) == [f"{project} had uncommitted changes in the run"]
    package = {"commit": "0" * 40, "uncommitted_changes": False, "working_folder": None}
    assert next(code_changes(package)).endswith("and was at commit 000000000000 in the run")


def test_weights_and_own_code_with_other_content_are_told(project: Path, written: Written) -> None:
    module = written("class Signs:\n    pass\n")
    Path("weights").mkdir()
    Path("weights/config.json").write_text("{}")
    words = ["--sync.codec", f"{module}:Signs", "--preprocessor.repository", "weights"]
    run = run_in(project)
    job = load(arguments_of(run, {}, words)).job
    (run / "identity.json").write_text(json.dumps(identity_of(job)))
    assert not [line for line in changes(run, *words) if "other content" in line or "compared" in line]
    Path(f"{module}.py").write_text("class Signs:\n    bits = 1\n")
    Path("weights/config.json").write_text('{"a": 1}')
    assert [line for line in changes(run, *words) if "other content" in line] == [
        "preprocessor.repository has other content here than in the run",
        f"sync.codec {module}:Signs has other content here than in the run",
    ]
    (run / "identity.json").unlink()
    assert [line for line in changes(run, *words) if "content of its inputs" in line], "nothing is taken for equal"


def test_secrets_that_are_missing_are_told_by_name(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_value")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = run_in(project, secrets=["HF_TOKEN", "WANDB_API_KEY"])
    assert changes(run) == ["WANDB_API_KEY isn't set here, and was in the run"]
    lines = changes(run, "--checkpoint.mirror", "sftp://me:***@host/runs")
    assert "checkpoint.mirror needs the secret of its URL again" in lines[1]


ALERT = ("metric=loss", "op=>", "value=9", "for_s=0", "url_env=TEAM_HOOK")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--dataset.path", "s3://bucket/texts"], ["AWS_PROFILE", "FSSPEC_S3_KEY"]),
        (["--checkpoint.mirror", "gs://bucket/runs"], ["GOOGLE_APPLICATION_CREDENTIALS"]),
        (["--model.repository", "openai-community/gpt2"], ["HF_TOKEN"]),
        (["--checkpoint.push", "me/model"], ["HF_TOKEN"]),
        (["--telemetry.sinks", "jsonl,wandb"], ["WANDB_API_KEY"]),
        (["--rl.reward.judge.key_variable", "JUDGE_KEY"], ["JUDGE_KEY"]),
        ([f"--telemetry.alerts.0.{word}" for word in ALERT], ["TEAM_HOOK"]),
        ([], []),
    ],
)
def test_variables_in_use_are_those_of_the_services_that_the_job_names(flags: list[str], names: list[str]) -> None:
    every_name = [
        "AWS_PROFILE",
        "FSSPEC_S3_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "HF_TOKEN",
        "JUDGE_KEY",
        "TEAM_HOOK",
    ]
    environment = dict.fromkeys([*every_name, "WANDB_API_KEY"], "secret") | {"AWS_ACCESS_KEY_ID": ""}
    assert variables_in_use(load(flags).job, environment) == names


@pytest.fixture
def command(project: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Repeats a run, as the job script does it; the process is as before afterwards."""
    monkeypatch.setattr(sys, "argv", ["jobs/rerun.py"])
    monkeypatch.setattr(sys, "path", [*sys.path])

    def repeat(run: Path, *words: str, accepts_changes: bool = False) -> None:
        rerun(run, words, accepts_changes, is_dry_run=True)

    return repeat


def test_changed_run_is_refused_with_a_note_for_each_change(
    project: Path, command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(project, versions={"torch": "0.1"}, secrets=["NO_SUCH_SECRET"])
    with pytest.raises(ConfigError, match=r"RUN003.* differences, allowed none.*--anyway"):
        command(run, "--dataset.path", "gone")
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    for text in ("torch is ", "there is no dataset at ", "NO_SUCH_SECRET isn't set"):
        assert any(note.startswith(f"note: {text}") for note in notes), notes
    assert sorted(path.name for path in run.parent.iterdir()) == ["texts-1"]


def test_own_name_of_the_run_is_refused(project: Path, command: Callable[..., None]) -> None:
    with pytest.raises(ConfigError, match=r"RUN001.*'texts-1' is the run that is to be repeated"):
        command(run_in(project), "--run.name", "texts-1")


@pytest.mark.parametrize("field", [{"versions": ["torch"]}, {"folder": 5}, {"secrets": 5}, {"command": 5}])
def test_account_of_another_program_is_one_error(
    project: Path, command: Callable[..., None], field: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=r"DATA044.*provenance.json has a record that can't be understood"):
        command(run_in(project, **field))


def test_damaged_job_file_is_one_error(project: Path, command: Callable[..., None]) -> None:
    run = run_in(project)
    RunDirectory(run).config.write_text("[run\n")
    with pytest.raises(ConfigError, match="CFG005"):
        command(run)
