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
from hypha_ray.model.task import SpecialTokens
from hypha_ray.store.snapshots import named
from hypha_ray.types import Samples
from hypha_ray.worker.trainer import Strategy, Trainer, strategy, trainer_of


def job_of(definition: dict[str, Any], device: str) -> Job:
    """Build the job from its definition, as sent to a trainer; learning rates come with every assignment."""
    optimizer = {**definition["inner_optimizer"], "schedule": "constant", "warmup_steps": 0, "decay_steps": None}
    tables = {
        "model": definition["model"],
        "inner_optimizer": optimizer,
        "run": {"seed": definition["seed"]},
        "worker": {"device": device, **OFF},  # Settings of [worker] are those of workers in Ray, and aren't sent.
        "sync": {"strategy": definition["strategy"]},
    }
    return Job.model_validate(tables)


def train(connection: client.Trainer, device: str) -> None:
    """Take part in a job until its training is completed.

    Args:
        connection: connection to the driver.
        device: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        HyphaError: the job trains by rewards, the model can't be built, its loss isn't the task's, or the driver is
            gone.

    """
    definition = connection.job
    if "rl" in definition:  # Reward functions and servers are programs, which the bridge doesn't send.
        fix = "connect a trainer of your own, such as examples/grpo_trainer.py"
        raise ConfigError("RL025", "jobs/worker.py doesn't train by rewards", definition["rl"]["algorithm"], fix=fix)
    job = job_of(definition, device)
    specials = None
    tokens = definition.get("special_tokens")
    if tokens:
        specials = SpecialTokens(tokens["mask_token_id"], tuple(tokens["all_special_ids"]))
    worker = definition["worker"]
    trainer = trainer_of(job, worker, specials)
    connection.ready(str(trainer.device), trainer.parameters)
    inner_strategy = strategy(job, trainer)
    peak_rate = job.inner_optimizer.learning_rate
    try:
        for round_index, current_round in enumerate(connection.rounds()):
            trainer.seed(job.run.seed, current_round.number, worker)
            _train_round(current_round, trainer, inner_strategy, peak_rate, is_first=round_index == 0)
    finally:
        trainer.close()


def _train_round(
    current_round: Round, trainer: Trainer, inner_strategy: Strategy, peak_rate: float, *, is_first: bool
) -> None:
    layout = layout_of(trainer.model)
    began_at = time.monotonic()
    load(trainer.model, layout, current_round.parameters())
    trainer.merged(current_round.number)
    current_round.merged(time.monotonic() - began_at)
    if current_round.evaluates:
        _evaluate(current_round, trainer)
    inner_strategy.begin()
    for number, batch in enumerate(current_round.batches()):
        samples = Samples(batch, current_round.keys)
        if is_first and number == 0:
            trainer.check_loss(samples)  # The driver checks no losses of trainers outside of Ray.
        trainer.optimizer.scale(current_round.learning_rate / peak_rate)
        step = inner_strategy.begin_step(samples).result()
        current_round.step(float(step.loss), scored=step.scored, gradient_norm=float(step.norm))
    result = inner_strategy.result(layout, 0)
    current_round.hand_over(named(layout, [result]))


def _evaluate(current_round: Round, trainer: Trainer) -> None:
    sums = trainer.evaluate(Samples(arrays, current_round.keys) for arrays in current_round.evaluation())
    loss_sum, count = sums["val_loss"]
    correct = None
    if "accuracy" in sums:
        correct = int(sums["accuracy"][0])
    current_round.evaluated(loss_sum, int(count), correct)
