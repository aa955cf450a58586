"""Training on preferences in one process: what is learned, adapters, parts of batches, references, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hypha_ray.config import Job
from hypha_ray.config.training import Preference
from hypha_ray.data.catalogue import load
from hypha_ray.data.encoders import load_tokenizer
from hypha_ray.driver.dataset_settings import preference_task
from hypha_ray.driver.evaluation import ModelSource
from hypha_ray.driver.preflight.memory import step_memory
from hypha_ray.errors import ConfigError
from hypha_ray.model.build import task_of
from hypha_ray.model.metrics import evaluate, metrics_of
from hypha_ray.model.preferences.losses import reference_model, with_preferences
from hypha_ray.model.saved_model import open_saved
from hypha_ray.types import Samples
from hypha_ray.types.events import means
from hypha_ray.worker.supervised import SupervisedTrainer
from tests.support.preference_rows import TINY, digit_pairs
from tests.support.prepared import arrays_of, prepared, table
from tests.support.slow_device import use_slow_device, use_unreadable_device

BATCH = 16


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    prepared(digit_pairs(folder / "rows.jsonl"), folder / "out", kind="preferences", tokenizer="characters")
    return folder / "out"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, pairs: Path) -> Path:
    """A saved model with the dataset's tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # Answers differ in their probabilities.
    model.save_pretrained(folder)
    load_tokenizer(str(pairs / "tokenizer")).save_pretrained(folder)
    return folder


def samples_of(out: Path, split: str) -> Samples:
    arrays = arrays_of(out, split)
    keys = np.zeros((len(arrays["input_ids"]), 3), np.int64)
    keys[:, 2] = np.arange(len(keys))
    return Samples(arrays, keys)


def trainer_on(loss: str = "dpo", model: dict[str, Any] | None = None, **tables: Any) -> SupervisedTrainer:
    torch.set_num_threads(1)
    preference = {"loss": loss, **tables.pop("preference", {})}
    optimizer = {"learning_rate": 1e-3, "weight_decay": 0.0, **tables.pop("inner_optimizer", {})}
    job = {"model": model or {"config": TINY}, "preference": preference, "inner_optimizer": optimizer}
    return SupervisedTrainer(Job.model_validate(job | {"worker": {"device": "cpu"}} | tables))


def train(trainer: SupervisedTrainer, samples: Samples, steps: int) -> list[dict[str, float]]:
    figures = []
    for step in range(steps):
        start = step * BATCH % (len(samples) - BATCH)
        result = trainer.step(samples.part(slice(start, start + BATCH)))
        figures.append({"loss": float(result.loss)} | means(result.sums))
        assert result.scored == BATCH
    return figures


def figures_on(trainer: SupervisedTrainer, samples: Samples) -> dict[str, float]:
    return means(trainer.evaluate([samples]))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_tiny_model_learns_to_prefer_what_was_chosen(pairs: Path, loss: str) -> None:
    trainer = trainer_on(loss)
    before = figures_on(trainer, samples_of(pairs, "validation"))
    figures = train(trainer, samples_of(pairs, "train"), 80)
    after = figures_on(trainer, samples_of(pairs, "validation"))
    assert after["accuracy"] >= 0.95
    assert after["margin"] == pytest.approx(after["reward_chosen"] - after["reward_rejected"])
    assert after["margin"] > max(0.0, before["margin"])
    assert np.mean([step["train_accuracy"] for step in figures[-10:]]) >= 0.95
    if loss == "dpo":  # At first policy and reference are the same.
        assert figures[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
        assert before["reward_chosen"] == before["reward_rejected"] == 0


@pytest.mark.slow
def test_judged_answers_are_learned(tmp_path: Path) -> None:
    rows = []
    for number, line in enumerate(digit_pairs(tmp_path / "rows.jsonl").read_text().splitlines()):
        row = json.loads(line)
        good = number % 2 == 0
        rows.append({"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good})
    source = table(tmp_path / "judged.jsonl", *rows)
    prepared(source, tmp_path / "out", kind="preferences", tokenizer="characters", validation_fraction=0.1)
    trainer = trainer_on("kto")
    train(trainer, samples_of(tmp_path / "out", "train"), 120)
    after = figures_on(trainer, samples_of(tmp_path / "out", "validation"))
    assert after["accuracy"] >= 0.95
    assert after["reward_chosen"] > 0 > after["reward_rejected"]


@pytest.mark.slow
def test_adapter_learns_and_its_reference_is_the_base_model(pairs: Path, base: Path) -> None:
    lora = {"repository": str(base), "lora": {"rank": 16}}
    trainer = trainer_on(model=lora, inner_optimizer={"learning_rate": 5e-3})
    held_out = samples_of(pairs, "validation")
    first = train(trainer, samples_of(pairs, "train"), 200)[0]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    after = figures_on(trainer, held_out)
    assert after["accuracy"] >= 0.95
    frozen = trainer_on(model={"repository": str(base)})  # A copy of the same model, which is its own reference.
    merged = dict(trainer.model.named_parameters())
    assert all(not parameter.requires_grad for name, parameter in merged.items() if "lora_" not in name)
    assert any(parameter.requires_grad for parameter in merged.values())
    by_copy = figures_on_with_reference(trainer, frozen.model, held_out)
    assert by_copy["margin"] == pytest.approx(after["margin"], rel=1e-4)


def figures_on_with_reference(trainer: SupervisedTrainer, reference: Any, samples: Samples) -> dict[str, float]:
    plain = task_of(Job().model, trainer.model)
    task = with_preferences(plain, Preference(loss="dpo"), reference_model(reference.eval()))
    return means(evaluate(trainer.model, task, [samples], "cpu"))


def gradient_of(trainer: SupervisedTrainer) -> torch.Tensor:
    gradients = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("parts", [1, 4])
def test_gradients_and_figures_of_two_workers_are_those_of_one(pairs: Path, parts: int) -> None:
    samples = samples_of(pairs, "train").part(slice(0, 32))
    start = trainer_on()
    train(start, samples_of(pairs, "train"), 20)
    weights = start.model.state_dict()
    sums = []
    gradients = []
    for rows in (slice(0, 32), slice(0, 12), slice(12, 32)):
        trainer = trainer_on(rounds={"accumulation": parts}, sync={"strategy": "sync"})
        trainer.model.load_state_dict(weights)
        trainer.optimizer.zero_grad()
        result = trainer.backward(samples.part(rows), summed=True)
        sums.append(result.sums)
        gradients.append(gradient_of(trainer))
    torch.testing.assert_close(gradients[1] + gradients[2], gradients[0], rtol=1e-4, atol=1e-5)
    whole, first, second = sums
    for name, (total, weight) in whole.items():
        assert first[name][0] + second[name][0] == pytest.approx(total, rel=1e-5)
        assert first[name][1] + second[name][1] == weight == 32


@pytest.mark.slow
def test_stored_log_probabilities_train_as_the_frozen_copy_does(pairs: Path, base: Path, tmp_path: Path) -> None:
    source = digit_pairs(tmp_path / "rows.jsonl")
    options = {"kind": "preferences", "tokenizer": "characters", "reference": str(base)}
    manifest = prepared(source, tmp_path / "out", **options)
    assert manifest.made_by is not None and manifest.made_by.options["reference"] == str(base)
    model = {"repository": str(base)}
    by_copy = trainer_on(model=model)
    stored = trainer_on(model=model, preference={"reference": "dataset"})
    expected = train(by_copy, samples_of(pairs, "train"), 8)
    figures = train(stored, samples_of(tmp_path / "out", "train"), 8)
    for ours, theirs in zip(figures, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    batch = samples_of(pairs, "train").part(slice(0, 2))
    job = Job.model_validate({"model": {"config": TINY}, "preference": {"loss": "dpo"}})
    sizes = []
    for reference in ("initial", "dataset"):
        changed = job.model_copy(update={"preference": job.preference.model_copy(update={"reference": reference})})
        task = with_preferences(task_of(job.model, by_copy.model), job.preference)
        size = step_memory(changed, task, batch)
        assert size is not None
        sizes.append(size.weights)
    copied = sum(parameter.nbytes for parameter in by_copy.model.parameters())
    assert sizes[0] - sizes[1] == pytest.approx(copied, rel=0.01)


def test_saved_model_is_evaluated_by_the_settings_of_its_run(pairs: Path, base: Path, tmp_path: Path) -> None:
    trainer = trainer_on("ipo", model={"repository": str(base)}, preference={"beta": 0.3})
    train(trainer, samples_of(pairs, "train"), 20)
    held_out = samples_of(pairs, "validation")
    expected = figures_on(trainer, held_out)
    trainer.model.save_pretrained(tmp_path / "model")
    text = f'[model]\nrepository = "{base}"\n[preference]\nloss = "ipo"\nbeta = 0.3\n'
    (tmp_path / "config.toml").write_text(text)
    (tmp_path / "events.jsonl").touch()
    network, task = open_saved(tmp_path / "model")
    manifest = load(pairs)
    job = ModelSource(tmp_path / "model").job()
    for reference, name in ((None, "initial"), (str(base), str(base))):
        scored_by, shown = preference_task(task, job, manifest, reference, torch.device("cpu"))
        assert shown == f"ipo, reference {name}"
        figures = metrics_of(scored_by, evaluate(network, scored_by, [held_out], "cpu"))
        assert {key: figures[key] for key in expected} == pytest.approx(expected, rel=1e-4)
    trainer.model.save_pretrained(tmp_path / "elsewhere" / "model")
    elsewhere = ModelSource(tmp_path / "elsewhere" / "model").job()
    with pytest.raises(ConfigError, match=r"CFG012.*--reference is missing"):
        preference_task(task, elsewhere, manifest, None, torch.device("cpu"))
    without, shown = preference_task(task, job, manifest, "none", torch.device("cpu"))
    assert shown == "ipo, reference none"
    figures = metrics_of(without, evaluate(network, without, [held_out], "cpu"))
    assert figures["margin"] != pytest.approx(expected["margin"], rel=1e-3)


def test_dropout_is_disabled_but_that_of_adapters() -> None:
    config = {"model_type": "gpt2", "vocab_size": 16, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    trainer = trainer_on(model={"config": config})
    rates = {module.p for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.0}


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_step_is_begun_without_a_look_at_the_device(loss: str, pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_unreadable_device(monkeypatch)
    trainer = trainer_on(loss)
    batch = samples_of(pairs, "train").part(slice(0, BATCH))
    batch.arrays["desirable"] = np.arange(BATCH, dtype=np.int32) % 2
    assert not trainer.begin_step(batch).ready


def test_figures_that_come_late_are_those_of_a_step_that_is_waited_for(
    pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = samples_of(pairs, "train").part(slice(0, BATCH))
    at_once = trainer_on("dpo").step(batch)
    use_slow_device(monkeypatch)
    late = trainer_on("dpo").begin_step(batch)
    assert not late.ready
    assert late.result().sums == at_once.sums and len(at_once.sums) == 3
    assert float(late.result().loss) == float(at_once.loss)
