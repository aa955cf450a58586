"""Optimizer steps on a batch of responses, the same for actor and critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from hypha_ray.config import Job
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.step import Step
from hypha_ray.rl.algorithms.aggregation import Weights
from hypha_ray.rl.roles.role import Outcome
from hypha_ray.rl.rollout import Rows
from hypha_ray.types import Sums, added

T = TypeVar("T", bound=Rows)
Loss = Callable[[T, torch.Tensor], tuple[torch.Tensor, Sums]]
"""Weighted sum of the losses of tokens, and figures, of responses and the weights of their tokens."""


def train(
    job: Job,
    rows: T,
    optimizer: Inner,
    weights: Callable[[torch.Tensor], Weights],
    loss: Loss[T],
    arguments: Mapping[str, Any],
) -> Outcome:
    """Take the steps of all epochs and minibatches; or only add the gradient of the batch's mean or sum of losses.

    Steps without a finite gradient, or with nothing to score, leave weights and optimizer as they were.

    Args:
        job: the job file.
        rows: responses of the batch.
        optimizer: optimizer of the model.
        weights: weights of tokens by their mask, as in `AGGREGATIONS`.
        loss: loss of the model.
        arguments: `gradient` is ``mean`` or ``sum`` if only the gradient is wanted.

    """

    def gradient(part: T, summed: bool) -> Step:
        return _gradient(job, part, optimizer, weights(part.mask), loss, summed)

    if (kind := arguments.get("gradient")) is not None:
        before = [None if one.grad is None else one.grad.clone() for one in optimizer.parameters]
        result = gradient(rows, kind == "sum")
        if not _is_finite(result):
            for parameter, old in zip(optimizer.parameters, before, strict=True):
                parameter.grad = old
        return _outcome(rows, [result])
    taken = []
    for part in _minibatches(job, rows):
        optimizer.zero_grad()
        result = gradient(part, False)
        if result.scored and _is_finite(result):
            optimizer.step(result.norm)
        taken.append(result)
    return _outcome(rows, taken)


def _minibatches(job: Job, rows: T) -> Iterator[T]:
    """Cut the responses into minibatches along groups, in a new order in each epoch."""
    group = job.rl.group_size
    count = job.rl.minibatches
    for _ in range(job.rl.epochs):
        if count == 1:
            yield rows
            continue
        order = torch.randperm(len(rows) // group)[:, None] * group + torch.arange(group)
        yield from rows.rows(order.flatten().to(rows.mask.device)).parts(count, group)


def _gradient(job: Job, rows: T, optimizer: Inner, weighing: Weights, loss: Loss[T], summed: bool) -> Step:
    """Add the gradient of the mean, or of the sum, over all tokens; micro-batches change nothing."""
    weights, weight = weighing
    total = torch.zeros((), device=weights.device)
    found = []
    place = 0
    for part in rows.parts(job.rounds.accumulation, job.rl.group_size) if weight else ():
        summand, sums = loss(part, weights[place : place + len(part)])
        (summand if summed else summand / weight).backward()
        total += summand.detach() / weight
        found.append(sums)
        place += len(part)
    return Step(total, weight, optimizer.norm(), sums=added(found))


def _is_finite(result: Step) -> bool:
    return bool(torch.stack([result.loss, result.norm]).isfinite().all())


def _outcome(rows: Rows, results: Sequence[Step]) -> Outcome:
    """Describe the steps that were taken: all that changed nothing are left out."""
    taken = [one for one in results if one.scored and _is_finite(one)]
    scored = sum(one.scored for one in taken)
    facts = {
        "loss": sum(float(one.loss) * one.scored for one in taken) / max(1, scored),
        "norm": float(taken[-1].norm) if taken else 0.0,
        "scored": scored,
        "tokens": int(rows.responses.attention_mask.sum()),
        "damaged": not taken and bool(rows.mask.any()),
    }
    return Outcome(sums=added(one.sums for one in taken), facts=facts)
