"""Interface of engines that generate in the place of the policy's own loop, and what comes of them."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.engines.sampling import Sampling

ROUNDING: Final = 1e-3
"""Most by which the rounding of an engine may raise a log-probability above 0."""
_MOST_LOGPROB = float(torch.finfo(torch.float32).max)
"""Largest size of a log-probability that is finite in single precision."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A response as an engine gave it."""

    ids: tuple[int, ...]
    """Token ids, the end token included."""
    logprobs: tuple[float, ...]
    """Log-probability of each of them."""
    version: str | None
    """Version of the weights that it was made with; None if the answer has none."""


class EngineUnableError(Exception):
    """The engine can't generate for a reason on this machine that may pass; the policy can in its place."""


class Engine(Protocol):
    """Way to responses of a model's weights."""

    name: str
    """Name in messages."""
    remedy: str
    """Remedy if its log-probabilities are other ones than the policy's."""

    def generate(
        self,
        model: Any,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
        keys: npt.NDArray[np.int64],
        sampling: Sampling,
        ends: Collection[int],
    ) -> Responses:
        """Respond to prompts that are padded on the left, by random numbers that their keys are the seed of.

        Raises:
            HyphaError: the engine can't.
            EngineUnableError: it can't now; the policy may generate itself.

        """
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


def unfit(response: Completion, known: Container[int]) -> str:
    """Return the reason why a model can't have made a response; empty if it can.

    Args:
        response: the response.
        known: ids that it may have.

    """
    if not response.ids or len(response.ids) != len(response.logprobs):
        return f"{len(response.ids)} tokens of a response with {len(response.logprobs)} log-probabilities"
    for token in response.ids:
        if type(token) is not int or token not in known:
            return f"a response with the token id {_shown(token)}, which model or tokenizer lack"
    for logprob in response.logprobs:
        if type(logprob) not in (int, float) or not -_MOST_LOGPROB <= logprob <= ROUNDING:
            return f"a response with the log-probability {_shown(logprob)}"
    return ""


def _shown(value: object) -> str:
    """Return a value of an answer as text of bounded length."""
    return repr(value)[:40] if not isinstance(value, int) or abs(value) < 10**30 else "of more than 30 digits"


def responses_of(
    ids: torch.Tensor, attention_mask: torch.Tensor, found: Sequence[Completion], ends: Collection[int]
) -> Responses:
    """Return responses as tensors, with their prompts before them.

    Args:
        ids: prompts padded on the left, [prompts, width].
        attention_mask: mask of their tokens, of the same shape.
        found: responses, the same number to each prompt and as neighbours.
        ends: ids of tokens that end a response.

    """
    samples = len(found) // len(ids)
    prompts, masks = (one.long().repeat_interleave(samples, 0) for one in (ids, attention_mask))
    tokens = torch.full((len(found), max(len(one.ids) for one in found)), min(ends))
    logprobs = torch.zeros(tokens.shape)
    mask = torch.zeros(tokens.shape)
    for row, one in enumerate(found):
        count = len(one.ids)
        tokens[row, :count], logprobs[row, :count] = torch.tensor(one.ids), torch.tensor(one.logprobs)
        mask[row, :count] = 1
    tokens, logprobs, mask = (one.to(ids.device) for one in (tokens, logprobs, mask))
    ended = torch.tensor([one.ids[-1] in ends for one in found], device=ids.device)
    return Responses(torch.cat([prompts, tokens], 1), torch.cat([masks, mask.long()], 1), mask, logprobs, ended)
