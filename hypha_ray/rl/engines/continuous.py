"""Generation by transformers' continuous batching: a response that ends gives its place in the batch to the next one.

The weights are those of the trained model itself. Prompts share the cache among their responses. Batches depend on the
memory that is free, so responses aren't reproducible bit for bit, and probabilities are equal to the policy's but for
rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hypha_ray.errors import ConfigError
from hypha_ray.model.loading.weights import silenced
from hypha_ray.rl.engines.completions import Completion, responses_of
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.engines.sampling import Sampling

_POLL_S = 1.0
"""Time after which the thread that generates is looked after."""
_PAGE = 16
"""Tokens of a page of the cache on a CPU."""
_BATCH_TOKENS = 1024
"""Largest number of tokens of a forward pass on a CPU, whose mask grows with it."""


class ContinuousEngine:
    """Continuous batching of a policy's model.

    Args:
        seed: seed of the run.

    """

    name = "continuous batching"
    remedy = "set rl.generation.engine to native"

    def __init__(self, seed: int) -> None:
        self._seed = seed

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
        prompts = [row[mask].tolist() for row, mask in zip(ids.cpu(), attention_mask.cpu().bool(), strict=True)]
        state = np.random.SeedSequence([self._seed, *keys.ravel().tolist()]).generate_state(1)
        own = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=own), silenced("ContinuousBatchingLogger"):
            try:
                outputs = _outputs(model, prompts, int(state[0]), sampling, ends)
            except Exception as error:  # Models and caches raise anything.
                line = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
                what = f"{type(model).__name__} can't generate by continuous batching"
                raise ConfigError("RL026", what, line, fix=self.remedy) from error
        found = [Completion(tuple(one.generated_tokens), tuple(one.logprobs), None) for one in outputs]
        return responses_of(ids, attention_mask, found, ends)

    def close(self) -> None:
        """Do nothing: no cache outlives a call."""


def _outputs(
    model: Any, prompts: Sequence[list[int]], seed: int, sampling: Sampling, ends: Collection[int]
) -> list[Any]:
    """Return transformers' outputs for all responses, those to one prompt as neighbours.

    All requests are there before the first batch, so that its contents don't depend on time.
    """
    manager = model.init_continuous_batching(
        _generation(model, sampling, ends), _batching(model, prompts, seed, sampling)
    )
    names = manager.add_requests(list(prompts), max_new_tokens=sampling.max_tokens)
    found: dict[str, Any] = {}
    manager.start()
    try:
        while len(found) < len(prompts) * sampling.samples:
            output = manager.get_result(timeout=_POLL_S)
            if output is None and not manager.is_running():
                raise RuntimeError("generation has ended early")
            if output is not None and output.error is not None:
                raise RuntimeError(output.error)
            if output is not None:
                found[output.request_id] = output
    finally:
        manager.stop(hard_stop=True)
        manager.destroy()
    children = [f"__child#{number}" for number in range(sampling.samples - 1)]
    return [found[f"{name}{child}"] for name in names for child in ("", *children)]


def _generation(model: Any, sampling: Sampling, ends: Collection[int]) -> GenerationConfig:
    """Return settings of which none is left to those that a model was saved with."""
    drawn = bool(sampling.temperature)
    chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or 0}
    return GenerationConfig(
        do_sample=drawn,
        **(chosen if drawn else {}),
        num_return_sequences=sampling.samples,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=sorted(ends),
        pad_token_id=min(ends),
        suppress_tokens=sampling.vocabulary.unknown(model.config.get_text_config().vocab_size) or None,
    )


def _batching(model: Any, prompts: Sequence[list[int]], seed: int, sampling: Sampling) -> ContinuousBatchingConfig:
    """Return settings of batches; without a GPU, whose free memory would be the limit, the cache is what they need."""
    sizes: dict[str, int] = {}
    if model.device.type == "cpu":
        pages = sum(-(-(len(prompt) + sampling.max_tokens) // _PAGE) + 1 for prompt in prompts) * sampling.samples
        sizes = {"page_size": _PAGE, "num_blocks": pages, "max_batch_tokens": _BATCH_TOKENS}
    flash = model.dtype in (torch.bfloat16, torch.float16)
    return ContinuousBatchingConfig(return_logprobs=True, seed=seed, auto_switch_to_flash=flash, **sizes)
