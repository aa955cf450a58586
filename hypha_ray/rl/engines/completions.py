"""Interface of engines that generate in the place of the policy's own loop, and their results."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.rl.engines.native import Responses, Sampling
from hypha_ray.texts import counted

ROUNDING: Final = 1e-3
"""Most by which the rounding of an engine may raise a log-probability above 0."""
_MOST_LOGPROB = float(torch.finfo(torch.float32).max)
"""Largest size of a log-probability that is finite in single precision."""


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
            HyphaError: the engine can't.
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
        tokens = counted(len(response.ids), "token")
        return f"{tokens} of a response with {counted(len(response.logprobs), 'log-prob')}"
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
