"""Conversion between packed samples and the padded tensors that models take and are trained on.

key                       sequences of an id     elements
prompts                   1                      token ids of the prompt
keys                      1                      epoch, slice and index of the prompt
reward_data               1                      bytes of its record
responses                 group                  token ids of the response, the end token included
logprobs                  group                  log-probability of each of them when it was sampled
ended                     group                  one flag: the model ended the response itself
rewards                   group                  one number: NaN if absent
kept                      group                  one flag: the response is trained on
contexts                  group                  token ids before a conversation with an environment, for the prompt
sampled                   group                  flags of the tokens of that conversation that the policy has sampled
episode_rewards, turns    group                  one number: reward by the environment, and responses of the policy
values, advantages and other log-probabilities: as logprobs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.rl.dataflow.sample import Lengths, Meta, Packed, Sample
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.environments.rollouts import Trajectory
from hypha_ray.types import Samples


def sample_of(batch: Samples) -> Sample:
    """Pack a batch of prompts of the dataset; ids are made of the prompts' keys."""
    mask = batch.arrays["attention_mask"].astype(bool)
    tokens = mask.sum(1).tolist()
    ids = prompt_ids(batch.keys)
    ones: Lengths = ((1,),) * len(ids)
    lengths = _grouped(tokens, 1)
    data = {
        "prompts": batch.arrays["input_ids"][mask],
        "keys": batch.keys,
        "reward_data": batch.arrays["reward_data"],
    }
    return Sample(Meta(ids, {"prompts": lengths, "keys": ones, "reward_data": ones}), data)


def prompt_ids(keys: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """Return the ids of prompts, which are made of their keys, int64 [prompts, 3]."""
    return tuple("-".join(map(str, key)) for key in keys.tolist())


def prompts_of(sample: Sample) -> tuple[Packed, Packed]:
    """Return the prompts padded on the left, int64 [prompts, longest], and the mask of their tokens."""
    return _padded_left(sample, "prompts")


def _contexts_of(sample: Sample) -> tuple[Packed, Packed]:
    """Return what is before each response, int64 [responses, longest], and the mask of its tokens."""
    if "contexts" in sample.data:
        return _padded_left(sample, "contexts")
    group_sizes = [len(group) for group in sample.meta.lengths["responses"]]
    ids, masks = prompts_of(sample)
    return np.repeat(ids, group_sizes, 0), np.repeat(masks, group_sizes, 0)


def _padded_left(sample: Sample, key: str) -> tuple[Packed, Packed]:
    lengths = np.array(sample.meta.flat(key))
    width = int(lengths.max())
    mask = np.arange(width) >= width - lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = sample.data[key]
    return ids, mask.astype(np.int64)


def packed_responses(ids: Sequence[str], responses: Responses, group: int) -> Sample:
    """Pack responses to prompts, `group` to each."""
    mask = responses.mask.bool()
    tokens = responses.ids[:, responses.prompt_width :]
    lengths = _grouped(mask.sum(1).tolist(), group)
    ones = ((1,) * group,) * len(ids)
    meta = Meta(tuple(ids), {"responses": lengths, "logprobs": lengths, "ended": ones})
    data = {
        "responses": tokens[mask].cpu().numpy(),
        "logprobs": responses.logprobs[mask].cpu().numpy(),
        "ended": responses.ended.cpu().numpy(),
    }
    return Sample(meta, data)


def packed_episodes(ids: Sequence[str], trajectories: Sequence[Trajectory], group: int) -> Sample:
    """Pack conversations with an environment, `group` to each prompt."""
    lengths = _grouped([len(trajectory.tokens) for trajectory in trajectories], group)
    contexts = _grouped([len(trajectory.opening) for trajectory in trajectories], group)
    ones: Lengths = ((1,) * group,) * len(ids)
    numbers = dict.fromkeys(("ended", "episode_rewards", "turns"), ones)
    tokens = dict.fromkeys(("responses", "logprobs", "sampled"), lengths)
    data = {
        "contexts": _joined(trajectories, "opening", np.int64),
        "responses": _joined(trajectories, "tokens", np.int64),
        "logprobs": _joined(trajectories, "logprobs", np.float32),
        "sampled": _joined(trajectories, "sampled", np.bool_),
        "ended": np.array([trajectory.done for trajectory in trajectories]),
        "episode_rewards": np.array([trajectory.reward for trajectory in trajectories]),
        "turns": np.array([len(trajectory.episode.responses) for trajectory in trajectories]),
    }
    return Sample(Meta(tuple(ids), {**tokens, "contexts": contexts, **numbers}), data)


def _joined(trajectories: Sequence[Trajectory], name: str, dtype: Any) -> Packed:
    values: list[Any] = []
    for trajectory in trajectories:
        values += getattr(trajectory, name)
    return np.array(values, dtype)


def packed_tokens(sample: Sample, columns: Mapping[str, torch.Tensor]) -> Sample:
    """Pack values of the tokens of each response, [responses, tokens], by their keys."""
    lengths = sample.meta.lengths["responses"]
    mask = torch.from_numpy(token_mask(sample))
    data: dict[str, Packed] = {}
    for key, values in columns.items():
        on_host = values.detach().cpu()
        data[key] = on_host[mask].numpy()
    return Sample(Meta(sample.ids, dict.fromkeys(columns, lengths)), data)


def packed_numbers(sample: Sample, columns: Mapping[str, Packed]) -> Sample:
    """Pack one value for each response, in the order of the responses, by their keys."""
    ones = sample.meta.lengths["ended"]
    data = {key: numbers.ravel() for key, numbers in columns.items()}
    return Sample(Meta(sample.ids, dict.fromkeys(columns, ones)), data)


def tokens_of(sample: Sample, key: str, device: torch.device) -> torch.Tensor:
    """Return values of the tokens of each response, padded with zeros on the right, [responses, tokens]."""
    padded = _padded(sample.data[key], token_mask(sample))
    return padded.to(device)


def responses_of(sample: Sample, device: torch.device) -> Responses:
    """Return responses as tensors again, with their prompts before them."""
    ids, masks = _contexts_of(sample)
    prompts = torch.from_numpy(ids).to(device)
    prompt_mask = torch.from_numpy(masks).to(device)
    mask = torch.from_numpy(token_mask(sample)).to(device)
    tokens = tokens_of(sample, "responses", device)
    return Responses(
        ids=torch.cat([prompts, tokens], 1),
        attention_mask=torch.cat([prompt_mask, mask.long()], 1),
        mask=sampled_mask(sample).to(device),
        logprobs=tokens_of(sample, "logprobs", device),
        ended=torch.tensor(sample.data["ended"]).to(device),
    )


def token_mask(sample: Sample) -> npt.NDArray[np.bool_]:
    """Return the mask of the tokens of each response, [responses, tokens]."""
    lengths = np.array(sample.meta.flat("responses"))
    mask: npt.NDArray[np.bool_] = np.arange(lengths.max()) < lengths[:, None]
    return mask


def sampled_mask(sample: Sample) -> torch.Tensor:
    """Return the mask of the tokens of each response that the policy has sampled, float32 [responses, tokens]."""
    mask = token_mask(sample)
    if "sampled" in sample.data:
        mask[mask] = sample.data["sampled"]
    return torch.from_numpy(mask).float()


def _grouped(lengths: list[int], group: int) -> Lengths:
    starts = range(0, len(lengths), group)
    return tuple(tuple(lengths[start : start + group]) for start in starts)


def _padded(packed: Packed, mask: npt.NDArray[np.bool_]) -> torch.Tensor:
    padded = np.zeros(mask.shape, packed.dtype)
    padded[mask] = packed
    return torch.from_numpy(padded)


@dataclass(frozen=True, slots=True)
class Rows:
    """Responses to a batch of prompts, those to one prompt as neighbours."""

    responses: Responses
    mask: torch.Tensor
    """Mask of the tokens that are trained on."""

    def __len__(self) -> int:
        return len(self.mask)

    def parts(self, count: int, group: int) -> Iterator[Self]:
        """Cut into `count` parts along the groups, or into fewer if there are fewer groups."""
        groups = len(self) // group
        groups_of_part = -(-groups // count)
        size = groups_of_part * group
        for start in range(0, len(self), size):
            yield self.rows(slice(start, start + size))

    def rows(self, rows: slice | torch.Tensor) -> Self:
        """Return some of the responses."""
        columns: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Responses):
                tensors = {column.name: getattr(value, column.name)[rows] for column in fields(value)}
                columns[field.name] = Responses(**tensors)
            else:
                columns[field.name] = None if value is None else value[rows]
        return type(self)(**columns)


@dataclass(frozen=True, slots=True)
class Rollout(Rows):
    """Responses that a policy is trained on."""

    advantages: torch.Tensor
    """Advantage of each token, or of each response as [responses, 1]."""
    old: torch.Tensor | None
    """Log-probabilities that ratios are taken to; None: the log-probabilities of the policy in training."""
    reference: torch.Tensor | None
    """Log-probabilities of the reference; None without one."""
    counted: torch.Tensor
    """Flags of responses that a mean over responses is of, [responses]; some may be masked."""


@dataclass(frozen=True, slots=True)
class Valued(Rows):
    """Responses that a critic is trained on."""

    old: torch.Tensor
    """Values that advantages were computed with."""
    returns: torch.Tensor
    """Values to learn."""
