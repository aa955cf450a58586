"""Processes of a worker, as threads: their gradients add up to that of the whole batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.types import Samples
from hypha_ray.worker.group.actor import GroupTrainer
from hypha_ray.worker.group.collectives import Collectives, find_store, open_store
from hypha_ray.worker.incarnation import ProcessLostError
from hypha_ray.worker.supervised import SupervisedTrainer
from tests.support.followers import Forks
from tests.support.truth_cases import ACCEPTED, Case

CPU = torch.device("cpu")
SGD = {
    "name": "sgd",
    "learning_rate": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "clip_norm": None,
    "schedule": "constant",
}
ALONE = ("instance-segmentation", "universal-segmentation")
"""Tasks whose loss isn't a mean over scores; they are refused."""
CASES = list({case.task: case for case in ACCEPTED if case.task not in ALONE}.values())
"""One model of each task."""


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Results of functions that wait for each other, or the errors that they raise."""
    found: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            found[number] = works[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def connected(size: int, deadline_s: float = 60.0) -> list[Collectives]:
    store, port = open_store()
    stores = [store, *(find_store(port, deadline_s) for _ in range(size - 1))]
    return at_once(
        *(lambda rank=rank, one=one: Collectives(one, rank, size, CPU, deadline_s) for rank, one in enumerate(stores))
    )


def model_of(case: Case) -> dict[str, Any]:
    return {"type": case.task, "config": {"model_type": case.model_type, **case.config}}


def trainer_for(case: Case) -> SupervisedTrainer:
    job = {"model": model_of(case), "inner_optimizer": SGD}
    trainer = SupervisedTrainer(Job.model_validate(job))
    trainer.model.eval()  # Without dropout.
    return trainer


def samples_of(case: Case) -> Samples:
    size = len(next(iter(case.arrays.values())))
    return Samples(dict(case.arrays), np.stack([np.zeros(size, np.int64), np.full(size, 3), np.arange(size)], axis=1))


def require_equal_gradients(one: torch.nn.Module, other: torch.nn.Module) -> None:
    scale = float(torch.nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None]))
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=1e-6 * max(1.0, scale), rtol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.long(keep=10)
def test_gradients_of_parts_add_up_to_that_of_the_batch(case: Case) -> None:
    whole, batch = trainer_for(case), samples_of(case)
    expected = whole.add_gradient(batch, summed=False)
    parts = [batch.part(slice(*ends)) for ends in ((0, 1), (1, 5), (5, 5), (5, len(batch)))]
    trainers = [trainer_for(case) for _ in parts]
    for trainer, collectives in zip(trainers, connected(len(parts)), strict=True):
        trainer.join(collectives)
    found = at_once(
        *(lambda one=one, part=part: one.add_gradient(part, False) for one, part in zip(trainers, parts, strict=True))
    )
    assert float(found[0].loss) == pytest.approx(float(expected.loss), rel=1e-5)
    assert [one.scored for one in found] == [expected.scored] * len(parts)
    assert case.count in (None, expected.scored)
    require_equal_gradients(whole.model, trainers[0].model)


def test_batch_with_nothing_to_score_has_no_gradient() -> None:
    case = next(case for case in ACCEPTED if case.task == "causal-lm" and "labels" in case.arrays)
    batch = samples_of(case)
    batch.arrays["labels"] = np.full_like(batch.arrays["labels"], -100)
    trainers = [trainer_for(case) for _ in range(2)]
    for trainer, collectives in zip(trainers, connected(2), strict=True):
        trainer.join(collectives)
    found = at_once(*(lambda one=one: one.add_gradient(batch, False) for one in trainers))
    assert [one.scored for one in found] == [0, 0]
    assert all(parameter.grad is None for parameter in trainers[0].model.parameters())


def test_parameters_are_summed_up_where_any_process_has_a_gradient() -> None:
    sizes = {"all": (3,), "one": (2, 5), "none": (4,), "large": (3000, 3000), "bare": ()}
    weights = [{name: torch.nn.Parameter(torch.ones(shape)) for name, shape in sizes.items()} for _ in range(3)]
    for rank, held in enumerate(weights):
        for name in ("all", "large", "bare") if rank != 1 else ("all", "one"):
            held[name].grad = torch.full(sizes[name], float(10**rank))
    weights[2]["all"].grad = torch.full((6,), 100.0)[::2]
    losses = [torch.tensor(float(rank)) for rank in range(3)]
    works = zip(connected(3), weights, losses, strict=True)
    at_once(*(lambda c=c, held=held, loss=loss: c.add_up([*held.values()], loss) for c, held, loss in works))
    expected = {"all": 111.0, "one": 10.0, "none": None, "large": 101.0, "bare": 101.0}
    for name, value in expected.items():
        found = weights[0][name].grad
        assert found is None if value is None else torch.equal(found, torch.full(sizes[name], value)), name
    assert float(losses[0]) == 3.0


def test_tensors_of_all_kinds_are_copied_from_the_first_process() -> None:
    def held(rank: int) -> list[torch.Tensor]:
        floats = torch.arange(12.0).reshape(3, 4) * (rank + 1)
        return [torch.tensor([rank == 0, True]), floats, floats.T.clone().T, torch.tensor(rank), floats.bfloat16()]

    tensors = [held(rank) for rank in range(3)]
    works = zip(connected(3), tensors, strict=True)
    at_once(*(lambda c=c, own=own: c.copy_out(own) for c, own in works))
    for own in tensors:
        assert all(torch.equal(one, other) for one, other in zip(own, held(0), strict=True))


def test_step_after_an_evaluation_of_other_weights_is_on_those_of_before() -> None:
    """A worker evaluates the global weights between two steps of its own."""
    tables = {"worker": {"device": "cpu", "processes": 2}, "inner_optimizer": SGD}
    case, job = CASES[0], Job.model_validate({"model": model_of(CASES[0]), **tables})
    one, two = SupervisedTrainer(job), GroupTrainer(job, None, Forks(job, None))
    batch, figures = samples_of(case), []
    try:
        for trainer in (one, two):
            trainer.model.eval()
            trainer.step(batch)
            held = [parameter.detach().clone() for parameter in trainer.model.parameters()]
            _overwrite(trainer, [1.5 * weights for weights in held])
            figures.append(trainer.evaluate([batch]))
            _overwrite(trainer, held)
            trainer.step(batch)
    finally:
        two.close()
    assert figures[1]["val_loss"] == pytest.approx(figures[0]["val_loss"], rel=1e-5)
    for expected, found in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def _overwrite(trainer: SupervisedTrainer, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(trainer.model.parameters(), values, strict=True):
        parameter.copy_(value)


def test_process_that_ends_is_noticed_at_once_and_a_silent_one_at_the_deadline() -> None:
    first, second, third = connected(3)

    def end_with_an_error(one: Collectives) -> None:
        try:
            one.total(1)
        finally:
            one.close()

    began = time.monotonic()
    found = at_once(lambda: end_with_an_error(first), third.close, lambda: end_with_an_error(second))
    assert [type(error) for error in found] == [ProcessLostError, type(None), ProcessLostError]
    assert time.monotonic() - began < 30
    first, second, third = connected(3, deadline_s=0.5)
    found = at_once(lambda: first.total(1), lambda: second.total(1))
    assert [type(error) for error in found] == [ProcessLostError] * 2
    assert any("Timed out" in str(error) for error in found)  # The other may see the first one's connection closed.
    third.close()
