"""A trainer outside Ray that takes the same steps as a worker, over the bridge."""

from __future__ import annotations

import time
from typing import Any

from hypha_ray.bridge import client
from hypha_ray.bridge.round import Round
from hypha_ray.config import Job
from hypha_ray.config.automatic import OFF
from hypha_ray.errors import ConfigError
from hypha_ray.model.layout import layout_of, load
from hypha_ray.model.tasks.task import SpecialTokens
from hypha_ray.store.tensorfile import named
from hypha_ray.types import Samples
from hypha_ray.worker.training.trainer import Strategy, Trainer, strategy, trainer_of


def job_of(told: dict[str, Any], device: str) -> Job:
    """The job as it is sent to a trainer; learning rates come with every assignment."""
    inner = {**told["inner_optimizer"], "schedule": "constant", "warmup_steps": 0, "decay_steps": None}
    worker = {"device": device, **OFF}  # Settings of [worker] are those of workers in Ray, and aren't sent.
    tables = {"run": {"seed": told["seed"]}, "worker": worker, "sync": {"strategy": told["strategy"]}}
    return Job.model_validate({"model": told["model"], "inner_optimizer": inner, **tables})


def train(trainer: client.Trainer, device: str) -> None:
    """Take part in a job until its training is completed.

    Args:
        trainer: the connection.
        device: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        HyphaError: the job trains by rewards, the model can't be built, its loss isn't the task's, or the driver is
            gone.

    """
    if "rl" in trainer.job:  # Its reward functions and servers are programs, and no program comes over the bridge.
        fix = "connect a trainer of your own, such as examples/grpo_trainer.py"
        raise ConfigError("RL025", "jobs/worker.py doesn't train by rewards", trainer.job["rl"]["algorithm"], fix=fix)
    job = job_of(trainer.job, device)
    told = trainer.job.get("special_tokens")
    specials = told and SpecialTokens(told["mask_token_id"], tuple(told["all_special_ids"]))
    own = trainer_of(job, trainer.job["worker"], specials)
    trainer.ready(str(own.device), own.parameters)
    chosen = strategy(job, own)
    peak = job.inner_optimizer.learning_rate
    try:
        for count, work in enumerate(trainer.rounds()):
            own.seed(job.run.seed, work.number, trainer.job["worker"])
            _go_through(work, own, chosen, peak, first=count == 0)
    finally:
        own.close()


def _go_through(work: Round, own: Trainer, chosen: Strategy, peak: float, *, first: bool) -> None:
    layout = layout_of(own.model)
    began = time.monotonic()
    load(own.model, layout, work.parameters())
    own.merged(work.number)
    work.merged(time.monotonic() - began)
    if work.evaluates:
        sums = own.evaluate(Samples(arrays, work.keys) for arrays in work.evaluation())
        (loss_sum, count), accuracy = sums["val_loss"], sums.get("accuracy")
        work.evaluated(loss_sum, int(count), None if accuracy is None else int(accuracy[0]))
    chosen.begin()
    for place, batch in enumerate(work.batches()):
        samples = Samples(batch, work.keys)
        if first and place == 0:
            own.check_loss(samples)  # The driver checks no losses of trainers outside of Ray.
        own.optimizer.scale(work.learning_rate / peak)
        result = chosen.train(samples)
        work.step(float(result.loss), scored=result.scored, gradient_norm=float(result.norm))
    work.hand_over(named(layout, [chosen.result(layout, 0)]))
