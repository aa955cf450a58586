"""Losses, steps and evaluations of many families, held against what plain transformers and torch give."""

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from hypha_ray.config import Job
from hypha_ray.config.schema import Model
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.slices import describe, write_slice
from hypha_ray.driver.data_source import in_folder
from hypha_ray.driver.preflight.checks import case_of, check_case
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.build import build_model, skeleton, task_of
from hypha_ray.model.layout import gather, layout_of, views
from hypha_ray.model.loss_check import check_loss_on_copy
from hypha_ray.model.metrics import batches_of, evaluate, tensors_of
from hypha_ray.model.saved_model import export, open_saved
from hypha_ray.model.tasks import TASKS, UNTRAINABLE
from hypha_ray.types import Samples, added
from hypha_ray.worker.supervised import SupervisedTrainer
from tests.support.truth_cases import ACCEPTED, REFUSED, Case

RATE = 0.1


def settings(case: Case) -> dict[str, Any]:
    return {"type": case.task, "config": {"model_type": case.model_type, **case.config}}


def trainer_for(case: Case, accumulation: int = 1) -> SupervisedTrainer:
    optimizer = {"name": "sgd", "learning_rate": RATE, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}
    job = {"model": settings(case), "inner_optimizer": optimizer | {"schedule": "constant"}}
    return SupervisedTrainer(Job.model_validate(job | {"rounds": {"accumulation": accumulation}}))


def samples_of(case: Case) -> Samples:
    size = len(next(iter(case.arrays.values())))
    return Samples(dict(case.arrays), np.stack([np.zeros(size, np.int64), np.full(size, 3), np.arange(size)], axis=1))


def fed(case: Case, trainer: SupervisedTrainer, seed: int = 0) -> dict[str, torch.Tensor]:
    """Keyword arguments as anyone would make them of the samples, but for hidden tokens, which are ours."""
    if case.task == "masked-lm" and "labels" not in case.arrays:
        task = task_of(Model(**settings(case)), trainer.model)
        return task.inputs(tensors_of(samples_of(case)), samples_of(case).keys, seed)
    return case.by_keyword()


def plain_loss(case: Case, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    if not case.by_hand:
        return model(**inputs).loss.mean() / (len(inputs["labels"]) if summed(case) else 1)
    unlabelled = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    logits = model(**unlabelled, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def summed(case: Case) -> bool:
    """Tell whether the loss of the model itself is a sum over samples."""
    return case.config.get("ctc_loss_reduction") == "sum"


def plain_mixture(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Loss without the routers' part."""
    return model(**inputs, output_router_logits=False).loss


@pytest.mark.slow
@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_loss_and_step_of_a_batch_are_plain_ones(case: Case) -> None:
    trainer = trainer_for(case)
    plain, inputs = copy.deepcopy(trainer.model), fed(case, trainer)
    routed = bool(case.config.get("output_router_logits"))
    torch.manual_seed(3)
    expected = plain_loss(case, plain, inputs)
    (expected * len(inputs["labels"]) if summed(case) else expected).backward()
    torch.optim.SGD(plain.parameters(), RATE).step()
    torch.manual_seed(3)
    result = trainer.step(samples_of(case))
    reported = plain_mixture(copy.deepcopy(trainer_for(case).model), inputs) if routed else expected
    assert float(result.loss) == pytest.approx(float(reported.detach()), abs=1e-6, rel=1e-6)
    assert case.count in (None, result.scored)
    for (name, one), other in zip(trainer.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_saved_model_is_evaluated_like_the_run_however_samples_are_shared_out(case: Case, tmp_path: Path) -> None:
    trainer, samples = trainer_for(case), samples_of(case)
    trainer.step(samples)
    shares = [[samples.part(slice(4, 6))], [samples.part(slice(0, 3)), samples.part(slice(3, 4))]]
    parts = [trainer.evaluate(share) for share in shares]
    loss, count = added(parts)["val_loss"]
    layout = layout_of(trainer.model)
    export(
        Job(model=Model(**settings(case))), None, views(layout, [gather(trainer.model, layout, 0)]), tmp_path / "model"
    )
    network, task = open_saved(tmp_path / "model")
    again = evaluate(network, task, batches_of([case.arrays], 4, [3]), "cpu")
    assert again["val_loss"][1] == count > 0
    assert again["val_loss"][0] / count == pytest.approx(loss / count, rel=1e-5)
    trainer.model.eval()
    with torch.no_grad():
        inputs = fed(case, trainer)
        routed = bool(case.config.get("output_router_logits"))
        plain = plain_mixture(trainer.model, inputs) if routed else plain_loss(case, trainer.model, inputs)
    assert loss / count == pytest.approx(float(plain), rel=2e-5)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_model_without_the_loss_of_its_task_is_refused(case: Case) -> None:
    """As before a job is started: on a copy with weights of its own, of a skeleton."""
    model = Model(**settings(case))
    network = skeleton(model)
    auto = getattr(transformers, TASKS[case.task].auto_class)
    with pytest.raises(ConfigError, match=r"MODEL01[2567]"):
        check_loss_on_copy(task_of(model, network), samples_of(case), network.config, auto.from_config, parameters=1000)


@pytest.mark.slow
@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_job_with_the_loss_of_its_task_may_start(case: Case, tmp_path: Path) -> None:
    slices = (write_slice(tmp_path, 0, "train", dict(case.arrays)),)
    manifest = Manifest(name="small", modality="other", slices=slices, tensors=describe(case.arrays, "slice")[1])
    job = Job.model_validate({"model": settings(case), "resources": {"num_workers": 1}})
    assert [note for note in check_case(case_of(job, in_folder(tmp_path, manifest))) if "is left out" not in note] == []


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_task_that_nothing_here_can_train_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    job = Job.model_validate({"model": {"type": name, "config": {"model_type": "bert"}}})
    with pytest.raises(ConfigError, match=rf"^error\[MODEL012\]: {name} models .* bridge.commands$") as refusal:
        check_case(case_of(job, in_folder(tmp_path, Manifest(name="small", modality="other", slices=(), tensors=()))))
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_no_class_of_an_untrainable_task_has_a_loss_for_tensors_of_one_shape(name: str) -> None:
    contrasting = name in ("depth-estimation", "zero-shot-image-classification")  # Both are among the cases above.
    for classes in getattr(transformers, TASKS[name].auto_class)._model_mapping.values():
        for one in classes if isinstance(classes, list | tuple) else [classes]:
            has_loss = re.search(r"loss = (?!None)|loss, loss_dict.* = self", inspect.getsource(one.forward))
            of_objects = re.search(r"labels \(`list\[dict", inspect.getdoc(one.forward) or "", re.IGNORECASE)
            assert not has_loss or of_objects or contrasting, one.__name__


def test_every_entry_of_the_table_is_accepted_or_refused_here() -> None:
    accepted, refused = {case.task for case in ACCEPTED}, {case.task for case in REFUSED}
    assert {task.name for task in TASKS.values()} == accepted | refused | UNTRAINABLE.keys()
    assert not UNTRAINABLE.keys() & accepted
    assert len({(case.task, case.model_type) for case in ACCEPTED}) >= 30


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_of_a_ctc_model_change_no_loss_and_no_step(reduction: str) -> None:
    micro_batches_change_nothing(ctc(reduction))


def test_loss_that_is_a_sum_excludes_synchronous_training(tmp_path: Path) -> None:
    case = ctc("sum")
    slices = (write_slice(tmp_path, 0, "train", dict(case.arrays)),)
    manifest = Manifest(name="small", modality="other", slices=slices, tensors=describe(case.arrays, "slice")[1])
    job = {"model": settings(case), "resources": {"num_workers": 2}}
    with pytest.raises(ConfigError, match=r"CFG011.*ctc_loss_reduction"):
        check_case(case_of(Job.model_validate(job | {"sync": {"strategy": "sync"}}), in_folder(tmp_path, manifest)))


def ctc(reduction: str) -> Case:
    return next(case for case in ACCEPTED if case.config.get("ctc_loss_reduction") == reduction)


def test_micro_batches_change_no_loss_and_no_step() -> None:
    micro_batches_change_nothing(next(case for case in ACCEPTED if case.count is not None and "labels" in case.arrays))


def micro_batches_change_nothing(case: Case) -> None:
    whole, parts = trainer_for(case), trainer_for(case, accumulation=3)
    for trainer in (whole, parts):
        trainer.model.eval()
    one, other = whole.step(samples_of(case)), parts.step(samples_of(case))
    assert float(one.loss) == pytest.approx(float(other.loss), rel=1e-6)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_tensor_that_the_task_needs_and_slices_lack_is_named() -> None:
    case = next(case for case in ACCEPTED if case.task == "token-classification")
    lacking = Samples({"input_ids": case.arrays["input_ids"]}, samples_of(case).keys)
    task = task_of(Model(**settings(case)), build_model(Model(**settings(case)), 0))
    with pytest.raises(DataError, match=r"DATA050.*'labels'"):
        task.inputs(tensors_of(lacking))
