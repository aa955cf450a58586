"""Rollouts: responses of a policy to prompts of the dataset, with rewards and advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hypha_ray.config.tables.rl import RL
from hypha_ray.failpoints import failpoint
from hypha_ray.rl.algorithms.advantages import ADVANTAGES
from hypha_ray.rl.algorithms.kl import ESTIMATORS
from hypha_ray.rl.algorithms.losses import truncated_weight
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.engines.sampling import Sampling, draw, evaluation_sampling, training_sampling
from hypha_ray.rl.policy import Policy
from hypha_ray.rl.rollout import Rollout
from hypha_ray.rl.scoring import Scored, Scorer
from hypha_ray.rl.tokens import end_tokens
from hypha_ray.types import Samples, Sums


class Rollouts:
    """Generation, rewards and advantages of a job.

    Args:
        rl: table of the job file.
        seed: seed of the run.
        policy: policy that responds.
        tokenizer: tokenizer of the run.

    """

    def __init__(self, rl: RL, seed: int, policy: Policy, tokenizer: Any) -> None:
        self._rl, self._seed, self._policy = rl, seed, policy
        self._ends = end_tokens(policy.model, tokenizer)
        self._scorer = Scorer(rl, tokenizer)

    def roll_out(self, batch: Samples, reference: Policy | None) -> tuple[Rollout, Sums]:
        """Generate and reward a group of responses to each prompt, and compute their advantages.

        Args:
            batch: prompts.
            reference: policy that the trained one is held to; None: none.

        """
        responses, scored = self._respond(batch, training_sampling(self._rl))
        held = None if reference is None else reference.logprobs(responses)
        old, correction, sums = self._proximal(responses)
        rewards = torch.from_numpy(scored.present()).to(old)
        lengths = responses.mask.sum(1).view(rewards.shape)
        if held is not None and self._rl.kl_place == "reward":
            divergence = ESTIMATORS[self._rl.kl_estimator](old, held) * responses.mask
            rewards = rewards - self._rl.kl * divergence.sum(1).view(rewards.shape)
        advantages = ADVANTAGES[self._rl.recipe.advantage](rewards, lengths)
        equal = np.ptp(scored.present(), axis=1) == 0
        mask = responses.mask
        if self._rl.recipe.drop_equal_groups:
            mask = mask * torch.from_numpy(~equal).to(mask).repeat_interleave(self._rl.group_size)[:, None]
        sums |= scored.sums() | _lengths(responses) | {"equal_groups": (float(equal.sum()), float(len(equal)))}
        return Rollout(responses, advantages.reshape(-1, 1), mask, old, held, correction), sums

    def evaluate(self, batch: Samples) -> Sums:
        """Return sums of reward, of right answers, and of lengths over responses to validation prompts."""
        sampling = evaluation_sampling(self._rl)
        responses, scored = self._respond(batch, sampling)
        passed, prompts = scored.passed, float(len(batch))
        found = {"pass@1": (float(passed.mean(1).sum()), prompts)}
        if sampling.samples > 1:
            found[f"pass@{sampling.samples}"] = float(passed.any(1).sum()), prompts
        return scored.sums() | found | _lengths(responses)

    def _respond(self, batch: Samples, sampling: Sampling) -> tuple[Responses, Scored]:
        ids, mask = (torch.from_numpy(batch.arrays[name]) for name in ("input_ids", "attention_mask"))
        device = self._policy.model.device
        uniform = draw(self._seed, batch.keys, sampling).to(device)
        responses = self._policy.sample(ids.to(device), mask.to(device), uniform, sampling, self._ends)
        failpoint("rl.generate")
        scored = self._scorer.score(batch.arrays, responses)
        failpoint("rl.reward")
        return responses, scored

    def _proximal(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor | None, Sums]:
        """Return log-probabilities that ratios are taken to, and the correction for those that were sampled with."""
        if (cap := self._rl.behaviour_cap) is None:
            return responses.logprobs, None, {}
        own = self._policy.logprobs(responses)
        gap = float(((own - responses.logprobs).abs() * responses.mask).sum())
        return own, truncated_weight(own, responses.logprobs, cap), {"logprob_gap": (gap, float(responses.mask.sum()))}


def _lengths(responses: Responses) -> Sums:
    count = float(len(responses.ended))
    return {
        "response_tokens": (float(responses.mask.sum()), count),
        "truncated": (count - float(responses.ended.sum()), count),
    }
