"""Roles without a policy: rewards of responses, and the advantages that actor and critic are both trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hypha_ray.config.rl import RL
from hypha_ray.config.schema import Rounds
from hypha_ray.failpoints import failpoint
from hypha_ray.plugins import create
from hypha_ray.rl.algorithms.advantages import (
    Advantages,
    advantages_of,
    compared_groups,
    equal_groups,
    generalized_advantages,
    whitened,
)
from hypha_ray.rl.algorithms.policy_losses import ESTIMATORS, adapted
from hypha_ray.rl.dataflow.model_worker import Role, RoleOutcome
from hypha_ray.rl.dataflow.requests import Sample
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.policy import packed_numbers, packed_tokens, prompts_of, responses_of, sampled_mask, tokens_of
from hypha_ray.rl.rewards.response import TrainerState
from hypha_ray.rl.scoring import Scored, Scorer, rollout_records
from hypha_ray.types import Sums

_CPU = torch.device("cpu")


class RewardRole(Role):
    """Reward functions of a job.

    Args:
        scorer: the functions.
        rounds: table of the job file; None outside of a run.
        shown: number of responses of a batch whose records go into replies.

    """

    def __init__(self, scorer: Scorer, rounds: Rounds | None = None, shown: int = 0) -> None:
        self._scorer = scorer
        self._rounds = rounds
        self._shown = shown

    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Compute the reward of each response, NaN if absent; with `evaluation` also the shares of right ones.

        `round` is the round of the run, for functions that ask for it.
        """
        ids, mask = prompts_of(sample)
        prompts = {"input_ids": ids, "attention_mask": mask, "reward_data": sample.data["reward_data"]}
        responses = responses_of(sample, torch.device("cpu"))
        states: list[TrainerState] = []
        if self._rounds is not None:
            epochs = [int(name.split("-")[0]) for name in sample.ids]
            states = [TrainerState.of(self._rounds, arguments["round"], epoch) for epoch in epochs]
        scored = self._scorer.score(prompts, responses, sample.data.get("episode_rewards"), states)
        failpoint("rl.reward")
        sums = scored.sums() | _length_sums(responses)
        if "turns" in sample.data:
            turns = sample.data["turns"]
            sums["turns"] = float(turns.sum()), float(len(turns))
        rewards = torch.from_numpy(scored.total)
        has_equal_rewards = equal_groups(rewards)
        if arguments.get("evaluation"):
            sums |= _pass_sums(scored)
        without_signal = [
            name for name, is_equal in zip(sample.ids, has_equal_rewards.tolist(), strict=True) if is_equal
        ]
        facts = {
            "shown": rollout_records(sample.ids, scored, self._shown),
            "without_signal": without_signal,
            "equal_groups": _equal_sums(rewards),
        }
        return RoleOutcome(packed_numbers(sample, {"rewards": scored.total}), sums, facts)


def _equal_sums(rewards: torch.Tensor) -> Sums:
    """Return the share of groups without a signal; a group with one reward or none doesn't count."""
    compared = compared_groups(rewards)
    if not compared.any():
        return {}
    equal_and_compared = equal_groups(rewards) & compared
    return {"equal_groups": (float(equal_and_compared.sum()), float(compared.sum()))}


def _pass_sums(scored: Scored) -> Sums:
    passed = scored.passed[scored.verified]
    prompts, samples = passed.shape
    if not prompts:
        return {}
    share_of_passes = passed.mean(1)
    sums: Sums = {"pass@1": (float(share_of_passes.sum()), float(prompts))}
    if samples > 1:
        has_pass = passed.any(1)
        sums[f"pass@{samples}"] = float(has_pass.sum()), float(prompts)
    return sums


def _length_sums(responses: Responses) -> Sums:
    count = float(len(responses.ended))
    tokens = float(responses.mask.sum())
    ended_count = float(responses.ended.sum())
    return {"response_tokens": (tokens, count), "truncated": (count - ended_count, count)}


class Advantage(Role):
    """Advantages of a job's algorithm.

    Args:
        rl: table of the job file.

    """

    def __init__(self, rl: RL) -> None:
        self._rl = rl
        self._recipe = rl.recipe
        self._advantages: Advantages | None = None
        """Function of rewards and lengths; None with a critic, whose values are the baseline."""
        if not rl.has_critic:
            self._advantages = create("advantages", rl.recipe.advantage, rl.advantage_options)
        self.kl = rl.kl
        """Coefficient of the divergence from the reference in the next batch's reward; `rl.kl_target` adapts it."""
        self._batch: tuple[object, tuple[str, ...]] | None = None
        """Step and ids of the batch that was rewarded last; None before the first."""
        self._kl_of_batch = rl.kl
        """Coefficient for the batch that was rewarded last, and again for that batch if its step is repeated."""

    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Compute advantages of all tokens, returns if there is a critic, and which responses are trained on.

        `step` is the number of the step: a repeated request for it gets the same answer.
        """
        batch = (arguments.get("step"), sample.ids)
        if batch != self._batch:
            self._batch = batch
            self._kl_of_batch = self.kl
        rewards = torch.tensor(sample.data["rewards"])
        rewards = rewards.view(len(sample.ids), -1)
        is_absent = rewards.isnan()
        has_equal_rewards = equal_groups(rewards)
        sums = _equal_sums(rewards)
        mask = sampled_mask(sample)
        divergence = self._divergence(sample, mask)
        columns = self._columns(sample, rewards, mask, divergence)
        if divergence is not None and self._rl.kl_target is not None:
            sums["kl_coefficient"] = self._kl_of_batch, 1.0
            mean = float(divergence.sum() / mask.sum())
            self.kl = adapted(self._kl_of_batch, mean, self._rl.kl_target, len(mask), self._rl.kl_horizon)
        groups_left_out = has_equal_rewards & self._recipe.drop_equal_groups
        left_out = groups_left_out[:, None] | (is_absent & self._rl.has_critic)
        is_trained_on = ~left_out.flatten()
        flags = packed_numbers(sample, {"kept": is_trained_on.numpy()})
        facts = {"advantages": _means_of_responses(sample, columns["advantages"], mask)}
        return RoleOutcome(packed_tokens(sample, columns).update(flags), sums, facts)

    def _divergence(self, sample: Sample, mask: torch.Tensor) -> torch.Tensor | None:
        """Return each token's divergence from the reference; None if it isn't subtracted from the reward."""
        if self._recipe.kl_place != "reward" or self._rl.reference == "none":
            return None
        key = "proximal_logprobs" if self._rl.scores_again else "logprobs"
        old_logprobs = tokens_of(sample, key, _CPU)
        reference = tokens_of(sample, "reference_logprobs", _CPU)
        estimate = ESTIMATORS[self._recipe.kl_estimator]
        return estimate(old_logprobs, reference) * mask

    def _columns(
        self,
        sample: Sample,
        rewards: torch.Tensor,
        mask: torch.Tensor,
        divergence: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Return the keys of tokens: advantages, and returns if there is a critic."""
        penalty = torch.zeros_like(mask)
        if divergence is not None:
            penalty = self._kl_of_batch * divergence
        lengths = mask.sum(1).clamp(min=1)  # An episode that failed before its first response has no token.
        if self._advantages is not None:
            groups = rewards.shape
            penalised = rewards - penalty.sum(1).view(groups)
            name = self._recipe.advantage
            of_responses = advantages_of(name, self._advantages, penalised, lengths.view(groups))
            of_responses = of_responses.to(mask).reshape(-1, 1)
            return {"advantages": of_responses.expand_as(mask)}
        by_response = rewards.flatten()
        values = tokens_of(sample, "values", _CPU)
        advantages, returns = self._generalized(by_response.nan_to_num(), -penalty, values, mask)
        is_rewarded = ~by_response.isnan()
        return {"advantages": whitened(advantages, mask * is_rewarded[:, None]), "returns": returns}

    def _generalized(
        self, by_response: torch.Tensor, by_token: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns; the policy's next token follows each, whatever an environment says between.

        Args:
            by_response: reward of each response, which its last token gets.
            by_token: reward of each token beside that, [responses, tokens].
            values: values before each token, of the same shape.
            mask: mask of the policy's own tokens, of the same shape.

        """
        order = mask.argsort(dim=1, descending=True, stable=True)  # The sampled tokens of a response, then the others.
        token_rewards = by_token.gather(1, order)
        last_tokens = (mask.sum(1).long() - 1).clamp(min=0)
        token_rewards[torch.arange(len(mask)), last_tokens] += by_response
        token_values = values.gather(1, order)
        sampled = mask.gather(1, order)
        critic = self._rl.critic
        advantages, returns = generalized_advantages(
            token_rewards, token_values, sampled, critic.discount, critic.gae_lambda
        )
        positions = order.argsort(1)
        return advantages.gather(1, positions), returns.gather(1, positions)


def _means_of_responses(sample: Sample, advantages: torch.Tensor, mask: torch.Tensor) -> dict[str, list[float]]:
    """Return the mean advantage of the tokens of each response, by the prompt's id."""
    means = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
    by_prompt = means.view(len(sample.ids), -1).tolist()
    return dict(zip(sample.ids, by_prompt, strict=True))
