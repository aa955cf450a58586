"""Optimizer steps on a batch of responses, with parts of the gradient by other workers, and joint optimizers.

The policy's own worker adds the parts up and takes the optimizer step. So the optimizer's state is in one place, as
without other workers: merges, replay and the loss of a worker are the same. A part has the sum of the gradients of its
responses. The sum of all parts is divided by their total weight, so a division among workers changes nothing.

The joint optimizer is that of a policy and a critic, which have settings of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hypha_ray.config import Job
from hypha_ray.config.rl import RL
from hypha_ray.config.training import InnerOptimizer
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.step import Step
from hypha_ray.optim.torch_extras import LossScale, add_gradients
from hypha_ray.rl.algorithms.policy_losses import Weights
from hypha_ray.rl.dataflow.model_worker import Role, RoleOutcome
from hypha_ray.rl.dataflow.requests import Meta, Sample
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.policy import Policy, PolicyObjective, Rollout, Rows, responses_of, tokens_of
from hypha_ray.types import Sums, added

T = TypeVar("T", bound=Rows)
Loss = Callable[[T, torch.Tensor], tuple[torch.Tensor, Sums]]
"""Function of responses and the weights of their tokens; it returns the weighted sum of losses, and figures."""


def train(
    job: Job,
    rows: T,
    optimizer: Inner,
    weights: Callable[[T], Weights],
    loss: Loss[T],
    arguments: Mapping[str, Any],
    scale: LossScale | None = None,
) -> RoleOutcome:
    """Take the steps of all epochs and minibatches, or only add the gradient of the batch's mean or sum of losses.

    Steps without a finite gradient, or with nothing to score, leave weights and optimizer as they were. A gradient that
    overflows because of the scale of losses is computed again with half of it: responses are too dear to be left out.

    Args:
        job: the job file.
        rows: responses of the batch.
        optimizer: optimizer of the model.
        weights: function that gives the weights of tokens, as in `AGGREGATIONS`.
        loss: loss of the model.
        arguments: `gradient` is ``mean`` or ``sum`` if only the gradient is wanted.
        scale: scale of the losses; None: they aren't scaled.

    """

    def gradient(part: T, summed: bool) -> Step:
        def add() -> Step:
            return _gradient(job, part, optimizer, weights(part), loss, summed, scale)

        return add() if scale is None else _without_overflow(add, optimizer, scale)

    gradient_kind = arguments.get("gradient")
    if gradient_kind is not None:
        step = _beside_earlier(lambda: gradient(rows, gradient_kind == "sum"), optimizer, scale is not None)
        return _outcome(rows, [step])
    steps: list[Step] = []
    for part in _minibatches(job, rows):
        optimizer.zero_grad()
        step = gradient(part, False)
        if step.scored and _is_finite(step):
            optimizer.step(step.norm)
        steps.append(step)
    return _outcome(rows, steps)


def _minibatches(job: Job, rows: T) -> Iterator[T]:
    """Cut the responses into minibatches along groups, in a new order in each epoch."""
    group = job.rl.group_size
    count = job.rl.minibatches
    for _ in range(job.rl.epochs):
        if count == 1:
            yield rows
            continue
        groups = torch.randperm(len(rows) // group)
        order = groups[:, None] * group + torch.arange(group)
        shuffled = rows.rows(order.flatten().to(rows.mask.device))
        yield from shuffled.parts(count, group)


def _micro_batches(job: Job, rows: T, weights: torch.Tensor) -> Iterator[tuple[T, torch.Tensor]]:
    """Yield the responses of each micro-batch, with the weights of their tokens."""
    start = 0
    for part in rows.parts(job.rounds.accumulation, job.rl.group_size):
        stop = start + len(part)
        yield part, weights[start:stop]
        start = stop


def _beside_earlier(add: Callable[[], Step], optimizer: Inner, is_scaled: bool) -> Step:
    """Add a gradient to those that are there, which stay as they are if it isn't finite."""
    old_gradients: list[torch.Tensor | None] = []
    for parameter in optimizer.parameters:
        old_gradients.append(None if parameter.grad is None else parameter.grad.clone())
    if is_scaled:  # The division by the scale is for new gradients alone.
        optimizer.zero_grad()
    step = add()
    if not _is_finite(step):
        for parameter, old_gradient in zip(optimizer.parameters, old_gradients, strict=True):
            parameter.grad = old_gradient
    elif is_scaled:
        add_gradients(optimizer.parameters, old_gradients)
    return step


def _without_overflow(add: Callable[[], Step], optimizer: Inner, scale: LossScale) -> Step:
    """Add a gradient; again with half the scale of losses as long as it overflows because of that.

    At a scale of 1 the gradient itself isn't finite.
    """
    while True:
        step = add()
        if not step.loss.isfinite():
            return step
        overflows = step.norm.isfinite().logical_not()
        is_last = not overflows or scale.scale <= 1
        scale.update(overflows.float())
        if is_last:
            return step
        optimizer.zero_grad()


def _gradient(
    job: Job,
    rows: T,
    optimizer: Inner,
    weights: Weights,
    loss: Loss[T],
    summed: bool,
    scale: LossScale | None,
) -> Step:
    """Add the gradient of the mean, or of the sum, over all tokens; micro-batches change nothing."""
    token_weights, total_weight = weights
    mean = torch.zeros((), device=token_weights.device)
    all_sums: list[Sums] = []
    if total_weight:
        for part, part_weights in _micro_batches(job, rows, token_weights):
            part_loss, sums = loss(part, part_weights)
            if scale is not None:  # The sum of many losses would overflow.
                (part_loss / total_weight * scale.scale).backward()
            elif summed:
                part_loss.backward()
            else:
                (part_loss / total_weight).backward()
            mean += part_loss.detach() / total_weight
            all_sums.append(sums)
    if scale is not None:
        scale.unscale(optimizer.parameters, total_weight if summed else 1)
    return Step(mean, total_weight, optimizer.norm(), sums=added(all_sums))


def _is_finite(step: Step) -> bool:
    figures = torch.stack([step.loss, step.norm])
    return bool(figures.isfinite().all())


def _outcome(rows: Rows, steps: Sequence[Step]) -> RoleOutcome:
    """Describe the steps without those that changed nothing."""
    effective = [step for step in steps if step.scored and _is_finite(step)]
    scored = sum(step.scored for step in effective)
    loss = sum(float(step.loss) * step.scored for step in effective)
    facts = {
        "loss": loss / max(1, scored),
        "norm": float(effective[-1].norm) if effective else 0.0,
        "scored": scored,
        "tokens": int(rows.responses.attention_mask.sum()),
        "damaged": not effective and bool(rows.mask.any()),
    }
    return RoleOutcome(sums=added(step.sums for step in effective), facts=facts)


class Learner(Role):
    """Loss of a policy, and its gradient on a part of a batch.

    Args:
        job: the job file.
        policy: the policy; its model has the weights of the step.

    """

    def __init__(self, job: Job, policy: Policy) -> None:
        self._job = job
        self._policy = policy
        self._objective = PolicyObjective(job.rl)
        self.weights_of = self._objective.weights

    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Compute the sum of the gradients of responses, beside the sum of losses, its weight and the tokens."""
        rollout = self.rollout(sample)
        parameters = trained_parameters(self._policy.model)
        elements = sum(parameter.numel() for parameter in parameters)
        gradient = torch.zeros(elements, device=rollout.mask.device)
        weights, total_weight = self.weights_of(rollout)
        total_loss = 0.0
        all_sums: list[Sums] = []
        if total_weight:
            for part, part_weights in _micro_batches(self._job, rollout, weights):
                loss, sums = self.loss(part, part_weights)
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
                gradient += torch.cat([tensor.flatten().float() for tensor in gradients])
                total_loss += float(loss.detach())
                all_sums.append(sums)
        tokens = rollout.responses.attention_mask.sum()
        losses = np.array([total_loss, total_weight, float(tokens)])
        arrays = {"gradients": gradient.cpu().numpy(), "losses": losses}
        return RoleOutcome(_with_first_id(sample, arrays), added(all_sums))

    def rollout(self, sample: Sample) -> Rollout:
        """Return the responses of a sample as the policy is trained on them."""
        device = self._policy.model.device
        responses = responses_of(sample, device)
        is_trained_on = torch.from_numpy(sample.data["kept"])
        reference: torch.Tensor | None = None
        if "reference_logprobs" in sample.data:
            reference = tokens_of(sample, "reference_logprobs", device)
        old_logprobs: torch.Tensor | None = None
        if "proximal_logprobs" in sample.data:
            old_logprobs = tokens_of(sample, "proximal_logprobs", device)
        elif not self._job.rl.corrects:
            old_logprobs = responses.logprobs
        mask, counted = trained_tokens(self._job.rl, responses, is_trained_on.to(device))
        return Rollout(
            responses=responses,
            mask=mask,
            advantages=tokens_of(sample, "advantages", device),
            old=old_logprobs,
            reference=reference,
            counted=counted,
        )

    def loss(self, part: Rollout, weights: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        """Return the weighted sum of losses of tokens, and figures."""
        has_entropy_bonus = self._job.rl.entropy > 0
        scores = self._policy.score(part.responses, entropy_gradient=has_entropy_bonus)
        return self._objective.loss(part, weights, scores)


def trained_tokens(rl: RL, responses: Responses, is_kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask of tokens that are trained on, and the flags of responses that a mean over responses is of.

    Args:
        rl: table of the job file.
        responses: responses of a batch.
        is_kept: flags of responses that aren't left out, [responses].

    """
    mask = responses.mask * is_kept[:, None]
    counted = mask.sum(1) > 0
    if rl.mask_truncated:
        mask = mask * responses.ended[:, None]
    return mask, counted


def step_on_parts(sample: Sample, model: torch.nn.Module, optimizer: Inner, gradient_kind: str | None) -> RoleOutcome:
    """Take a step on the gradients of all parts, or only add their mean or sum to the present gradients.

    Without a finite gradient, or with nothing to score, weights and gradients stay as they were.

    Args:
        sample: gradients and losses of `Learner.inference`.
        model: the policy's model.
        optimizer: optimizer of the policy.
        gradient_kind: ``mean`` or ``sum`` if only the gradient is wanted; None: a step.

    """
    losses = sample.data["losses"].reshape(-1, 3)
    total_loss, total_weight, tokens = losses.sum(0).tolist()
    gradients = torch.from_numpy(sample.data["gradients"].reshape(len(losses), -1))
    gradient = gradients.sum(0)
    divisor = max(total_weight, 1e-12)
    if gradient_kind != "sum":
        gradient = gradient / divisor
    parameters = trained_parameters(model)
    old_gradients = [parameter.grad for parameter in parameters]
    if gradient_kind is None:
        optimizer.zero_grad()
    _add(parameters, gradient)
    loss = torch.tensor(total_loss / divisor)
    norm = optimizer.norm()
    is_finite = bool(torch.stack([loss, norm.cpu()]).isfinite().all())
    if total_weight and is_finite:
        if gradient_kind is None:
            optimizer.step(norm)
        facts = {
            "loss": float(loss),
            "norm": float(norm),
            "scored": int(total_weight),
            "tokens": int(tokens),
            "damaged": False,
        }
        return RoleOutcome(facts=facts)
    for parameter, old_gradient in zip(parameters, old_gradients, strict=True):
        parameter.grad = old_gradient
    is_damaged = bool(total_weight)
    return RoleOutcome(facts={"loss": 0.0, "norm": 0.0, "scored": 0, "tokens": int(tokens), "damaged": is_damaged})


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that are trained, in the order of a flat gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _add(parameters: Sequence[torch.nn.Parameter], flat: torch.Tensor) -> None:
    """Add a flat gradient to the gradients of parameters, which are replaced by new tensors."""
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        gradient = part.view_as(parameter).to(parameter)
        if parameter.grad is not None:
            gradient = parameter.grad + gradient
        parameter.grad = gradient


def _with_first_id(sample: Sample, arrays: Mapping[str, Any]) -> Sample:
    """Pack arrays of a whole sample under its first id; the other ids have none."""
    no_elements = ((0,),) * (len(sample.ids) - 1)
    lengths = {key: ((len(array),), *no_elements) for key, array in arrays.items()}
    return Sample(Meta(sample.ids, lengths), arrays)


class Joint(Inner):
    """Inner optimizers of several modules as one; each clips the gradients of its own module."""

    def __init__(self, parts: Sequence[Inner]) -> None:
        self._parts = parts
        self.optimizers = []
        self.parameters = []
        for part in parts:
            self.optimizers += part.optimizers
            self.parameters += part.parameters

    def seek(self, position: float) -> None:
        """Set the position in all schedules."""
        for part in self._parts:
            part.seek(position)

    def scale(self, factor: float) -> None:
        """Make the next step with all peak learning rates times this factor."""
        for part in self._parts:
            part.scale(factor)

    def ramp(self, steps: int) -> None:
        """Warm all parts up to their scheduled learning rates."""
        for part in self._parts:
            part.ramp(steps)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first part's next step."""
        return self._parts[0].learning_rate

    def step(self, norm: Tensor | None = None, skipped: Tensor | None = None) -> None:
        """Take a step of each part; the norm of all gradients isn't used."""
        for part in self._parts:
            part.step(skipped=skipped)


def critic_settings(job: Job) -> InnerOptimizer:
    """Return the settings of a critic's optimizer."""
    rate = job.rl.critic.learning_rate
    if rate is None:
        return job.inner_optimizer
    return job.inner_optimizer.model_copy(update={"learning_rate": rate})
