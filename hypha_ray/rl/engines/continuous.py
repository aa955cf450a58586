"""Generation by transformers' continuous batching: a response that ends gives its place in the batch to the next one.

The weights are those of the trained model itself. Prompts share the cache among their responses. Where batches depend
on the memory that is free, responses aren't reproducible bit for bit; probabilities are equal to the policy's but for
rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hypha_ray.errors import ConfigError
from hypha_ray.model.environment import free_gpu_bytes
from hypha_ray.model.weights import silenced
from hypha_ray.rl.engines.native import Completion, Responses, Sampling, draw, generate, responses_of, token_lists
from hypha_ray.texts import counted

PAGE = 16
"""Tokens of a page of the cache, except for weights of 16 bits on a GPU."""
SHORT = 16
"""Largest number of tokens of responses that the model's own loop makes: for fewer tokens it is as fast as batches."""
_MOST_CACHES = 2
"""Number of caches that are kept: one for training and one for evaluation."""
_BATCH_TOKENS = 1024
"""Largest number of tokens of a forward pass with a cache of known size; masks grow with it."""
_KEPT_SHARE = 0.1
"""Largest part of a GPU's free memory for a cache that stays: the rest is for training."""
_LEAST_FREE = 0.15
"""Part of the cache that has to be free for a new prompt, as transformers has it.

With that much more memory than a call needs, its batches are the same in a cache of any size.
"""


class PagedBatches:
    """Continuous batching of a model, with settings of sampling.

    Args:
        model: the model, in evaluation mode; its weights may change in place between calls.
        sampling: settings; `max_tokens` may be another one in a call.
        ends: ids of tokens that end a response.
        tokens: tokens of all responses and their prompts that are in the cache at the same time, rounded up to pages.

    """

    def __init__(self, model: Any, sampling: Sampling, ends: Collection[int], tokens: int) -> None:
        self._model = model
        self._tokens = tokens
        self._weights = _addresses(model)
        self._flash = model.dtype in (torch.bfloat16, torch.float16)
        self.stays = model.device.type == "cpu" or tokens * _token_bytes(model) <= _KEPT_SHARE * _free_bytes(model)
        """Whether the cache is small enough to stay between calls."""
        attention = model.config._attn_implementation
        try:
            self._manager = model.init_continuous_batching(
                _generation_config(model, sampling, ends), self._batching_config()
            )
            with _on_device(model):
                self._manager.warmup()
        finally:
            _restore_attention(model, attention)
        self._processor = self._manager.batch_processor

    def fits(self, model: Any, tokens: int) -> bool:
        """Whether the cache fits this model, whose weights haven't moved since, and this number of tokens."""
        return model is self._model and tokens <= self._tokens and _addresses(model) == self._weights

    @torch.no_grad()
    def respond(self, prompts: Sequence[list[int]], seed: int, sampling: Sampling) -> list[Any]:
        """Return transformers' outputs for all responses, those to one prompt as neighbours.

        All requests are added before the first batch, so that its contents don't depend on time. After an error the
        cache isn't cleared, so no call may follow.

        Args:
            prompts: token ids of each prompt.
            seed: seed of torch's random numbers, which the caller restores.
            sampling: the settings, with the `max_tokens` of this call.

        Raises:
            RuntimeError: a response is missing or has failed; the model's forward pass raises anything.

        """
        with self._attention(), _on_device(self._model):
            torch.manual_seed(seed)
            names = self._manager.add_requests(list(prompts), max_new_tokens=sampling.max_tokens)
            while self._processor.prepare_next_batch():
                self._processor._generation_step(self._model)
                self._processor.update_batch()
            self._processor.cache.reset()  # The next weights have other keys and values for the same prompts.
        outputs: dict[str, Any] = {}
        while (output := self._manager.get_result(timeout=0)) is not None:
            if output.error is not None:
                raise RuntimeError(output.error)
            outputs[output.request_id] = output
        expected_count = len(prompts) * sampling.samples
        if len(outputs) != expected_count:
            raise RuntimeError(f"{counted(len(outputs), 'response')} of {expected_count}")
        in_order: list[Any] = []
        for name in names:
            in_order.append(outputs[name])
            for number in range(sampling.samples - 1):
                in_order.append(outputs[f"{name}__child#{number}"])
        return in_order

    def _batching_config(self) -> ContinuousBatchingConfig:
        """Return settings of batches; a cache that doesn't stay gets the memory that is free."""
        sizes: dict[str, int] = {}
        if self.stays:
            page = page_of(self._model)
            sizes = {"page_size": page, "num_blocks": _pages_of(self._tokens, page), "max_batch_tokens": _BATCH_TOKENS}
        return ContinuousBatchingConfig(
            return_logprobs=True, seed=0, use_async_batching=False, auto_switch_to_flash=self._flash, **sizes
        )

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Context in which the model computes attention with the cache."""
        attention = self._model.config._attn_implementation
        try:
            self._manager.switch_to_cb_friendly_attn(self._model, self._flash)
            yield
        finally:
            _restore_attention(self._model, attention)


def page_of(model: Any) -> int:
    """Return the tokens of a page; flash attention, if it may be used, reads pages of transformers' size."""
    if model.device.type == "cuda" and model.dtype in (torch.bfloat16, torch.float16):
        return int(ContinuousBatchingConfig().page_size)
    return PAGE


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _pages_of(tokens: int, page: int) -> int:
    with_free = int(tokens / (1 - _LEAST_FREE))
    return _ceil_div(with_free, page) + 1


def _addresses(model: Any) -> list[int]:
    """Return the addresses of a model's weights, which graphs of a GPU hold."""
    return [parameter.data_ptr() for parameter in model.parameters()]


def _token_bytes(model: Any) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = 2 * config.num_hidden_layers * heads * width
    return int(values * model.dtype.itemsize)


def _free_bytes(model: Any) -> int:
    """Return the free memory of a GPU for this process, with the memory that torch has reserved but doesn't use."""
    device = model.device
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_gpu_bytes(device) + unused


def _on_device(model: Any) -> Any:
    """Return a context in which a model's GPU is the current one."""
    if model.device.type == "cuda":
        return torch.cuda.device(model.device)
    return nullcontext()


def _restore_attention(model: Any, attention: str) -> None:
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)


def _generation_config(model: Any, sampling: Sampling, ends: Collection[int]) -> GenerationConfig:
    """Return settings of generation, all of them: those left out would be taken from the saved model."""
    truncation: dict[str, Any] = {}
    if sampling.temperature:
        truncation = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or 0}
    rows = model.config.get_text_config().vocab_size
    return GenerationConfig(
        do_sample=bool(sampling.temperature),
        **truncation,
        num_return_sequences=sampling.samples,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=sorted(ends),
        pad_token_id=min(ends),
        suppress_tokens=sampling.vocabulary.unknown(rows) or None,
    )


class ContinuousEngine:
    """Continuous batching of a policy's model. The memory of its cache stays between calls, its contents don't.

    Args:
        seed: seed of the run.
        short: largest number of tokens of responses that the model's own loop makes.

    """

    name = "continuous batching"
    remedy = "set rl.generation.engine to native"

    def __init__(self, seed: int, short: int = SHORT) -> None:
        self._seed = seed
        self._short = short
        self._batches: dict[tuple[Any, ...], PagedBatches] = {}
        """Batches by their settings, the most recent at the end."""
        weakref.finalize(self, self._batches.clear)  # Transformers' objects want to end before the interpreter.

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
        prompts = token_lists(ids, attention_mask)
        seeds = np.random.SeedSequence([self._seed, *keys.ravel().tolist()])
        seed = int(seeds.generate_state(1)[0])
        gpus = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus), silenced("ContinuousBatchingLogger"):
            try:
                outputs = self._generate(model, prompts, seed, sampling, ends)
            except Exception as error:  # Models and caches raise anything.
                self.close()
                text = " ".join(str(error).split())
                line = f"{type(error).__name__}: {text}"[:300]
                problem = f"{type(model).__name__} can't generate by continuous batching"
                raise ConfigError("RL026", problem, line, fix=self.remedy) from error
        completions: list[Completion] = []
        for output in outputs:
            completions.append(Completion(tuple(output.generated_tokens), tuple(output.logprobs), None))
        return responses_of(ids, attention_mask, completions, ends)

    def _generate(
        self, model: Any, prompts: list[list[int]], seed: int, sampling: Sampling, ends: Collection[int]
    ) -> list[Any]:
        """Return transformers' outputs for all responses, and keep the cache that they were made with."""
        page = page_of(model)
        pages = 0
        for prompt in prompts:
            tokens = len(prompt) + sampling.max_tokens
            pages += _ceil_div(tokens, page) + 1
        all_tokens = pages * sampling.samples * page
        settings = (replace(sampling, max_tokens=0), tuple(sorted(ends)))
        batches = self._batches.pop(settings, None)
        if batches is None or not batches.fits(model, all_tokens):
            del batches  # Frees memory for the next cache.
            batches = PagedBatches(model, sampling, ends, all_tokens)
        outputs = batches.respond(prompts, seed, sampling)
        if batches.stays:
            self._batches[settings] = batches
        while len(self._batches) > _MOST_CACHES:
            oldest = next(iter(self._batches))
            del self._batches[oldest]
        return outputs

    def close(self) -> None:
        """Release caches."""
        self._batches.clear()
