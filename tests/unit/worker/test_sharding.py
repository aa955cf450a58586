"""Workers whose model is sharded over processes: what one process computes, and what goes wrong in one of them."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypha_ray.config import Job
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.model.build import random_model, skeleton, task_of
from hypha_ray.model.layout import layout_of, views
from hypha_ray.model.tasks import find_task
from hypha_ray.optim import torch_extras
from hypha_ray.types import Samples
from hypha_ray.worker.group.shards import check_sharding_on_copy
from hypha_ray.worker.incarnation import ProcessLostError
from hypha_ray.worker.supervised import SupervisedTrainer
from tests.support.followers import Forks, sharded
from tests.support.truth_cases import Case
from tests.support.truth_samples import BART, BERT, JAMBA, LLAMA, T5, VIT, classes, images, pairs, text

CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MASKED = Case("masked-lm", "bert", BERT | CALM | {"mask_token_id": 4}, text())
CASES: dict[str, Case] = {
    "causal": Case("causal-lm", "llama", LLAMA | {"tie_word_embeddings": True}, text()),
    "masked": MASKED,
    "classes": Case("sequence-classification", "bert", BERT | CALM | {"num_labels": 3}, text(labels=classes())),
}
ADAMW = {"inner_optimizer": {"clip_norm": 0.5, "learning_rate": 1e-2}, "rounds": {"accumulation": 2}}
SGD = {"inner_optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}}


def job_for(case: Case, processes: int, **tables: Any) -> Job:
    model = {"type": case.task, "config": {"model_type": case.model_type, **case.config}}
    worker = {"device": "cpu", **({"processes": processes, "sharding": "full"} if processes > 1 else {})}
    tables = {"sync": {"fragments": 2}, **tables}
    return Job.model_validate({"model": model, "worker": worker | tables.pop("worker", {}), **tables})


def samples_of(case: Case, size: int, epoch: int = 0) -> Samples:
    arrays = {name: array[:size] for name, array in case.arrays.items()}
    return Samples(arrays, np.stack([np.full(size, epoch), np.full(size, 3), np.arange(size)], axis=1))


def weights(trainer: SupervisedTrainer, gradients: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    layout = layout_of(trainer.model, 2)
    return views(layout, [trainer.gather(layout, fragment, gradients=gradients) for fragment in range(2)])


def require_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, expected in one.items():
        assert other[name].shape == expected.shape and other[name].dtype == expected.dtype, name
        np.testing.assert_allclose(other[name], expected, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("kind", CASES)
def test_sharded_worker_steps_evaluates_and_keeps_state_as_one_process(kind: str, processes: int) -> None:
    """A batch of one sample leaves all but one process without any."""
    case, tables = CASES[kind], ADAMW
    one = SupervisedTrainer(job_for(case, 1, **tables))
    batches = [samples_of(case, size, epoch) for epoch, size in enumerate((6, 3, 1, 5))]
    with sharded(job_for(case, processes, **tables)) as many:
        assert layout_of(many.model, 2) == layout_of(one.model, 2)
        for batch in batches:
            expected, found = one.step(batch), many.step(batch)
            assert (found.scored, found.tokens) == (expected.scored, expected.tokens) and expected.scored
            assert float(found.loss) == pytest.approx(float(expected.loss), abs=1e-5)
            assert float(found.norm) == pytest.approx(float(expected.norm), abs=1e-5)
        require_close(weights(one), weights(many))
        require_close(one.optimizer_state(), many.optimizer_state())
        figures = one.evaluate(batches)
        assert many.evaluate(batches) == {
            name: (pytest.approx(total, abs=1e-4), weight) for name, (total, weight) in figures.items()
        }
        held = sum(piece.numel() for piece in many.shards.pieces) if many.shards else 0
        assert held < 1.1 * one.parameters / processes + 200


@pytest.mark.slow
def test_muon_orthogonalizes_the_same_matrices_in_all_processes() -> None:
    """Tolerances are of steps, since small singular values of a gradient become as large as any."""
    case, muon = CASES["causal"], {"name": "muon", "learning_rate": 1e-3, "muon_learning_rate": 1e-3}
    one = SupervisedTrainer(job_for(case, 1, inner_optimizer=muon))
    with sharded(job_for(case, 3, inner_optimizer=muon)) as many:
        for epoch, size in enumerate((6, 4)):
            one.step(samples_of(case, size, epoch))
            many.step(samples_of(case, size, epoch))
        require_close(weights(one), weights(many))
        state = one.optimizer_state()
        require_close(state, many.optimizer_state())
        assert any(key.endswith("momentum_buffer") for key in state)
        many.load_optimizer_state(state)
        require_close(state, many.optimizer_state())


@pytest.mark.slow
def test_successor_goes_on_from_weights_and_state_of_whole_tensors() -> None:
    """Three processes divide none of the model's dimensions."""
    case = CASES["classes"]
    one, heir = (SupervisedTrainer(job_for(case, 1, **SGD)) for _ in range(2))
    one.step(samples_of(case, 6))
    layout, state = layout_of(one.model, 2), one.optimizer_state()
    with sharded(job_for(case, 3, **SGD)) as many:
        for trainer in (heir, many):
            for fragment in range(2):
                trainer.scatter(layout, fragment, one.gather(layout, fragment), mixing=0.25)
            trainer.load_optimizer_state(state)
            trainer.step(samples_of(case, 4, epoch=1))
        require_close(weights(heir), weights(many))
        require_close(heir.optimizer_state(), many.optimizer_state())
        many.optimizer.reset()
        assert many.optimizer_state() == {}
        with pytest.raises(CheckpointError, match="OPT005"):
            many.load_optimizer_state({key: array[:-1] for key, array in state.items() if array.ndim})


@pytest.mark.slow
def test_summed_gradients_of_batches_are_gathered() -> None:
    case = CASES["causal"]
    one = SupervisedTrainer(job_for(case, 1))
    with sharded(job_for(case, 2)) as many:
        for trainer in (one, many):
            trainer.optimizer.zero_grad()
            for epoch, size in enumerate((5, 2)):
                trainer.backward(samples_of(case, size, epoch), summed=True)
        require_close(weights(one, gradients=True), weights(many, gradients=True))


@pytest.mark.slow
def test_sample_without_a_finite_gradient_is_left_out_by_all_processes() -> None:
    case = Case("image-classification", "vit", VIT | CALM | {"num_labels": 3}, images(labels=classes()))
    batch = samples_of(case, 6)
    batch.arrays["images"] = batch.arrays["images"].copy()
    batch.arrays["images"][4] = np.nan
    tables: dict[str, Any] = {"dataset": {"allow_quarantine": True}}
    one = SupervisedTrainer(job_for(case, 1, **tables))
    with sharded(job_for(case, 2, **tables)) as two:
        expected, found = one.step(batch), two.step(batch)
        assert found.bad.tolist() == expected.bad.tolist() == [[0, 3, 4]] and found.scored == 5
        require_close(weights(one), weights(two))


@pytest.mark.slow
@pytest.mark.parametrize("idle", [slice(0, 2), slice(2, 4)], ids=["first", "second"])
def test_evaluation_counts_nothing_of_a_process_without_scored_samples(idle: slice) -> None:
    case = CASES["classes"]
    batch = samples_of(case, 4)
    batch.arrays["labels"] = batch.arrays["labels"].copy()
    batch.arrays["labels"][idle] = -100
    expected = SupervisedTrainer(job_for(case, 1)).evaluate([batch])
    with sharded(job_for(case, 2)) as two:
        found = two.evaluate([batch])
    assert expected["val_loss"][1] == 2
    assert found == {name: (pytest.approx(total, abs=1e-4), weight) for name, (total, weight) in expected.items()}


@pytest.mark.slow
def test_batch_with_nothing_to_score_changes_nothing() -> None:
    case = CASES["classes"]
    batch = samples_of(case, 4)
    batch.arrays["labels"] = np.full_like(batch.arrays["labels"], -100)
    with sharded(job_for(case, 2)) as two:
        before = weights(two)
        assert two.step(batch).scored == 0
        assert two.evaluate([batch])["val_loss"] == (0.0, 0.0)
        require_close(before, weights(two))


@pytest.mark.slow
def test_error_of_another_process_is_told_rather_than_the_broken_connection(tmp_path: Path) -> None:
    case = CASES["causal"]
    testing = {"failpoints": ["worker.process:0=error@2"], "failpoint_log": str(tmp_path / "hits")}
    with sharded(job_for(case, 2, testing=testing)) as two:
        two.step(samples_of(case, 4))
        with pytest.raises(RuntimeError, match="a failpoint"):
            two.step(samples_of(case, 4))


@pytest.mark.slow
@pytest.mark.long
def test_killed_process_is_noticed_at_once_and_a_silent_one_at_the_deadline() -> None:
    case = CASES["causal"]
    for how, worker in ((signal.SIGKILL, {}), (signal.SIGSTOP, {"stall_s": 1.0})):
        with sharded(job_for(case, 3, worker=worker)) as three:
            three.step(samples_of(case, 4))
            assert isinstance(three._team, Forks)
            three._team.reply_s = 1.0  # The silent one may owe the reply to the step before.
            os.kill(three._team.children[1].pid or 0, how)
            with pytest.raises(ProcessLostError):
                three.step(samples_of(case, 4))


TRIED: dict[str, tuple[Case, str | None]] = {
    "one tensor of all experts": (Case("causal-lm", "jamba", JAMBA, text()), None),
    "experts": (Case("seq2seq-lm", "switch_transformers", T5 | {"num_experts": 2}, pairs()), "experts"),
    "layerdrop": (Case("seq2seq-lm", "bart", BART | {"encoder_layerdrop": 0.1}, pairs()), "encoder_layerdrop"),
}


@pytest.mark.parametrize("kind", [*CASES, *TRIED])
def test_models_are_tried_before_the_start_and_refused_where_processes_could_differ(kind: str) -> None:
    case, why = TRIED.get(kind) or (CASES[kind], None)
    job = job_for(case, 2)
    network, samples = skeleton(job.model), samples_of(case, 6)
    build = partial(random_model, job.model, find_task(case.task))
    task = task_of(job.model, network)

    def check() -> bool:
        return check_sharding_on_copy(job.worker, task, samples, network.config, build, 10**5)

    if why is None:
        assert check()
    else:
        with pytest.raises(ConfigError, match=f"MODEL023.*{why}"):
            check()


FP16 = {"worker": {"autocast": "fp16"}}


@pytest.mark.slow
def test_losses_of_shards_are_scaled_as_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale overflows at first. Rounding to 16 bits depends on the batch, so gradients are near each other."""
    monkeypatch.setattr(torch_extras, "INITIAL", 2.0**26)
    case, tables = CASES["causal"], SGD | FP16 | {"rounds": {"accumulation": 2}}
    one = SupervisedTrainer(job_for(case, 1, **tables))
    scales = []
    with sharded(job_for(case, 2, **tables)) as two:
        assert one.loss_scale is not None and two.loss_scale is not None
        for epoch in range(8):
            batch = samples_of(case, 6, epoch)
            expected, found = one.step(batch), two.step(batch)
            assert found.scored == expected.scored
            if found.scored:
                assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-3)
                assert float(found.norm) == pytest.approx(float(expected.norm), rel=2e-2)
            scales.append(float(two.loss_scale.scale))
            assert scales[-1] == float(one.loss_scale.scale)
        for trainer in (one, two):
            assert trainer.loss_scale is not None
            trainer.loss_scale.scale.fill_(1024.0)
            trainer.optimizer.zero_grad()
            for epoch in range(2):
                trainer.backward(samples_of(case, 5, epoch), summed=True)
        found_gradients = weights(two, gradients=True)
        for name, gradient in weights(one, gradients=True).items():
            tolerance = 2e-2 * float(np.abs(gradient).max()) + 1e-4
            np.testing.assert_allclose(found_gradients[name], gradient, rtol=0, atol=tolerance, err_msg=name)
    assert scales[0] < 2.0**26 and scales[-1] == scales[-2] > 1


@pytest.mark.slow
def test_damaged_sample_of_scaled_losses_is_left_out_by_all_processes() -> None:
    case = Case("image-classification", "vit", VIT | CALM | {"num_labels": 3}, images(labels=classes()))
    batch = samples_of(case, 6)
    batch.arrays["images"] = batch.arrays["images"].copy()
    batch.arrays["images"][4] = np.nan
    tables: dict[str, Any] = {"dataset": {"allow_quarantine": True}, **FP16}
    with sharded(job_for(case, 2, **tables)) as two:
        found = two.step(batch)
        assert found.bad.tolist() == [[0, 3, 4]] and found.scored == 5
        assert two.loss_scale is not None and float(two.loss_scale.scale) > 1
        again = two.step(samples_of(case, 6, epoch=1))
        assert again.scored == 6 and not len(again.bad)
