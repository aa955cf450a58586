"""`jobs/export.py` as a user runs it, on a run that was ended before its last round."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.config.training import Checkpoint
from hypha_ray.driver.run import Run
from hypha_ray.errors import ConfigError
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.scheduler.messages import Persist
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.directory import RunDirectory
from hypha_ray.types import Contribution, Flat, Span, Verdict
from tests.support.hub import TOKEN, hub_of
from tests.support.job_scripts import Done, jobs_in, said

GROUP = "parameters/float32"
MODEL = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def export(home: Path, *arguments: str | Path) -> Done:
    with jobs_in(home) as jobs:
        return jobs(*arguments, script="export")


@pytest.fixture
def stopped(tmp_path: Path, corpus: Path) -> Path:
    """The directory of a run of which three rounds of five are committed; each adds one to all weights."""
    tables = {"run": {"name": "mine"}, "model": {"config": MODEL}, "dataset": {"path": str(corpus)}}
    job = Job.model_validate({**tables, "rounds": {"update_rounds": 5}})
    directory = RunDirectory.create(tmp_path / "home", "mine", resolved_toml(job))
    network = build_model(job.model, 0)
    layout = layout_of(network)
    theta: Flat = gather(network, layout, 0)
    mirror = str(tmp_path / "mirror")
    kept = CommitWriter(directory.path, Checkpoint(mirror=mirror), 5)
    kept.begin(layout, theta)
    for number in range(3):
        theta = {group: array + np.float32(1) for group, array in theta.items()}
        spans = ((0, (Span(0, 0, 4 * number, 4 * number + 4),)),)
        verdict = Verdict(number, (Contribution(0, 1, 4, 1.0),), (), 1.0)
        kept.commit(Persist(number, verdict, spans, {0: 4 * number + 4}, 0, {}), layout, (), theta, theta)
    assert kept.settle() is None
    return directory.path


def saved(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def test_export_to_a_place_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    done = export(tmp_path, "--run", "nowhere", "--to", "/dev/null/there")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error[CFG008]: --to can't be used — got /dev/null/there (")
    assert len(done.stderr.splitlines()) == 1


def test_export_of_a_stopped_run_saves_its_newest_weights_where_it_is_told_to(stopped: Path, tmp_path: Path) -> None:
    home, newest = tmp_path / "home", load_file(stopped / "checkpoints" / "round_000002" / "model.safetensors")
    before = sorted(path.name for path in stopped.iterdir())
    done = export(home, "--run", "mine", "--to", tmp_path / "there")
    assert (done.returncode, said(done.stderr)) == (0, "")
    assert done.stdout.splitlines() == ["after round 3 of 5, 3 are committed", f"model: {tmp_path}/there"]
    assert all(np.array_equal(array, newest[name]) for name, array in saved(tmp_path / "there").items())
    assert sorted(path.name for path in stopped.iterdir()) == before, "the run itself is touched"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "there").config.hidden_size == 16
    assert AutoTokenizer.from_pretrained(tmp_path / "there")("a").input_ids
    assert export(home, "--run", "mine", "--to", tmp_path / "there").returncode == 0, "an earlier export is replaced"
    assert export(home, "--run", stopped).returncode == 0 and saved(stopped / "model").keys() == newest.keys()


def test_export_to_a_folder_with_other_files_is_refused_and_leaves_them(stopped: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in stopped.iterdir())
    for folder in (stopped, tmp_path / "home"):
        done = export(tmp_path / "home", "--run", "mine", "--to", folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error[CFG008]: --to can't be used — got {folder} (it has other files")
    with pytest.raises(ConfigError, match=r"CFG008.*folder can't be used"):
        Run(stopped).export(tmp_path / "home")
    assert sorted(path.name for path in stopped.iterdir()) == before


def test_export_in_another_dtype_is_that_of_its_weights(stopped: Path, tmp_path: Path) -> None:
    done = export(tmp_path / "home", "--run", "mine", "--dtype", "bfloat16", "--to", tmp_path / "small")
    assert (done.returncode, said(done.stderr)) == (0, "")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype="auto")
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    wrong = export(tmp_path / "home", "--run", "mine", "--dtype", "int8", "--to", tmp_path / "other")
    assert wrong.returncode == 2 and "--dtype is out of range — got 'int8', allowed float32 | bfloat16" in wrong.stderr


def test_export_passes_over_a_damaged_checkpoint_and_finds_a_run_at_its_mirror(stopped: Path, tmp_path: Path) -> None:
    (stopped / "checkpoints" / "round_000002" / "model.safetensors").write_bytes(b"damaged")
    done = export(tmp_path / "home", "--run", "mine", "--to", tmp_path / "older")
    assert done.stdout.splitlines()[0] == "after round 2 of 5, 3 are committed"
    away = export(tmp_path / "new", "--run", f"file://{tmp_path}/mirror/mine")
    assert (away.returncode, away.stdout.splitlines()[-1]) == (0, f"model: {tmp_path}/new/mine/model")
    older, newer = saved(tmp_path / "older"), saved(tmp_path / "new" / "mine" / "model")
    assert all(np.allclose(newer[name], array + 1) for name, array in older.items())


def test_export_of_an_earlier_round_saves_its_weights_and_one_without_a_snapshot_is_refused(
    stopped: Path, tmp_path: Path
) -> None:
    elsewhere = export(tmp_path / "elsewhere", "--run", "mine", "--round", "2")
    assert elsewhere.returncode == 5 and f"no run 'mine' in {tmp_path}/elsewhere" in elsewhere.stderr
    place = ("--dir", tmp_path / "home")
    done = export(tmp_path / "elsewhere", "--run", "mine", *place, "--round", "2", "--to", tmp_path / "second")
    assert done.stdout.splitlines()[0] == "after round 2 of 5, 3 are committed"
    snapshot = load_file(stopped / "checkpoints" / "round_000001" / "model.safetensors")
    assert all(np.array_equal(array, snapshot[name]) for name, array in saved(tmp_path / "second").items())
    gone = export(tmp_path / "home", "--run", stopped / ".." / "mine", "--round", "1")
    assert gone.returncode == 5 and gone.stderr.strip() == (
        f"error[STORE006]: there is no checkpoint of round 1, in {stopped} — allowed rounds 2-3, which have one. "
        "Fix: newest good checkpoint: round 3; more are kept by a larger checkpoint.keep"
    )
    none = export(tmp_path / "home", "--run", "mine", "--round", "0")
    assert none.returncode == 2 and none.stderr.startswith(
        "error[CFG003]: --round is out of range — got 0, allowed 1 or"
    )


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.long(keep=1)
def test_finished_run_is_uploaded_by_the_hubs_client_and_kept_whatever_the_hub_does(
    stopped: Path, tmp_path: Path, broken: bool
) -> None:
    rounds = [{"kind": "round", "round": number, "loss": 2.0, "time_s": 1.0, "samples": 4} for number in range(3)]
    (stopped / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in rounds))
    words = ("--resume", "mine", "--rounds.update_rounds", "3", "--checkpoint.push", "owner/tiny")
    with jobs_in(tmp_path / "home") as jobs, hub_of() as hub:
        hub.broken = broken
        client = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        done = jobs(*words, env=client)
    assert (done.returncode, done.stdout) == (0, f"run: {stopped}\n"), done.stderr
    files = {path.name: path.read_bytes() for path in (stopped / "model").iterdir() if path.is_file()}
    assert "model.safetensors" in files and hub.repositories == {"owner/tiny": {} if broken else files}
    last = done.stderr.splitlines()[-1]
    assert last.startswith("note: the model isn't uploaded to owner/tiny: Server error") == broken, last
    assert (last == "note: the model is uploaded to owner/tiny") is not broken
    kept = [path.read_bytes() for path in stopped.rglob("*") if path.is_file()]
    assert TOKEN not in done.stderr and not any(TOKEN.encode() in content for content in kept)


def test_export_of_a_run_without_a_commit_says_so(tmp_path: Path, corpus: Path) -> None:
    job = Job.model_validate({"run": {"name": "early"}, "model": {"config": MODEL}, "dataset": {"path": str(corpus)}})
    RunDirectory.create(tmp_path, "early", resolved_toml(job))
    done = export(tmp_path, "--run", "early")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 5 and line.startswith("error[CKPT006]: run early has no checkpoint yet")
