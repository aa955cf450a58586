"""Rewards of responses: texts of token ids, a weighted sum of reward functions, and records of rollouts.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hypha_ray.config.tables.rewards import JUDGE, MODEL, Reward
from hypha_ray.config.tables.rl import RL
from hypha_ray.errors import ConfigError
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.reward_data import records_of
from hypha_ray.rl.rewards.calls import LARGEST, functions_of, limit_of
from hypha_ray.rl.rewards.evaluators import Evaluator, InPlace, Processes, Together
from hypha_ray.rl.rewards.judge import JudgeCalls
from hypha_ray.rl.rewards.response import Response
from hypha_ray.types import Arrays, Sums


@dataclass(frozen=True, slots=True)
class Scored:
    """Rewards of responses, float64 [prompts, samples]; NaN: absent."""

    total: npt.NDArray[np.float64]
    """Weighted sum."""
    parts: dict[str, npt.NDArray[np.float64]]
    """Reward of each function before weighting, by name; NaN for functions of other tasks, too."""
    passed: npt.NDArray[np.bool_]
    """Flags of responses to which the first function of their task gives 1, the reward of a right answer."""
    verified: npt.NDArray[np.bool_]
    """Flags of prompts whose first function tells right from wrong, [prompts]: a reward model doesn't."""
    responses: tuple[Response, ...]
    """Responses to the first prompt, then those to the next one."""

    def sums(self) -> Sums:
        """Return means over the responses whose reward is there, and the share of those without one."""
        found = {"reward": _sum(self.total)}
        if len(self.parts) > 1:
            found |= {f"reward/{name}": _sum(part) for name, part in self.parts.items()}
        absent = float((~np.isfinite(self.total)).sum())
        return found | ({"absent_rewards": (absent, float(self.total.size))} if absent else {})


class Scorer:
    """Reward functions of a job, and the tokenizer that makes texts for them.

    Args:
        rl: table of the job file.
        tokenizer: tokenizer of the run.
        model: way to the scores of the reward model; None: no function needs one.

    Raises:
        ConfigError: a function is unknown or can't be loaded.

    """

    def __init__(self, rl: RL, tokenizer: Any, model: Evaluator | None = None) -> None:
        self._names = rl.reward.functions
        self._tasks = rl.reward.by_task
        self._weights = np.array(rl.reward.weights or [1.0] * len(self._names))
        self._judge = JudgeCalls(rl.reward.judge, self._tasks) if JUDGE in self._names else None
        self._evaluator = evaluator_of(rl.reward, {JUDGE: self._judge, MODEL: model})
        self._tokenizer = tokenizer
        self._longest = rl.generation.max_response_tokens

    def score(self, prompts: Arrays, responses: Responses) -> Scored:
        """Compute the rewards of all responses to a batch of prompts.

        Raises:
            ConfigError: RWD001, a function failed; RWD002, not one response of the batch got a reward.

        """
        given = tuple(self._responses(prompts, responses))
        size = len(prompts["input_ids"])
        rewards = np.array(self._evaluator.rewards(given))
        parts = {name: rewards[:, place].reshape(size, -1) for place, name in enumerate(self._names)}
        own = [functions_of(one, self._tasks, self._names) for one in given]
        theirs = np.array([[name in names for name in self._names] for names in own])
        total = np.where(theirs & (self._weights != 0), rewards * self._weights, 0.0).sum(1)  # 0 · NaN isn't 0.
        total[~(np.abs(total) <= LARGEST)] = np.nan
        first = [names[0] for names in own]
        passed = rewards[np.arange(len(given)), [self._names.index(name) for name in first]] >= 1
        verified = np.array([name != MODEL for name in first]).reshape(size, -1)[:, 0]
        scored = Scored(total.reshape(size, -1), parts, passed.reshape(size, -1), verified, given)
        if not np.isfinite(scored.total).any():
            fix = "look at what the functions give for a response of this dataset, and at rl.reward.deadline_s"
            if self._judge is not None and self._judge.trouble:
                fix = f"see to the judge: {self._judge.trouble}"
            raise ConfigError("RWD002", "no response of a batch got a reward", ", ".join(parts), "finite numbers", fix)
        return scored

    def check(self, prompts: Arrays) -> None:
        """Try the functions on a right answer to each prompt.

        Raises:
            ConfigError: RWD001, a function failed.

        """
        pairs = zip(self._prompts(prompts), records_of(prompts["reward_data"]), strict=True)
        for text, data in pairs:  # Each by itself: a function that fails for one of many responses ends no run.
            self._evaluator.rewards([Response(text, str(data.get("answer", "")), (), True, data, self._longest)])

    def _prompts(self, prompts: Arrays) -> list[str]:
        rows = zip(prompts["input_ids"], prompts["attention_mask"].astype(bool), strict=True)
        return [self._text(ids[mask]) for ids, mask in rows]

    def _responses(self, prompts: Arrays, responses: Responses) -> Iterator[Response]:
        width = responses.prompt_width
        samples = len(responses.ids) // len(prompts["input_ids"])
        ids = responses.ids[:, width:].cpu().numpy()
        masks = responses.mask.cpu().numpy().astype(bool)
        texts = self._prompts(prompts)
        records = records_of(prompts["reward_data"])
        for row, (tokens, mask, ended) in enumerate(zip(ids, masks, responses.ended.tolist(), strict=True)):
            text = texts[row // samples]
            record = records[row // samples]
            answer = tuple(tokens[mask].tolist())
            said = answer[:-1] if ended else answer  # The end token may be no special one, which texts have.
            yield Response(text, self._text(said), answer, ended, record, self._longest)

    def _text(self, ids: Any) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def evaluator_of(table: Reward, models: Mapping[str, Evaluator | None]) -> Evaluator:
    """Return the way to all functions; those by models are called from this process, which has or asks the models."""
    parts: list[tuple[list[int], Evaluator]] = []
    limits: dict[float | None, list[int]] = {}
    for place, name in enumerate(table.functions):
        model = models.get(name)
        if model is not None:
            parts.append(([place], model))
        else:
            limits.setdefault(limit_of(name, table.deadline_s), []).append(place)
    for limit_s, places in limits.items():
        names = [table.functions[place] for place in places]
        if limit_s is None:
            parts.append((places, InPlace(names, table.by_task)))
        else:
            parts.append((places, Processes(names, table.processes, limit_s, table.by_task)))
    return parts[0][1] if len(parts) == 1 else Together(parts)


def _sum(rewards: npt.NDArray[np.float64]) -> tuple[float, float]:
    return float(np.nansum(rewards)), float(np.isfinite(rewards).sum())


_LONGEST = 4000
"""Number of characters that a text is cut to."""


def rollout_records(ids: Sequence[str], scored: Scored, count: int) -> tuple[Mapping[str, Any], ...]:
    """Return records of the first responses of a batch: those to its first prompt, then those to the next one.

    Args:
        ids: epoch, slice and sample of each prompt, with hyphens in between.
        scored: texts of the responses and their rewards.
        count: largest number of records.

    """
    size = scored.total.shape[1]
    return tuple(_record(ids[row // size], scored, *divmod(row, size)) for row in range(len(scored.responses[:count])))


def _record(key: str, scored: Scored, prompt: int, number: int) -> Mapping[str, Any]:
    response = scored.responses[prompt * scored.total.shape[1] + number]
    epoch, index, sample = map(int, key.split("-"))
    return {
        "epoch": epoch,
        "slice": index,
        "sample": sample,
        "prompt": response.prompt[-_LONGEST:],
        "response": response.text[:_LONGEST],
        "tokens": len(response.ids),
        "ended": response.ended,
        "reward": _known(scored.total[prompt, number]),
        "rewards": {name: _known(part[prompt, number]) for name, part in scored.parts.items()},
    }


def _known(reward: float) -> float | None:
    return float(reward) if math.isfinite(reward) else None
