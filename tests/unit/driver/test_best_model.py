"""The end of a run that keeps its best model, or ends early."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import load_file

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.driver.data_source import in_folder
from hypha_ray.driver.earlier_runs import is_done, standing
from hypha_ray.driver.launch import finish
from hypha_ray.driver.saved_models import card
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.scheduler.messages import Persist
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.directory import RunDirectory
from hypha_ray.store.snapshots import rounds
from hypha_ray.types import Contribution, Flat, Span, Verdict

MODEL = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 32, "vocab_size": 384}
LOSSES = (5.0, 3.0, 3.5, 4.0)


@pytest.fixture
def run(tmp_path: Path, corpus: Path) -> tuple[Job, RunDirectory]:
    """A run of four rounds, each of which adds one to all weights; the second is the best."""
    rounds_ = {"update_rounds": len(LOSSES)}
    tables = {"model": {"config": MODEL}, "dataset": {"path": str(corpus)}, "checkpoint": {"best": True, "keep": 1}}
    job = Job.model_validate({"run": {"name": "mine"}, "rounds": rounds_, **tables})
    directory = RunDirectory.create(tmp_path, "mine", resolved_toml(job))
    network = build_model(job.model, 0)
    layout = layout_of(network)
    theta: Flat = gather(network, layout, 0)
    writer = CommitWriter(directory.path, job.checkpoint, len(LOSSES))
    writer.begin(layout, theta)
    for number, loss in enumerate(LOSSES):
        theta = {group: array + np.float32(1) for group, array in theta.items()}
        spans = ((0, (Span(0, 0, 4 * number, 4 * number + 4),)),)
        verdict = Verdict(number, (Contribution(0, 1, 4, 1.0),), (), 1.0)
        writer.commit(Persist(number, verdict, spans, {0: 4 * number + 4}, 0, {}), layout, (), theta, theta)
        with (directory.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            record = {"round": number, "loss": loss, "time_s": 1.0, "samples": 4, "samples_total": 4 * number + 4}
            file.write(json.dumps({"kind": "round", **record}) + "\n")
            file.write(json.dumps({"kind": "eval", "round": number, "val_loss": loss}) + "\n")
    return job, directory


@pytest.mark.slow
def test_saved_model_has_a_card_that_tells_what_it_is_and_nothing_of_the_machine(
    run: tuple[Job, RunDirectory], corpus: Path
) -> None:
    job, directory = run
    source = in_folder(corpus)
    finish(job, directory, source)
    text = (directory.path / "model" / "README.md").read_text()
    described = ModelCard(text).data
    assert described.library_name == "transformers"
    assert described.pipeline_tag == "text-generation"
    assert described.license == "unknown" and described.base_model is None
    assert {"hypha_ray", "diloco"} <= set(described.tags or ())
    assert source.manifest.name in text and source.manifest.identity in text
    assert "| val_loss | 4 |" in text and "| rounds | 4 of 4 |" in text
    assert "| val_loss | 3 |" in (directory.path / "model-best" / "README.md").read_text()
    assert str(directory.path) not in text and str(corpus) not in text


def test_card_of_an_adapter_names_the_base_of_a_hub(corpus: Path) -> None:
    job = Job.model_validate({"model": {"lora": {"rank": 4}}})
    text = card(job, in_folder(corpus).manifest, 2, {"loss": 1.5}, "owner/base", has_adapter=True)
    described = ModelCard(text).data
    assert described.library_name == "peft"
    assert described.base_model == "owner/base"
    assert "lora" in (described.tags or ()) and "LoRA of rank 4" in text and "| loss | 1.5 |" in text


@pytest.mark.slow
def test_best_model_is_saved_beside_the_last_and_named(
    run: tuple[Job, RunDirectory], corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, directory = run
    assert rounds(directory.path) == [1, 3]
    finish(job, directory, in_folder(corpus))
    last, best = (load_file(directory.path / name / "model.safetensors") for name in ("model", "model-best"))
    assert best and all(np.allclose(last[name], array + 2) for name, array in best.items())
    assert "note: model-best is the model after round 2, with val_loss 3\n" in capsys.readouterr().err


@pytest.mark.slow
def test_best_model_without_its_checkpoint_is_not_replaced_by_another(
    run: tuple[Job, RunDirectory], corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, directory = run
    (directory.path / "checkpoints" / "round_000001").rename(directory.path / "gone")
    finish(job, directory, in_folder(corpus))
    assert not (directory.path / "model-best").exists()
    assert (
        "note: the best model was that after round 2, with val_loss 3; its checkpoint isn't" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_run_that_ended_early_is_done_unless_it_has_more_patience(run: tuple[Job, RunDirectory], corpus: Path) -> None:
    job, directory = run
    longer = job.model_copy(update={"rounds": job.rounds.model_copy(update={"update_rounds": 9, "patience": 2})})
    assert not is_done(longer, directory), "it was killed before it ended"
    (directory.path / "summary.json").write_text(json.dumps({"ended_early": "no better val_loss"}))
    assert is_done(longer, directory)
    reason = "no better val_loss than 3 after round 2, in 2 more rounds"
    assert standing(longer, directory) == f"ended early: {reason}"
    patient = longer.model_copy(update={"rounds": longer.rounds.model_copy(update={"patience": 3})})
    assert not is_done(patient, directory) and standing(patient, directory) == "goes on after round 4 of 9"
    finish(longer, directory, in_folder(corpus))
    last = load_file(directory.path / "model" / "model.safetensors")
    newest = load_file(directory.path / "checkpoints" / "round_000003" / "model.safetensors")
    assert last and all(np.array_equal(last[name], array) for name, array in newest.items())


def test_run_whose_budget_is_spent_is_done_unless_it_has_a_higher_one(run: tuple[Job, RunDirectory]) -> None:
    job, directory = run
    goal = job.goal.model_copy(update={"at_most": 2.5})
    longer = job.model_copy(update={"rounds": job.rounds.model_copy(update={"update_rounds": 9}), "goal": goal})
    reason = "goal.at_most = 2.5 pays for no further round; 2.41 is spent"
    (directory.path / "summary.json").write_text(json.dumps({"ended_early": reason}))
    assert is_done(longer, directory)
    assert standing(longer, directory) == f"ended early: {reason}"
    richer = longer.model_copy(update={"goal": goal.model_copy(update={"at_most": 5.0})})
    assert not is_done(richer, directory)
