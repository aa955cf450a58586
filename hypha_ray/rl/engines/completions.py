"""Interface of engines that generate in the place of the policy's own loop, and what comes of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.engines.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Completion:
    """A response as an engine gave it."""

    ids: tuple[int, ...]
    """Token ids, the end token included."""
    logprobs: tuple[float, ...]
    """Log-probability of each of them."""
    version: str | None
    """Version of the weights that it was made with; None if the answer has none."""


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

        """
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


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
    logprobs, mask = torch.zeros(tokens.shape), torch.zeros(tokens.shape)
    for row, one in enumerate(found):
        count = len(one.ids)
        tokens[row, :count], logprobs[row, :count] = torch.tensor(one.ids), torch.tensor(one.logprobs)
        mask[row, :count] = 1
    tokens, logprobs, mask = (one.to(ids.device) for one in (tokens, logprobs, mask))
    ended = torch.tensor([one.ids[-1] in ends for one in found], device=ids.device)
    return Responses(torch.cat([prompts, tokens], 1), torch.cat([masks, mask.long()], 1), mask, logprobs, ended)
