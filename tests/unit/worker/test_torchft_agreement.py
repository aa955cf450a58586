"""Streaming DiLoCo, bit for bit as another implementation does it: torchft's, whose code shares nothing with ours."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.model.layout import layout_of
from hypha_ray.worker.incarnation import BatchSource
from hypha_ray.worker.supervised import SupervisedTrainer
from tests.support.replicas import BATCH, REPLICAS, STEPS, WINDOW, Fleet, job_of, samples_of, steps

pytestmark = pytest.mark.usefixtures("one_thread")

local_sgd = pytest.importorskip("torchft.local_sgd", reason="torchft has wheels for Linux only")

FRAGMENTS = 2


class Group:
    """Sums tensors of the replicas' threads in the order of their ranks."""

    def __init__(self) -> None:
        self._barrier, self._given = Barrier(REPLICAS, timeout=60), dict[int, torch.Tensor]()

    def average(self, rank: int, tensor: torch.Tensor) -> None:
        self._given[rank] = tensor.clone()
        self._barrier.wait()
        total = self._given[0].clone()
        for other in range(1, REPLICAS):
            total += self._given[other]
        self._barrier.wait()
        tensor.copy_(total / REPLICAS)


class Manager:
    """What torchft's DiLoCo asks of its manager, for replicas that are threads and never fail."""

    _use_async_quorum = False

    def __init__(self, rank: int, group: Group) -> None:
        self._rank, self._group, self._step = rank, group, 0

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> mock.Mock:
        self._group.average(self._rank, tensor)
        return mock.Mock()

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def current_step(self) -> int:
        return self._step

    def start_quorum(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None: ...


def peers(job: Job) -> list[Any]:
    """The same training by torchft; its models and its `DiLoCo`, for each replica."""
    group, made = Group(), dict[int, Any]()
    trainers = [SupervisedTrainer(job) for _ in range(REPLICAS)]  # One after the other: initial weights are random.

    def train(rank: int) -> None:
        trainer, batch_source = trainers[rank], BatchSource(0)
        batch_source.put(rank, samples_of(rank))
        names = {entry.name: entry.fragment for entry in layout_of(trainer.model, FRAGMENTS).entries}
        parts = [torch.nn.Module() for _ in range(FRAGMENTS)]
        for name, parameter in trainer.model.named_parameters():
            parts[names[name]].register_parameter(name.replace(".", "/"), parameter)
        config = job.inner_optimizer
        options = {"betas": config.betas, "eps": config.epsilon, "weight_decay": 0.0, "fused": True}
        inner = torch.optim.AdamW(trainer.model.parameters(), config.learning_rate, **options)
        outer = [torch.optim.SGD(part.parameters(), 0.7, momentum=0.9, nesterov=True) for part in parts]
        delays = {"fragment_sync_delay": job.sync.delay_steps, "fragment_update_alpha": job.sync.mixing}
        arguments = Manager(rank, group), parts, inner, outer, FRAGMENTS * WINDOW
        with local_sgd.DiLoCo(*arguments, **delays) as diloco:
            for step in range(STEPS):
                inner.zero_grad()
                trainer.backward(batch_source.batch(steps(rank, 0, STEPS), step * BATCH, BATCH))
                inner.step()
        made[rank] = trainer.model, diloco

    threads = [Thread(target=train, args=(rank,)) for rank in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [made[rank] for rank in range(REPLICAS)]


@pytest.mark.slow
@pytest.mark.parametrize("mixing", [0.0, 0.5])
@pytest.mark.parametrize("delay", [0, 2, 5])
@pytest.mark.long(keep=3)
def test_sixty_steps_of_three_replicas_agree_with_torchft_to_the_bit(delay: int, mixing: float) -> None:
    job = job_of(FRAGMENTS, delay, mixing)
    ours = Fleet(job)
    ours.run()
    for loop, (theirs, diloco) in zip(ours.loops, peers(job), strict=True):
        own = dict(loop._model.named_parameters())
        for entry in ours.layout.entries:
            there = diloco._fragments[entry.fragment].original_parameters[entry.name.replace(".", "/")]
            flat = ours.theta[entry.fragment][entry.group][entry.offset : entry.offset + entry.size]
            assert np.array_equal(flat, there.numpy().ravel()), f"global {entry.name}"
            assert torch.equal(own[entry.name], theirs.get_parameter(entry.name)), f"local {entry.name}"
    assert mixing == 0 or not torch.equal(*(loop._model.lm_head.weight for loop in ours.loops[:2]))
