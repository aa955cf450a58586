"""Model as a policy: responses that it samples, log-probabilities of its tokens, and tokens that end a response."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hypha_ray.errors import ConfigError
from hypha_ray.model.loading.tokenizer import all_end_tokens
from hypha_ray.model.vocabulary import EVERY_ROW, Vocabulary, vocabulary_of
from hypha_ray.rl.engines.native import Responses, accepted, generate, positions
from hypha_ray.rl.engines.sampling import Sampling


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
