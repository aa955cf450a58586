"""Optimizer steps on a batch of responses, and model workers that compute a part of the gradient each.

The policy's own worker adds the parts up and takes the optimizer step. So the optimizer's state is in one place, as
without other workers: merges, replay and the loss of a worker are the same. A part has the sum of the gradients of its
responses. The sum of all parts is divided by their total weight, so a division among workers changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from hypha_ray.config import Job
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.step import Step
from hypha_ray.rl.algorithms.losses import Weights
from hypha_ray.rl.dataflow.sample import Meta, Sample
from hypha_ray.rl.objective import Objective
from hypha_ray.rl.packing import Rollout, Rows, responses_of, tokens_of
from hypha_ray.rl.policy import Policy
from hypha_ray.rl.roles.role import Outcome, Role
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


class Learner(Role):
    """Loss of a policy, and its gradient on a part of a batch.

    Args:
        job: the job file.
        policy: the policy; its model has the weights of the step.

    """

    def __init__(self, job: Job, policy: Policy) -> None:
        self._job = job
        self._policy = policy
        self._objective = Objective(job.rl)
        self.weights_of = self._objective.weights

    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> Outcome:
        """Compute the sum of the gradients of responses, beside the sum of losses, its weight and the tokens."""
        rollout = self.rollout(sample)
        parameters = trained_parameters(self._policy.model)
        gradient = torch.zeros(sum(one.numel() for one in parameters), device=rollout.mask.device)
        weights, weight = self.weights_of(rollout.mask)
        total = 0.0
        found = []
        place = 0
        for part in rollout.parts(self._job.rounds.accumulation, self._job.rl.group_size) if weight else ():
            loss, sums = self.loss(part, weights[place : place + len(part)])
            each = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            gradient += torch.cat([one.flatten().float() for one in each])
            total = total + float(loss.detach())
            place = place + len(part)
            found.append(sums)
        losses = np.array([total, weight, float(rollout.responses.attention_mask.sum())])
        return Outcome(_of_first(sample, {"gradients": gradient.cpu().numpy(), "losses": losses}), added(found))

    def rollout(self, sample: Sample) -> Rollout:
        """Return the responses of a sample as the policy is trained on them."""
        device = self._policy.model.device
        responses = responses_of(sample, device)
        kept = torch.from_numpy(sample.data["kept"]).to(device)
        columns = {
            key: tokens_of(sample, key, device)
            for key in ("advantages", "reference_logprobs", "proximal_logprobs")
            if key in sample.data
        }
        return Rollout(
            responses,
            responses.mask * kept[:, None],
            columns["advantages"],
            columns.get("proximal_logprobs", None if self._job.rl.corrects else responses.logprobs),
            columns.get("reference_logprobs"),
        )

    def loss(self, part: Rollout, weights: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        """Return the weighted sum of losses of tokens, and figures."""
        scores = self._policy.score(part.responses, entropy_gradient=self._job.rl.entropy > 0)
        return self._objective.loss(part, weights, scores)


def step_on_parts(sample: Sample, model: torch.nn.Module, optimizer: Inner, kind: str | None) -> Outcome:
    """Take a step on the gradients of all parts; or only add their mean or sum to the gradients that are there.

    Without a finite gradient, or with nothing to score, weights and gradients stay as they were.

    Args:
        sample: gradients and losses of `Learner.inference`.
        model: the policy's model.
        optimizer: optimizer of the policy.
        kind: ``mean`` or ``sum`` if only the gradient is wanted; None: a step.

    """
    total, weight, tokens = sample.data["losses"].reshape(-1, 3).sum(0).tolist()
    parts = torch.from_numpy(sample.data["gradients"].reshape(len(sample.data["losses"]) // 3, -1))
    parameters = trained_parameters(model)
    before = [one.grad for one in parameters]
    if kind is None:
        optimizer.zero_grad()
    _add(parameters, parts.sum(0) if kind == "sum" else parts.sum(0) / max(weight, 1e-12))
    result = Step(torch.tensor(total / max(weight, 1e-12)), int(weight), optimizer.norm())
    good = bool(weight) and bool(torch.stack([result.loss, result.norm.cpu()]).isfinite().all())
    if good and kind is None:
        optimizer.step(result.norm)
    elif not good:
        for parameter, old in zip(parameters, before, strict=True):
            parameter.grad = old
    return Outcome(
        facts={
            "loss": float(result.loss) if good else 0.0,
            "norm": float(result.norm) if good else 0.0,
            "scored": result.scored if good else 0,
            "tokens": int(tokens),
            "damaged": bool(weight) and not good,
        }
    )


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that are trained, in the order of a flat gradient."""
    return [one for one in model.parameters() if one.requires_grad]


def _add(parameters: Sequence[torch.nn.Parameter], flat: torch.Tensor) -> None:
    """Add a flat gradient to the gradients of parameters, which are replaced by new tensors."""
    place = 0
    for parameter in parameters:
        own = flat[place : place + parameter.numel()].view_as(parameter).to(parameter)
        parameter.grad = own if parameter.grad is None else parameter.grad + own
        place += parameter.numel()


def _of_first(sample: Sample, arrays: Mapping[str, Any]) -> Sample:
    """Pack arrays of a whole sample as the first id's; the other ids have none."""
    lengths = {key: ((len(array),), *((0,) for _ in sample.ids[1:])) for key, array in arrays.items()}
    return Sample(Meta(sample.ids, lengths), arrays)
