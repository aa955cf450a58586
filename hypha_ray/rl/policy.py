"""Model as a policy: responses that it samples, their log-probabilities, tokens that end a response, and its loss."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hypha_ray.config.rl import RL
from hypha_ray.errors import ConfigError
from hypha_ray.model.loading.tokenizer import all_end_tokens
from hypha_ray.model.vocabulary import EVERY_ROW, Vocabulary, vocabulary_of
from hypha_ray.plugins import create
from hypha_ray.rl.algorithms.losses import AGGREGATIONS, ESTIMATORS, Weights, decoupled_weight, truncated_weight
from hypha_ray.rl.algorithms.policy_losses import LossInputs, PolicyLoss, checked
from hypha_ray.rl.engines.native import Responses, Sampling, accepted, generate, positions
from hypha_ray.rl.packing import Rollout
from hypha_ray.types import Sums


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a response, as far as the model can sample them.

    They are the end tokens of the tokenizer, of the model's generation settings, and of the answers in prepared data.

    Raises:
        ConfigError: RL004, there is none.

    """
    rows = model.config.get_text_config().vocab_size
    vocabulary = vocabulary_of(tokenizer)
    ends: set[int] = set()
    for token in all_end_tokens(model, tokenizer):
        if token < rows and token in vocabulary:
            ends.add(token)
    if not ends:
        fix = "name a tokenizer with an end token in preprocessor.repository, or set eos_token_id in [model.config]"
        raise ConfigError("RL004", "neither tokenizer nor model has a token that ends a response", fix=fix)
    return frozenset(ends)


class Scores(NamedTuple):
    """Scores of sampled responses by a model, float32 [responses, tokens]; padding has scores, too."""

    logprobs: torch.Tensor
    """Log-probability of each token."""
    entropy: torch.Tensor
    """Entropy of the distribution that each token was drawn from."""


class Policy:
    """Policy at a temperature.

    Args:
        model: a causal language model of transformers.
        temperature: divisor of logits.
        autocast: dtype of mixed precision; None: full precision.
        vocabulary: ids that stand for tokens; the others have no probability.

    """

    def __init__(
        self,
        model: Any,
        temperature: float,
        autocast: torch.dtype | None,
        vocabulary: Vocabulary = EVERY_ROW,
    ) -> None:
        self.model = model
        self._temperature = temperature
        self._autocast = autocast
        self.vocabulary = vocabulary

    def of(self, model: Any) -> Policy:
        """Return the policy of another model with the same settings."""
        return Policy(model, self._temperature, self._autocast, self.vocabulary)

    def sample(
        self, ids: torch.Tensor, mask: torch.Tensor, uniform: torch.Tensor, sampling: Sampling, ends: Collection[int]
    ) -> Responses:
        """Generate responses, as `generate`; tokens outside of the policy's vocabulary are never sampled."""
        sampling = replace(sampling, vocabulary=self.vocabulary)
        with self._precision():
            return generate(self.model, ids, mask, uniform, sampling, ends)

    def score(self, responses: Responses, entropy_gradient: bool = False) -> Scores:
        """Compute log-probabilities and entropies of responses by one forward pass.

        Args:
            responses: responses of this policy or of another one.
            entropy_gradient: the entropies have a gradient, at the price of memory for it.

        """
        length = responses.mask.shape[1]
        options = accepted(self.model, positions(responses.attention_mask), length + 1)
        with self._precision():
            output = self.model(
                input_ids=responses.ids, attention_mask=responses.attention_mask, use_cache=False, **options
            )
        logits = output.logits[:, -length - 1 : -1].float()
        logits = self.vocabulary.known(logits / self._temperature)
        distribution = torch.log_softmax(logits, -1)
        tokens = responses.ids[:, -length:, None]
        logprobs = distribution.gather(2, tokens)[..., 0]
        if not entropy_gradient:
            distribution = distribution.detach()
        entropy = -(distribution.exp() * distribution).sum(-1)
        return Scores(logprobs, entropy)

    @torch.no_grad()
    def logprobs(self, responses: Responses) -> torch.Tensor:
        """Return log-probabilities without a gradient."""
        return self.score(responses).logprobs

    def _precision(self) -> AbstractContextManager[Any]:
        return mixed_precision(self.model.device, self._autocast)


def mixed_precision(device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context in which models compute in mixed precision; None: in full precision."""
    return torch.autocast(device.type, autocast, enabled=autocast is not None)


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
