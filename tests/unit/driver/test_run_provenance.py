"""Account of how a run was made: command, versions, commit, hosts and devices."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.data.manifest import Manifest, TensorInfo
from hypha_ray.data.storage import Place
from hypha_ray.driver.data_source import DataSource
from hypha_ray.driver.run_provenance import PROVENANCE, record_devices, record_start, recorded_error, versions
from hypha_ray.errors import CheckpointError
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import JsonLines
from hypha_ray.types import SliceInfo

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
