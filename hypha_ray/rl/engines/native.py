"""Generation: its settings and results, the interface of engines, and the engine that is the trained model itself.

The model's own log-probabilities are those of the training pass. The next token is chosen by a job's settings and by
random numbers that depend on the prompt alone, in every engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicLayer

from hypha_ray.config.rl import RL
from hypha_ray.model.tokenizers import EVERY_ROW, Vocabulary
from hypha_ray.texts import counted

_LONG = 32
"""Least number of tokens for which memory for a whole response is reserved: shorter responses gain nothing by it."""
ROUNDING: Final = 1e-3
"""Most by which the rounding of an engine may raise a log-probability above 0."""
_MOST_LOGPROB = float(torch.finfo(torch.float32).max)
"""Largest size of a log-probability that is finite in single precision."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of a generation."""

    samples: int
    """Number of responses to each prompt."""
    max_tokens: int
    """Number of tokens after which a response is cut off."""
    temperature: float = 1.0
    """Divisor of logits; 0: the most probable token each time."""
    top_p: float = 1.0
    """Probability of the most probable tokens that are sampled from."""
    top_k: int | None = None
    """Number of most probable tokens that are sampled from; None: all."""
    vocabulary: Vocabulary = EVERY_ROW
    """Ids that stand for tokens; no other id is sampled, or has a probability."""


def training_sampling(rl: RL) -> Sampling:
    """Settings of responses that are trained on."""
    return Sampling(rl.group_size, rl.generation.max_response_tokens, rl.generation.temperature)


def evaluation_sampling(rl: RL) -> Sampling:
    """Settings of responses to validation prompts."""
    evaluation = rl.evaluation
    return Sampling(
        samples=evaluation.samples,
        max_tokens=rl.generation.max_response_tokens,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k,
    )


def draw(seed: int, keys: npt.NDArray[np.int64], sampling: Sampling) -> torch.Tensor:
    """Draw uniform numbers for each token of each response, from the seed and the prompt's key alone.

    Args:
        seed: seed of the run.
        keys: epoch, slice and index of each prompt, int64 [prompts, 3].
        sampling: number of responses and tokens.

    Returns:
        float64 [prompts × samples, tokens], responses to a prompt one after the other.

    """
    shape = (sampling.samples, sampling.max_tokens)
    uniform: list[npt.NDArray[np.float64]] = []
    for key in keys.tolist():
        seeds = np.random.SeedSequence([seed, *key])
        generator = np.random.Generator(np.random.Philox(seeds))
        uniform.append(generator.random(shape))
    return torch.from_numpy(np.concatenate(uniform))


def choose(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token of each row by inversion of the cumulative distribution.

    Args:
        logits: float32 [rows, vocabulary].
        uniform: numbers from 0 to 1, float64 [rows].
        sampling: temperature and truncation.

    Returns:
        Ids, and their log-probabilities at this temperature before any truncation; both [rows].

    """
    if sampling.temperature:
        scaled_logits = sampling.vocabulary.known(logits / sampling.temperature)
        ids = _draw_ids(scaled_logits, uniform, sampling)
    else:
        scaled_logits = sampling.vocabulary.known(logits)
        ids = scaled_logits.argmax(-1)
    logprobs = torch.log_softmax(scaled_logits, -1)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def draws_on_host(device: torch.device) -> bool:
    """Whether tokens are drawn on the CPU: replay mode needs cumulative sums of a fixed order, which GPUs lack."""
    return device.type == "cuda" and torch.are_deterministic_algorithms_enabled()


def _draw_ids(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    device = logits.device
    if draws_on_host(device):
        logits = logits.cpu()
        uniform = uniform.cpu()
    return _invert(_truncated(logits, sampling), uniform).to(device)


def _truncated(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Set logits of tokens that aren't sampled from to -∞."""
    no_ids = torch.empty(0, dtype=torch.long)
    if sampling.top_k is not None:
        logits = TopKLogitsWarper(sampling.top_k)(no_ids, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(no_ids, logits)
    return logits


def _invert(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    probabilities = logits.double().softmax(-1)
    cumulative = probabilities.cumsum(-1)
    thresholds = uniform[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, thresholds, right=True)
    return ids[:, 0].clamp(max=logits.shape[1] - 1)


class ReservedLayer(DynamicLayer):  # type: ignore[misc]
    """Layer whose keys and values are views of the beginning of larger buffers.

    Args:
        filled_layer: layer with the keys and values of prompts.
        tokens: number of tokens that may follow.

    """

    def __init__(self, filled_layer: DynamicLayer, tokens: int) -> None:
        super().__init__()
        self.lazy_initialization(filled_layer.keys, filled_layer.values)
        self._key_buffer = _enlarged(filled_layer.keys, tokens)
        self._value_buffer = _enlarged(filled_layer.values, tokens)
        self._set_views(filled_layer.keys.shape[-2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of further tokens, and return all."""
        old_length = self.get_seq_length()
        new_length = old_length + key_states.shape[-2]
        self._key_buffer[..., old_length:new_length, :] = key_states
        self._value_buffer[..., old_length:new_length, :] = value_states
        self._set_views(new_length)
        return self.keys, self.values

    def _set_views(self, length: int) -> None:
        self.keys = self._key_buffer[..., :length, :]
        self.values = self._value_buffer[..., :length, :]


def reserve(cache: Any, tokens: int) -> None:
    """Reserve memory for further tokens in the layers of a cache that are copied for each token otherwise.

    Layers of other kinds, such as those with a sliding window, stay as they are. So do all layers on a GPU, where the
    gain hasn't been measured.
    """
    layers = getattr(cache, "layers", [])
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer and layer.is_initialized and layer.keys.device.type == "cpu":
            layers[index] = ReservedLayer(layer, tokens)


def _enlarged(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a buffer that begins with these states."""
    *outer, length, width = states.shape
    buffer = states.new_empty(*outer, length + tokens, width)
    buffer[..., :length, :] = states
    return buffer


@dataclass(frozen=True, slots=True)
class Responses:
    """Responses to a batch of prompts; those to one prompt are neighbours."""

    ids: torch.Tensor
    """Token ids of prompt and response, int64 [responses, prompt + response]; prompts are padded on the left."""
    attention_mask: torch.Tensor
    """Mask of these tokens without padding, of the same shape."""
    mask: torch.Tensor
    """Mask of the response's tokens, the end token included, float32 [responses, response]."""
    logprobs: torch.Tensor
    """Log-probabilities of the response's tokens when they were sampled, float32 [responses, response]."""
    ended: torch.Tensor
    """Flags of responses that the model ended itself, bool [responses]."""

    @property
    def prompt_width(self) -> int:
        """Number of columns of the padded prompts."""
        return self.ids.shape[1] - self.mask.shape[1]


@torch.no_grad()
def generate(
    model: Any,
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    uniform: torch.Tensor,
    sampling: Sampling,
    ends: Collection[int],
) -> Responses:
    """Sample responses until each has ended or is as long as allowed.

    Args:
        model: the trained model, in evaluation mode.
        ids: prompts padded on the left, [prompts, width], on the model's device.
        attention_mask: mask of their tokens, of the same shape.
        uniform: random numbers as `draw` gives them, on the same device.
        sampling: settings.
        ends: ids of tokens that end a response.

    """
    ids = ids.long().repeat_interleave(sampling.samples, 0)
    mask = attention_mask.long().repeat_interleave(sampling.samples, 0)
    end_ids = torch.tensor(sorted(ends), device=ids.device)
    pad = min(ends)
    alive = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    cache = None
    inputs = ids
    logprobs: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    for step in range(sampling.max_tokens):
        logits, cache = _next_logits(model, inputs, mask, cache)
        if step == 0 and sampling.max_tokens >= _LONG:
            reserve(cache, sampling.max_tokens - 1)
        chosen_ids, logprob = choose(logits, uniform[:, step], sampling)
        chosen_ids = torch.where(alive, chosen_ids, pad)
        masks.append(alive)
        logprobs.append(logprob * alive)
        ids = torch.cat([ids, chosen_ids[:, None]], 1)
        mask = torch.cat([mask, alive[:, None].long()], 1)
        inputs = ids if cache is None else chosen_ids[:, None]
        alive = alive & ~torch.isin(chosen_ids, end_ids)
        if not alive.any():
            break
    return Responses(
        ids=ids,
        attention_mask=mask,
        mask=torch.stack(masks, 1).float(),
        logprobs=torch.stack(logprobs, 1),
        ended=~alive,
    )


def _next_logits(model: Any, inputs: torch.Tensor, mask: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """Return the logits after the last token, and the cache with that token; None for a model without such a cache."""
    position_ids = positions(mask)[:, -inputs.shape[1] :]
    options = accepted(model, position_ids, 1)
    output = model(input_ids=inputs, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
    logits = output.logits[:, -1]
    return logits.float(), getattr(output, "past_key_values", None)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Positions of tokens in rows that are padded on the left."""
    positions_before = mask.cumsum(1) - 1
    return positions_before.clamp(min=0)


def accepted(model: Any, position_ids: torch.Tensor, logits_to_keep: int) -> dict[str, Any]:
    """Return the keywords for positions and for the number of last logits, as far as a model's forward has them."""
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {}
    if "position_ids" in parameters:
        options["position_ids"] = position_ids
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = logits_to_keep
    return options


@dataclass(frozen=True, slots=True)
class Completion:
    """Response of an engine, with its numbers unchanged."""

    ids: tuple[int, ...]
    """Token ids, the end token included."""
    logprobs: tuple[float, ...]
    """Log-probability of each of them."""
    version: str | None
    """Version of the weights that made the response; None if the answer has none."""


class EngineUnableError(Exception):
    """The engine can't generate at present, for a reason on this machine; the policy can instead."""


class Engine(Protocol):
    """Generator of responses by a model's weights."""

    name: str
    """Name in messages."""
    remedy: str
    """Remedy in messages if the engine's log-probabilities differ from the policy's."""

    def generate(
        self,
        model: Any,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
        keys: npt.NDArray[np.int64],
        sampling: Sampling,
        ends: Collection[int],
    ) -> Responses:
        """Respond to prompts that are padded on the left; their keys are the seeds of random numbers.

        Raises:
            HyphaError: the engine can't generate.
            EngineUnableError: it can't now; the policy may generate itself.

        """
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


def unfit(response: Completion, vocabulary: Container[int]) -> str:
    """Return the reason why a model can't have made a response; empty if it can.

    Args:
        response: the response.
        vocabulary: ids that it may have.

    """
    if not response.ids or len(response.ids) != len(response.logprobs):
        tokens_text = counted(len(response.ids), "token")
        return f"{tokens_text} of a response with {counted(len(response.logprobs), 'log-prob')}"
    for token in response.ids:
        if type(token) is not int or token not in vocabulary:
            return f"a response with the token id {_short_text(token)}, which model or tokenizer lack"
    for logprob in response.logprobs:
        if type(logprob) not in (int, float) or not -_MOST_LOGPROB <= logprob <= ROUNDING:
            return f"a response with the log-probability {_short_text(logprob)}"
    return ""


def _short_text(value: object) -> str:
    """Return a value of an answer as text of bounded length."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "of more than 30 digits"
    return repr(value)[:40]


def token_lists(ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    """Return the token ids of prompts without padding; arguments as in `responses_of`."""
    masks = attention_mask.cpu().bool()
    return [row[mask].tolist() for row, mask in zip(ids.cpu(), masks, strict=True)]


def responses_of(
    ids: torch.Tensor, attention_mask: torch.Tensor, completions: Sequence[Completion], ends: Collection[int]
) -> Responses:
    """Return responses as tensors, with their prompts before them.

    Args:
        ids: prompts padded on the left, [prompts, width].
        attention_mask: mask of their tokens, of the same shape.
        completions: responses, the same number to each prompt and as neighbours.
        ends: ids of tokens that end a response.

    """
    device = ids.device
    samples = len(completions) // len(ids)
    prompts = ids.long().repeat_interleave(samples, 0)
    prompt_mask = attention_mask.long().repeat_interleave(samples, 0)
    longest = max(len(completion.ids) for completion in completions)
    tokens = torch.full((len(completions), longest), min(ends))
    logprobs = torch.zeros(tokens.shape)
    mask = torch.zeros(tokens.shape)
    for row, completion in enumerate(completions):
        count = len(completion.ids)
        tokens[row, :count] = torch.tensor(completion.ids)
        logprobs[row, :count] = torch.tensor(completion.logprobs)
        mask[row, :count] = 1
    mask = mask.to(device)
    return Responses(
        ids=torch.cat([prompts, tokens.to(device)], 1),
        attention_mask=torch.cat([prompt_mask, mask.long()], 1),
        mask=mask,
        logprobs=logprobs.to(device),
        ended=torch.tensor([completion.ids[-1] in ends for completion in completions], device=device),
    )
