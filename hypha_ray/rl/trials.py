"""Check of a model's generation, before it is trained on what it generates.

Trial of a job's environment before the start: an episode of a few prompts, with the right answer as response.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from hypha_ray.config.rl import RL
from hypha_ray.errors import ConfigError
from hypha_ray.model.lora import CriticModel
from hypha_ray.model.vocabulary import vocabulary_of
from hypha_ray.rl.engines.continuous import ContinuousEngine
from hypha_ray.rl.engines.native import Completion, Responses, Sampling, draw, generate, responses_of, training_sampling
from hypha_ray.rl.environments.rollouts import EnvironmentRollouts, Integers, Trajectory
from hypha_ray.rl.policy import Policy, end_tokens
from hypha_ray.rl.rewards.response import records_of
from hypha_ray.texts import counted
from hypha_ray.types import Samples

_TOKENS = 8
"""Largest number of tokens of a response."""
_CLOSE = 1e-3
"""Largest difference of two log-probabilities that are equal but for rounding."""


def check_generation(model: Any, rl: RL, tokenizer: Any, prompts: Samples) -> None:
    """Compare log-probabilities at generation with those of each response by itself, without padding and cache.

    Raises:
        ConfigError: RL005, they differ: the model can't be trained on what it generates. RL014, the algorithm needs a
            critic, and none can be made of the model. RL026, the model can't generate by continuous batching.

    """
    sampling = training_sampling(rl)
    tokens = min(_TOKENS, sampling.max_tokens)
    if rl.has_critic:
        _check_critic(model, prompts)
    ids = torch.from_numpy(prompts.arrays["input_ids"])
    mask = torch.from_numpy(prompts.arrays["attention_mask"])
    policy = Policy(model, rl.generation.temperature, None, vocabulary_of(tokenizer))
    sampling = replace(sampling, samples=1, max_tokens=tokens, vocabulary=policy.vocabulary)
    ends = end_tokens(model, tokenizer)
    if rl.generation.engine == "continuous":
        responses = ContinuousEngine(0, short=0).generate(model, ids, mask, prompts.keys, sampling, ends)
    else:
        responses = generate(model, ids, mask, draw(0, prompts.keys, sampling), sampling, ends)
    for row in range(len(prompts)):
        response = _without_padding(responses, row)
        distances = (policy.logprobs(response) - response.logprobs).abs()
        largest = float(distances.max())
        if not largest <= _CLOSE:
            name = type(model).__name__
            raise ConfigError(
                "RL005",
                f"{name} can't be trained on what it generates: padding or cache change probabilities",
                f"log-probabilities {largest:.2g} apart",
                f"up to {_CLOSE:g}",
                "choose another model",
            )


@torch.no_grad()
def _check_critic(model: Any, prompts: Samples) -> None:
    """Value the states of some prompts."""
    ids = torch.from_numpy(prompts.arrays["input_ids"]).long()
    mask = torch.from_numpy(prompts.arrays["attention_mask"]).long()
    CriticModel(model)(input_ids=ids, attention_mask=mask, use_cache=False)


def _without_padding(responses: Responses, row: int) -> Responses:
    """Return a response without any padding."""
    all_tokens = responses.attention_mask[row].bool()
    response_tokens = responses.mask[row].bool()
    ids = responses.ids[row][all_tokens][None]
    logprobs = responses.logprobs[row][response_tokens][None]
    ended = responses.ended[row : row + 1]
    return Responses(ids, torch.ones_like(ids), torch.ones_like(logprobs), logprobs, ended)


def try_environment(
    rl: RL, tokenizer: Any, ends: Collection[int], positions: int | None, prompts: Samples
) -> list[str]:
    """Play an episode of each prompt.

    Args:
        rl: table of the job file, which names an environment.
        tokenizer: tokenizer of the run.
        ends: ids of tokens that end a response.
        positions: number of tokens that the model takes; None if it has no limit.
        prompts: the prompts.

    Returns:
        A note on what happened in the first episode.

    Raises:
        ConfigError: the environment can't be had; RL032, an episode fails.

    """
    records = records_of(prompts.arrays["reward_data"])
    masks = prompts.arrays["attention_mask"].astype(bool)
    token_ids = [ids[mask].tolist() for ids, mask in zip(prompts.arrays["input_ids"], masks, strict=True)]
    answers: dict[tuple[int, ...], list[int]] = {}
    for key, record in zip(prompts.keys.tolist(), records, strict=True):
        answer = tokenizer(str(record.get("answer", "")), add_special_tokens=False)["input_ids"]
        answers[tuple(key)] = [*answer, min(ends)]

    def respond(ids: Integers, mask: Integers, keys: Integers, sampling: Sampling) -> Responses:
        completions: list[Completion] = []
        for key in keys[:, :3].tolist():
            response = answers[tuple(key)][: sampling.max_tokens]
            completions.append(Completion(tuple(response), (0.0,) * len(response), None))
        return responses_of(torch.from_numpy(ids), torch.from_numpy(mask), completions, ends)

    rollouts = EnvironmentRollouts(rl, tokenizer, ends, positions)
    try:
        sampling = replace(training_sampling(rl), samples=1)
        trajectories = rollouts.play(token_ids, prompts.keys, records, sampling, respond)
    finally:
        rollouts.close()
    for trajectory in trajectories:
        if trajectory.episode.failure:
            _refuse(rl, trajectory)
    return [_note(rl, trajectories[0])]


def _refuse(rl: RL, trajectory: Trajectory) -> None:
    prompt = str(trajectory.episode.record["prompt"])[-80:]
    problem = f"environment {rl.environment} fails in an episode whose responses are the right answer"
    fix = f"mend it, or raise rl.episode.deadline_s; the prompt was {prompt!r}"
    raise ConfigError("RL032", problem, trajectory.episode.failure, "messages and rewards", fix)


def _note(rl: RL, trajectory: Trajectory) -> str:
    prompt = str(trajectory.episode.record["prompt"])[-80:]
    turns = counted(len(trajectory.episode.responses), "response")
    end = "was ended by it" if trajectory.done else "was ended by the limits of rl.episode"
    text = (
        f"environment {rl.environment} was tried with the right answer to {prompt!r}: the episode {end} after {turns}"
    )
    return f"{text}, with a reward of {trajectory.reward:g}"
