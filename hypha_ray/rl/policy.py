"""Model as a policy: responses as padded tensors, their log-probabilities, tokens that end a response, and its loss.

Packed samples are converted to the padded tensors that models take and are trained on, and back.

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

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.config.rl import RL
from hypha_ray.errors import ConfigError
from hypha_ray.model.tokenizers import EVERY_ROW, Vocabulary, all_end_tokens, vocabulary_of
from hypha_ray.plugins import create
from hypha_ray.rl.algorithms.policy_losses import (
    AGGREGATIONS,
    ESTIMATORS,
    LossInputs,
    PolicyLoss,
    Weights,
    checked,
    decoupled_weight,
    truncated_weight,
)
from hypha_ray.rl.dataflow.requests import Lengths, Meta, Packed, Sample
from hypha_ray.rl.engines.native import Responses, Sampling, accepted, generate, positions
from hypha_ray.rl.environments.rollouts import Trajectory
from hypha_ray.types import Samples, Sums


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
    is_token = np.arange(width) >= width - lengths[:, None]
    ids = np.zeros(is_token.shape, np.int64)
    ids[is_token] = sample.data[key]
    return ids, is_token.astype(np.int64)


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
    padded_values = _padded(sample.data[key], token_mask(sample))
    return padded_values.to(device)


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
    padded_values = np.zeros(mask.shape, packed.dtype)
    padded_values[mask] = packed
    return torch.from_numpy(padded_values)


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


class PolicyObjective:
    """Loss of a policy as the sum over tokens, and figures of it.

    Args:
        rl: table of the job file.

    """

    def __init__(self, rl: RL) -> None:
        self._rl = rl
        self._recipe = rl.recipe
        self._loss: PolicyLoss = create("rl_losses", rl.recipe.loss, rl.loss_options)

    def weights(self, rollout: Rollout) -> Weights:
        """Return the weight of each token, and the total that sums of losses are divided by."""
        aggregation = AGGREGATIONS[self._recipe.aggregation]
        responses = int(rollout.counted.sum())
        return aggregation(rollout.mask, responses, self._rl.generation.max_response_tokens)

    def loss(self, rollout: Rollout, weights: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, Sums]:
        """Return the weighted sum of token losses, and the figures of these tokens.

        Args:
            rollout: responses with advantages and log-probabilities.
            weights: weight of each token, [responses, tokens].
            scores: the trained policy's view of the responses.

        """
        rl = self._rl
        recipe = self._recipe
        mask = rollout.mask
        old_logprobs = scores.logprobs.detach() if rollout.old is None else rollout.old
        policy = checked(recipe.loss, self._loss, self._inputs(rollout, old_logprobs, scores))
        loss = policy.losses
        if rl.entropy:
            loss = loss - rl.entropy * scores.entropy
        figures = {"entropy": scores.entropy, **policy.figures}
        if rollout.reference is not None:
            divergence = ESTIMATORS[recipe.kl_estimator](scores.logprobs, rollout.reference)
            figures["kl"] = divergence
            if recipe.kl_place == "loss":
                loss = loss + rl.kl * divergence
        tokens = float(mask.sum())
        sums: Sums = {}
        for name, figure in figures.items():
            total = (figure.detach() * mask).sum()
            sums[name] = float(total), tokens
        if rollout.old is None:
            sums |= logprob_gap(old_logprobs, rollout.responses)
        return (loss * weights).sum(), sums

    def _inputs(self, rollout: Rollout, old_logprobs: torch.Tensor, scores: Scores) -> LossInputs:
        """Return what the policy's loss is made of."""
        behaviour = rollout.responses.logprobs
        return LossInputs(
            logprobs=scores.logprobs,
            old_logprobs=old_logprobs,
            behaviour_logprobs=behaviour,
            reference_logprobs=rollout.reference,
            advantages=rollout.advantages.expand_as(scores.logprobs),
            mask=rollout.mask,
            correction=self._correction(old_logprobs, behaviour) if self._rl.corrects else None,
            settings=self._rl,
        )

    def _correction(self, proximal: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
        """Return the importance weight of each token, π_proximal / π_sample with the job's cap."""
        cap = self._rl.behaviour_cap
        if self._rl.is_asynchronous or cap is None:
            return decoupled_weight(proximal, behaviour, cap)
        return truncated_weight(proximal, behaviour, cap)


def logprob_gap(logprobs: torch.Tensor, responses: Responses) -> Sums:
    """Return the figure of the mean distance between a policy's log-probabilities and those of sampling."""
    distances = (logprobs - responses.logprobs).abs() * responses.mask
    tokens = float(responses.mask.sum())
    return {"logprob_gap": (float(distances.sum()), tokens)}
