"""Weights & Biases: its offline files, written and read back."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections import defaultdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.telemetry.sinks.base import build
from hypha_ray.telemetry.sinks.files import METRICS, read_jsonl, rewind
from tests.support.curves import expected_curves, track
from tests.support.fleet import fleet_records

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="it is an extra")

BLOCK, HEADER = 32768, struct.Struct("<IHB")
LAST_PARTS = (1, 4)
SIGNATURE = 7
CONFIG = {"rounds": {"update_rounds": 2}, "dataset": {"path": "sftp://me:s3cr3t@host/data"}}
write = partial(track, sink="wandb", config=CONFIG)


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without wandb's variables; those that a test leaves behind vanish with it."""
    for name in ("API_KEY", "MODE", "PROJECT", "SERVICE", "SILENT", "ERROR_REPORTING", "CACHE_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", "")
        monkeypatch.delenv(f"WANDB_{name}")


def logged(file: Path) -> list[Any]:
    """Records of wandb's transaction log: protobuf messages in the frames of LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts, records = file.read_bytes(), SIGNATURE, b"", []
    while at + HEADER.size <= len(content):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(content, at)
        at += HEADER.size
        parts, at = parts + content[at : at + length], at + length
        if kind in LAST_PARTS:
            records.append(Record.FromString(parts))
            parts = b""
    return records


class Reopened:
    """A W&B run as its file has it."""

    def __init__(self, file: Path) -> None:
        records = logged(file)
        (self.run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        self.config = {item.key: json.loads(item.value_json) for item in self.run.config.update}
        self.axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.metric.glob_name}
        self.summary = {
            item.key: json.loads(item.value_json) for record in records for item in record.summary.update if item.key
        }
        self.curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for record in records:
            row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if (axis := self.axes.get(f"{name.partition('/')[0]}/*")) and name != axis:
                    self.curves[name].append((row[axis], value))


def reopened(directory: Path) -> list[Reopened]:
    files = sorted(directory.glob("wandb/*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    return [Reopened(file) for file in files]


@pytest.mark.slow
def test_wandb_has_the_curves_of_the_metrics_file(tmp_path: Path) -> None:
    write(tmp_path, fleet_records())
    (run,) = reopened(tmp_path)
    expected = expected_curves(read_jsonl(tmp_path / METRICS))
    assert {"round/loss", "round/batches/worker-1", "eval/val_loss", "worker-0/loss"} <= set(expected)
    assert run.curves == expected
    assert run.axes == {
        "round/*": "round",
        "eval/*": "round",
        "worker-0/*": "worker-0/report",
        "worker-1/*": "worker-1/report",
    }
    assert run.summary["summary/loss"] == 2.5
    assert (run.run.run_group, run.run.display_name, run.run.project) == ("fleet", "fleet", "hypha_ray")
    assert run.config["rounds"] == CONFIG["rounds"] and run.config["dataset"] == {"path": "sftp://me:***@host/data"}


@pytest.mark.slow
def test_wandb_has_the_labels_of_the_run(tmp_path: Path) -> None:
    sinks = build(tmp_path, "fleet", ["wandb"], patience_s=120.0)
    sinks.start(CONFIG | {"run": {"notes": "larger batch", "tags": ["baseline", "a: b"]}})
    sinks.close()
    (run,) = reopened(tmp_path)
    assert (run.run.notes, list(run.run.tags)) == ("larger batch", ["baseline", "a: b"])


def test_wandb_has_a_run_in_the_same_group_for_the_resumed_job(tmp_path: Path) -> None:
    records = fleet_records()
    killed = [record for record in records if record["round"] <= 2]
    again = [record for record in records if record["round"] >= 2]
    write(tmp_path, killed)
    rewind(tmp_path / METRICS, 2)
    write(tmp_path, again)
    first, second = reopened(tmp_path)
    assert first.run.run_id != second.run.run_id and first.run.run_group == second.run.run_group == "fleet"
    assert (first.curves, second.curves) == (expected_curves(killed), expected_curves(again))
    kept = expected_curves(read_jsonl(tmp_path / METRICS))
    for name in ("round/loss", "eval/val_loss"):
        assert list((dict(first.curves[name]) | dict(second.curves[name])).items()) == kept[name]


def test_wandb_keeps_its_files_in_the_run_directory_and_knows_no_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    write(run, fleet_records())
    assert capfd.readouterr() == ("", "")
    assert not [path for path in home.rglob("*") if path.is_file()]
    assert not list(run.glob("wandb/*/files/*"))
    (reopened_run,) = reopened(run)
    assert reopened_run.run.host == "" and not reopened_run.run.HasField("git")
    (file,) = run.glob("wandb/*/*.wandb")
    for secret in (str(Path.cwd()), sys.executable, "s3cr3t"):
        assert secret.encode() not in file.read_bytes()


@pytest.mark.slow
def test_wandb_server_that_does_not_answer_holds_up_nothing_and_no_secret_is_shown(tmp_path: Path) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://me:s3cr3t@127.0.0.1:{silent.getsockname()[1]}"
        code = (
            "import pathlib, sys\n"
            "from hypha_ray.telemetry.sinks.base import build\n"
            "sinks = build(pathlib.Path(sys.argv[1]), 'fleet', ['wandb'], patience_s=60.0)\n"
            "sinks.start({})\n"
            "sinks.record({'kind': 'eval', 'round': 0, 'val_loss': 1.5})\n"
            "sinks.close()\n"
            "print(sinks.problems(), sinks.losses()['wandb'])\n"
        )
        asked = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "k" * 40, "WANDB_INIT_TIMEOUT": "1", "HOME": str(home)}
        command = [sys.executable, "-c", code, str(run)]
        ended = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=True)
    assert "telemetry sink wandb can't be started yet (" in ended.stdout
    assert "{'failed': 1, 'dropped': 1}" in ended.stdout
    shown = ended.stdout + ended.stderr
    assert "s3cr3t" not in shown and "k" * 40 not in shown
    assert not [path for path in home.rglob("*") if path.is_file()]
    files = [path for path in run.rglob("*") if path.is_file()]
    assert files and not [path for path in files if b"s3cr3t" in path.read_bytes() or b"k" * 40 in path.read_bytes()]
