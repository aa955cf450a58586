"""A trainer whose batch is prompts: it generates responses, rewards them, and trains on what they are worth.

prompts ──► generate ──► reward ──► advantages ──► optimizer steps
                ▲                                        │
                └────────────── the same weights ────────┘
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hypha_ray.config import Job
from hypha_ray.failpoints import failpoint
from hypha_ray.model.environment import device_of, seed_all
from hypha_ray.model.trained import build_trained
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.optim.schedules import inner_steps
from hypha_ray.optim.step import Step
from hypha_ray.rl.objective import Objective
from hypha_ray.rl.policy import Policy
from hypha_ray.rl.rollout import Rollout
from hypha_ray.rl.rollouts import Rollouts
from hypha_ray.types import Flat, Samples, Sums, added


class Island:
    """Trainer of a policy on prompts.

    The policy stays in evaluation mode, because dropout would make ratios of equal weights differ from 1.

    Args:
        job: the job file.
        tokenizer: tokenizer of the run.

    Raises:
        HyphaError: the model can't be built, or a reward function can't be had.

    """

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self._rl, self._accumulation = job.rl, job.rounds.accumulation
        self.device = device_of(job.worker.device)
        self.model = build_trained(job).to(self.device).eval()
        self.optimizer = build_optimizer(self.model, job.inner_optimizer, inner_steps(job), job.resources.num_workers)
        autocast = torch.bfloat16 if job.worker.autocast == "bf16" else None
        self._policy = Policy(self.model, job.rl.generation.temperature, autocast)
        self._reference = self._frozen_copy() if job.rl.reference != "none" else None
        self._rollouts = Rollouts(job.rl, job.run.seed, self._policy, tokenizer)
        self._objective = Objective(job.rl)

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def check_loss(self, batch: Samples) -> None:
        """Do nothing: only trainers outside of Ray check a model themselves."""

    def seed(self, *entropy: int) -> None:
        """Let the order of minibatches depend on these numbers alone; responses depend on their prompts' keys."""
        seed_all(*entropy)

    def step(self, batch: Samples) -> Step:
        """Generate responses, and take the optimizer steps of all epochs and minibatches on them.

        Minibatches without a finite gradient, or with nothing to score, leave weights and optimizer as they were.
        """
        rollout, sums = self._rollouts.roll_out(batch, self._reference)
        taken = []
        for part in self._minibatches(rollout):
            self.optimizer.zero_grad()
            result = self._gradient(part, summed=False)
            if result.scored and _is_finite(result):
                self.optimizer.step(result.norm)
                taken.append(result)
        failpoint("rl.train")
        return _joined(batch, rollout, sums, taken)

    def backward(self, batch: Samples, summed: bool = False) -> Step:
        """Generate responses, and add their gradient to the gradients that are there, if it is finite."""
        rollout, sums = self._rollouts.roll_out(batch, self._reference)
        before = [None if one.grad is None else one.grad.clone() for one in self.model.parameters()]
        result = self._gradient(rollout, summed)
        if _is_finite(result):
            return _joined(batch, rollout, sums, [result] if result.scored else [])
        for parameter, gradient in zip(self.model.parameters(), before, strict=True):
            parameter.grad = gradient
        return _joined(batch, rollout, sums, [])

    def evaluate(self, batches: Iterable[Samples]) -> Sums:
        """Return reward, pass@1 and length of responses, which are sampled with the same random numbers each time."""
        return added(map(self._rollouts.evaluate, batches))

    def merged(self, version: int) -> None:
        """Take the merged weights for the reference, if that is what the round began with."""
        failpoint("rl.merge")
        if self._rl.reference == "round":
            self._reference = self._frozen_copy()

    def state(self) -> Flat:
        """Return nothing: a reference is made of weights that a successor has, too."""
        return {}

    def restore(self, state: Flat) -> None:
        """Do nothing, as `state` returns nothing."""

    def close(self) -> None:
        """Do nothing: only memory is held."""

    def _frozen_copy(self) -> Policy:
        return self._policy.of(copy.deepcopy(self.model).requires_grad_(False))

    def _minibatches(self, rollout: Rollout) -> Iterator[Rollout]:
        """Cut the responses into minibatches along groups, in a new order in each epoch."""
        group, count = self._rl.group_size, self._rl.minibatches
        for _ in range(self._rl.epochs):
            if count == 1:
                yield rollout
                continue
            order = torch.randperm(len(rollout) // group)[:, None] * group + torch.arange(group)
            yield from rollout.rows(order.flatten().to(self.device)).parts(count, group)

    def _gradient(self, rollout: Rollout, summed: bool) -> Step:
        """Add the gradient of the mean, or of the sum, over all tokens; micro-batches change nothing."""
        weights, weight = self._objective.weights(rollout.mask)
        loss, found, place = torch.zeros((), device=self.device), [], 0
        for part in rollout.parts(self._accumulation, self._rl.group_size) if weight else ():
            scores = self._policy.score(part.responses, entropy_gradient=self._rl.entropy > 0)
            summand, sums = self._objective.loss(part, weights[place : place + len(part)], scores)
            (summand if summed else summand / weight).backward()
            loss += summand.detach() / weight
            found.append(sums)
            place += len(part)
        return Step(loss, weight, self.optimizer.norm(), sums=added(found))


def _is_finite(result: Step) -> bool:
    return bool(torch.stack([result.loss, result.norm]).isfinite().all())


def _joined(batch: Samples, rollout: Rollout, sums: Sums, taken: list[Step]) -> Step:
    """One result of all steps taken on a batch; without any the batch is bad, unless it had nothing to score."""
    tokens, scored = int(rollout.responses.attention_mask.sum()), sum(one.scored for one in taken)
    if not taken:
        zero = rollout.old.new_zeros(())
        bad = batch.keys if rollout.mask.any() else batch.keys[:0]
        return Step(zero, 0, zero, tokens, sums, bad)
    loss = torch.stack([one.loss * (one.scored / scored) for one in taken]).sum()
    return Step(loss, scored, taken[-1].norm, tokens, added([sums, *(one.sums for one in taken)]))
