"""Choice of the next token: settings, and random numbers that depend on the prompt alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from hypha_ray.config.tables.rl import RL
from hypha_ray.model.vocabulary import EVERY_ROW, Vocabulary


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
        scaled = sampling.vocabulary.known(logits / sampling.temperature)
        ids = _draw_ids(scaled, uniform, sampling)
    else:
        scaled = sampling.vocabulary.known(logits)
        ids = scaled.argmax(-1)
    logprobs = torch.log_softmax(scaled, -1)
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
