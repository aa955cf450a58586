"""A worker that is no part of Ray: the steps of ours, for a job elsewhere, over the bridge."""

from __future__ import annotations

import time
from typing import Any

from hypha_ray.bridge.client import Trainer
from hypha_ray.bridge.round import Round
from hypha_ray.config import Job
from hypha_ray.model.layout import layout_of, load
from hypha_ray.model.tasks.masking import SpecialTokens
from hypha_ray.store.tensorfile import named
from hypha_ray.types import Samples
from hypha_ray.worker.training.strategies import Strategy, strategy
from hypha_ray.worker.training.trainer import Stepper


def job_of(told: dict[str, Any], device: str) -> Job:
    """The job, as far as a trainer is told of it; its rates come with every assignment."""
    inner = {**told["inner_optimizer"], "schedule": "constant", "warmup_steps": 0, "decay_steps": None}
    tables = {"run": {"seed": told["seed"]}, "worker": {"device": device}, "sync": {"strategy": told["strategy"]}}
    return Job.model_validate({"model": told["model"], "inner_optimizer": inner, **tables})


def train(trainer: Trainer, device: str) -> None:
    """Take part in a job until its training is completed.

    Args:
        trainer: the connection.
        device: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        HyphaError: the model can't be built, its loss isn't the task's, or the driver is gone.

    """
    job = job_of(trainer.job, device)
    told = trainer.job.get("special_tokens")
    stepper = Stepper(job, told and SpecialTokens(told["mask_token_id"], tuple(told["all_special_ids"])))
    trainer.ready(str(stepper.device), stepper.parameters)
    chosen, peak = strategy(job, stepper), job.inner_optimizer.learning_rate
    for count, work in enumerate(trainer.rounds()):
        stepper.seed(job.run.seed, work.number, trainer.job["worker"])
        _go_through(work, stepper, chosen, peak, first=count == 0)


def _go_through(work: Round, stepper: Stepper, chosen: Strategy, peak: float, *, first: bool) -> None:
    layout, began = layout_of(stepper.model), time.monotonic()
    load(stepper.model, layout, work.parameters())
    work.merged(time.monotonic() - began)
    if work.evaluates:
        sums = stepper.evaluate(Samples(arrays, work.keys) for arrays in work.evaluation())
        work.evaluated(sums.loss_sum, sums.count, sums.correct)
    chosen.begin()
    for place, batch in enumerate(work.batches()):
        samples = Samples(batch, work.keys)
        if first and place == 0:
            stepper.check_loss(samples)  # The driver checks no losses of trainers outside of Ray.
        stepper.optimizer.scale(work.learning_rate / peak)
        result = chosen.train(samples)
        work.step(float(result.loss), scored=result.scored, gradient_norm=float(result.norm))
    work.hand_over(named(layout, [chosen.result(layout, 0)]))
