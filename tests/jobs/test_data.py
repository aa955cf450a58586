"""jobs/data.py as its users type it: a dataset is served, listed, trained on, checked and withdrawn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hypha_ray.data.catalogue import load
from tests.support.job_scripts import ALONE, Jobs
from tests.support.web import s3_of


def test_dataset_is_served_listed_trained_on_evaluated_and_withdrawn(
    run_job: Jobs, corpus: Path, small_job: Path, tmp_path: Path
) -> None:
    folder, listed = shutil.copytree(corpus, tmp_path / "texts"), tmp_path / "list.json"
    done = run_job("--serve", folder, script="data")
    assert done.returncode == 0 and done.stdout.startswith("data/texts/"), done.stderr
    training = ("@", small_job, "--dataset.name", "texts", "--run.name", "served")
    dry = run_job(*training, "--dry-run")
    assert dry.returncode == 0 and "resources: 2 of 2 workers fit" in dry.stdout, dry.stderr
    trained = run_job(*training)
    assert trained.returncode == 0, trained.stderr
    longer = run_job("--resume", "served", "--rounds.update_rounds", "5")
    assert longer.returncode == 0, longer.stderr
    model = run_job.home / "served" / "model"
    scored = [
        run_job("--model", model, "--dataset", dataset, script="evaluate").stdout.splitlines()[-1]
        for dataset in ("texts", folder)
    ]
    assert scored[0].startswith("val_loss ") and scored[0] == scored[1]
    assert run_job("--list", "--json", listed, script="data").returncode == 0
    (row,) = json.loads(listed.read_text())
    assert (row["dataset"], row["slices"], row["identity"]) == ("texts", 16, load(corpus).identity)
    assert row["readers"] in ([], ["served"])

    file = folder / load(corpus).slices[2].file
    file.write_bytes(file.read_bytes()[:-1])
    checked = run_job("--check", "texts", script="data")
    assert checked.returncode == 3 and "error[DATA043]" in checked.stderr and file.name in checked.stdout
    mistyped = run_job("--withdraw", "text", script="data")
    assert mistyped.returncode == 3 and "did you mean 'texts'?" in mistyped.stderr
    assert run_job("--withdraw", "texts", script="data").stdout.startswith("withdrawn: data/texts/")
    assert run_job("--list", script="data").stdout == "no dataset is served\n"
    gone = run_job(*training, "--run.name", "again")
    assert gone.returncode == 3 and "error[DATA001]" in gone.stderr


@pytest.mark.long
def test_dataset_in_s3_trains_goes_on_and_exports_with_its_tokenizer(
    run_job: Jobs, corpus: Path, small_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_of(monkeypatch) as s3:
        s3.put(str(corpus), "bucket/texts", recursive=True)
        words = ("@", small_job, "--dataset.path", "s3://bucket/texts", "--run.name", "cloud")
        assert run_job(*words, "--dry-run").returncode == 0
        trained = run_job(*words, env=ALONE)  # Its workers inherit what leads to the server.
        assert trained.returncode == 0, trained.stderr
        assert (run_job.home / "cloud" / "model" / "tokenizer_config.json").is_file()
        assert any((run_job.home / "cache").rglob(load(corpus).of("train")[0].sha256))
        missing = run_job(*words[:3], "s3://bucket/text", "--dry-run")
        assert missing.returncode == 3 and missing.stderr.count("error[DATA001]: there is no dataset at s3://") == 1
    done = run_job("--resume", "cloud", env=ALONE)
    assert done.returncode == 0, done.stderr
