"""Generation by transformers' continuous batching: a response that ends gives its place in the batch to the next one.

The weights are those of the trained model itself. Prompts share the cache among their responses. Where batches depend
on the memory that is free, responses aren't reproducible bit for bit; probabilities are equal to the policy's but for
rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.errors import ConfigError
from hypha_ray.model.loading.weights import silenced
from hypha_ray.rl.engines.completions import Completion, responses_of
from hypha_ray.rl.engines.native import Responses, generate
from hypha_ray.rl.engines.paged import PagedBatches, page_of
from hypha_ray.rl.engines.sampling import Sampling, draw

SHORT = 16
"""Largest number of tokens of responses that the model's own loop makes: so few save no more than batches cost."""
_KEPT = 2
"""Settings of sampling whose caches are kept: those of training and of evaluation."""


class ContinuousEngine:
    """Continuous batching of a policy's model. Its cache stays between calls, and nothing that is in it.

    Args:
        seed: seed of the run.
        short: largest number of tokens of responses that the model's own loop makes.

    """

    name = "continuous batching"
    remedy = "set rl.generation.engine to native"

    def __init__(self, seed: int, short: int = SHORT) -> None:
        self._seed = seed
        self._short = short
        self._kept: dict[tuple[Any, ...], PagedBatches] = {}
        """Batches by their settings, those used last at the end."""
        weakref.finalize(self, self._kept.clear)  # Transformers' objects want to end before the interpreter.

    def generate(
        self,
        model: Any,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
        keys: npt.NDArray[np.int64],
        sampling: Sampling,
        ends: Collection[int],
    ) -> Responses:
        """Respond to prompts.

        Args:
            model: the model, in evaluation mode.
            ids: prompts padded on the left, [prompts, width].
            attention_mask: mask of their tokens, of the same shape.
            keys: epoch, slice and index of each prompt, which the seed is made of.
            sampling: settings; log-probabilities are those after any truncation.
            ends: ids of tokens that end a response.

        Raises:
            ConfigError: RL026, the model can't generate so.

        """
        if sampling.max_tokens <= self._short:
            uniform = draw(self._seed, keys, sampling).to(ids.device)
            return generate(model, ids, attention_mask, uniform, sampling, ends)
        prompts = [row[mask].tolist() for row, mask in zip(ids.cpu(), attention_mask.cpu().bool(), strict=True)]
        state = np.random.SeedSequence([self._seed, *keys.ravel().tolist()]).generate_state(1)
        own = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=own), silenced("ContinuousBatchingLogger"):
            try:
                outputs = self._outputs(model, prompts, int(state[0]), sampling, ends)
            except Exception as error:  # Models and caches raise anything.
                self.close()
                line = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
                what = f"{type(model).__name__} can't generate by continuous batching"
                raise ConfigError("RL026", what, line, fix=self.remedy) from error
        found = [Completion(tuple(one.generated_tokens), tuple(one.logprobs), None) for one in outputs]
        return responses_of(ids, attention_mask, found, ends)

    def _outputs(
        self, model: Any, prompts: list[list[int]], seed: int, sampling: Sampling, ends: Collection[int]
    ) -> list[Any]:
        """Return transformers' outputs for all responses, and keep the cache that they were made with."""
        page = page_of(model)
        pages = sum(-(-(len(prompt) + sampling.max_tokens) // page) + 1 for prompt in prompts) * sampling.samples
        settings = (replace(sampling, max_tokens=0), tuple(sorted(ends)))
        batches = self._kept.pop(settings, None)
        if batches is None or not batches.fits(model, pages * page):
            del batches  # Its memory is wanted for the next one.
            batches = PagedBatches(model, sampling, ends, pages * page)
        outputs = batches.respond(prompts, seed, sampling)
        if batches.stays:
            self._kept[settings] = batches
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return outputs

    def close(self) -> None:
        """Release caches."""
        self._kept.clear()
