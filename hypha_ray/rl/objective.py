"""Loss of a policy on its responses, put together from the parts that a job's algorithm consists of."""

from __future__ import annotations

import torch

from hypha_ray.config.tables.rl import RL
from hypha_ray.plugins import create
from hypha_ray.rl.algorithms.losses import AGGREGATIONS, ESTIMATORS, Weights, decoupled_weight, truncated_weight
from hypha_ray.rl.algorithms.policy_losses import LossInputs, PolicyLoss, checked
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.packing import Rollout
from hypha_ray.rl.policy import Scores
from hypha_ray.types import Sums


class PolicyObjective:
    """Loss of a policy as the sum over tokens, and figures of it.

    Args:
        rl: table of the job file.

    """

    def __init__(self, rl: RL) -> None:
        self._rl = rl
        self._recipe = rl.recipe
        self._loss: PolicyLoss = create("rl_losses", rl.recipe.loss, rl.loss_options)

    def weights(self, rollout: Rollout) -> Weights:
        """Return the weight of each token, and the total that sums of losses are divided by."""
        aggregation = AGGREGATIONS[self._recipe.aggregation]
        responses = int(rollout.counted.sum())
        return aggregation(rollout.mask, responses, self._rl.generation.max_response_tokens)

    def loss(self, rollout: Rollout, weights: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, Sums]:
        """Return the weighted sum of token losses, and the figures of these tokens.

        Args:
            rollout: responses with advantages and log-probabilities.
            weights: weight of each token, [responses, tokens].
            scores: the trained policy's view of the responses.

        """
        rl = self._rl
        recipe = self._recipe
        mask = rollout.mask
        old = scores.logprobs.detach() if rollout.old is None else rollout.old
        policy = checked(recipe.loss, self._loss, self._inputs(rollout, old, scores))
        loss = policy.losses
        if rl.entropy:
            loss = loss - rl.entropy * scores.entropy
        figures = {"entropy": scores.entropy, **policy.figures}
        if rollout.reference is not None:
            divergence = ESTIMATORS[recipe.kl_estimator](scores.logprobs, rollout.reference)
            figures["kl"] = divergence
            if recipe.kl_place == "loss":
                loss = loss + rl.kl * divergence
        tokens = float(mask.sum())
        sums: Sums = {}
        for name, figure in figures.items():
            total = (figure.detach() * mask).sum()
            sums[name] = float(total), tokens
        if rollout.old is None:
            sums |= logprob_gap(old, rollout.responses)
        return (loss * weights).sum(), sums

    def _inputs(self, rollout: Rollout, old: torch.Tensor, scores: Scores) -> LossInputs:
        """Return what the policy's loss is made of."""
        behaviour = rollout.responses.logprobs
        return LossInputs(
            logprobs=scores.logprobs,
            old_logprobs=old,
            behaviour_logprobs=behaviour,
            reference_logprobs=rollout.reference,
            advantages=rollout.advantages.expand_as(scores.logprobs),
            mask=rollout.mask,
            correction=self._correction(old, behaviour) if self._rl.corrects else None,
            settings=self._rl,
        )

    def _correction(self, proximal: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
        """Return the importance weight of each token, π_proximal / π_sample with the job's cap."""
        cap = self._rl.behaviour_cap
        if self._rl.is_asynchronous or cap is None:
            return decoupled_weight(proximal, behaviour, cap)
        return truncated_weight(proximal, behaviour, cap)


def logprob_gap(logprobs: torch.Tensor, responses: Responses) -> Sums:
    """Return the figure of the mean distance between a policy's log-probabilities and those of sampling."""
    distances = (logprobs - responses.logprobs).abs() * responses.mask
    tokens = float(responses.mask.sum())
    return {"logprob_gap": (float(distances.sum()), tokens)}
