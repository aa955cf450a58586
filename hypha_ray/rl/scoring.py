"""Rewards of responses: texts of token ids, a weighted sum of reward functions, and records of rollouts.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from hypha_ray.config.rl import JUDGE, MODEL, RL, Reward
from hypha_ray.errors import ConfigError
from hypha_ray.model.tokenizers import all_end_tokens, is_templated
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.rewards.calls import functions_of, limit_of
from hypha_ray.rl.rewards.evaluators import Evaluator, InPlace, JudgeCalls, Processes, Together
from hypha_ray.rl.rewards.response import Response, TrainerState, records_of
from hypha_ray.rl.rewards.signatures import LARGEST, PartedReward
from hypha_ray.types import Arrays, Sums

_POLICY = "assistant"
"""Role of the policy's turns."""
_LONGEST = 4000
"""Largest number of characters of a text, and of token ids, in a record."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Rewards of responses, float64 [prompts, samples]; NaN: absent."""

    total: npt.NDArray[np.float64]
    """Weighted sum."""
    parts: dict[str, npt.NDArray[np.float64]]
    """Reward of each function before weighting, by name, and each of its figures as ``function/figure``; NaN for
    functions of other tasks, too."""
    passed: npt.NDArray[np.bool_]
    """Flags of responses that are right: the first function of their task gives at least 1."""
    verified: npt.NDArray[np.bool_]
    """Flags of prompts whose first function can verify an answer, [prompts]; a reward model can't."""
    responses: tuple[Response, ...]
    """Responses to the first prompt, then those to the next one."""
    extra: tuple[Mapping[str, Any], ...]
    """Values that functions have logged of each response, by ``function/name``."""

    def sums(self) -> Sums:
        """Return means over the responses whose reward is there, and the share of those without one."""
        sums: Sums = {"reward": _sum(self.total)}
        if len(self.parts) > 1:
            for name, part in self.parts.items():
                sums[f"reward/{name}"] = _sum(part)
        is_present = np.isfinite(self.total)
        absent_count = is_present.size - float(is_present.sum())
        if absent_count:
            sums["absent_rewards"] = absent_count, float(is_present.size)
        return sums


class Scorer:
    """Reward functions of a job, and the tokenizer that makes texts for them.

    Args:
        rl: table of the job file.
        tokenizer: tokenizer of the run.
        model: evaluator of the reward model; None: no function needs one.

    Raises:
        ConfigError: a function is unknown or can't be loaded.

    """

    def __init__(self, rl: RL, tokenizer: Any, model: Evaluator | None = None) -> None:
        self._names = rl.reward.functions
        self._tasks = rl.reward.by_task
        self._weights = np.array(rl.reward.weights or [1.0] * len(self._names))
        self._judge: JudgeCalls | None = None
        if JUDGE in self._names:
            self._judge = JudgeCalls(rl.reward.judge, self._tasks)
        self._evaluators = evaluators_of(rl.reward, {JUDGE: self._judge, MODEL: model})
        self._tokenizer = tokenizer
        self._is_chat = is_templated(tokenizer)
        self._has_environment = rl.environment is not None
        self._ends = frozenset(all_end_tokens(None, tokenizer))
        self._longest = rl.generation.max_response_tokens

    def score(
        self,
        prompts: Arrays,
        responses: Responses,
        episode_rewards: npt.NDArray[np.float64] | None = None,
        states: Sequence[TrainerState] = (),
    ) -> Scored:
        """Compute the rewards of all responses to a batch of prompts.

        Args:
            prompts: tensors of the prompts.
            responses: the responses; with an environment the whole conversations.
            episode_rewards: rewards that the environment gave; None without one.
            states: progress of the run for each prompt; empty outside of a run.

        Raises:
            ConfigError: RWD001, a function failed; RWD002, not one response of the batch got a reward.

        """
        texts = tuple(self._responses(prompts, responses, states))
        if episode_rewards is not None:
            texts = tuple(self._conversations(texts, responses, episode_rewards.tolist()))
        rows = Together(self._evaluators).rewards(texts)
        rewards = np.array(rows)
        applies = np.zeros(rewards.shape, bool)
        passed = np.zeros(len(texts), bool)
        verified = np.zeros(len(texts), bool)
        for row, response in enumerate(texts):
            functions = functions_of(response, self._tasks, self._names)
            applies[row] = [name in functions for name in self._names]
            first_function = functions[0]
            passed[row] = rewards[row, self._names.index(first_function)] >= 1
            verified[row] = first_function != MODEL
        counts = applies & (self._weights != 0)
        total = np.where(counts, rewards * self._weights, 0.0).sum(1)  # 0 · NaN isn't 0.
        total[~(np.abs(total) <= LARGEST)] = np.nan
        if not np.isfinite(total).any():
            raise self._without_rewards()
        shape = (len(prompts["input_ids"]), -1)
        parts = _parts(self._names, rows)
        return Scored(
            total=total.reshape(shape),
            parts={name: numbers.reshape(shape) for name, numbers in parts.items()},
            passed=passed.reshape(shape),
            verified=verified.reshape(shape)[:, 0],
            responses=texts,
            extra=tuple(_extra(self._names, row) for row in rows),
        )

    def _without_rewards(self) -> ConfigError:
        fix = "look at what the functions give for a response of this dataset, and at rl.reward.deadline_s"
        if self._judge is not None and self._judge.trouble:
            fix = f"see to the judge: {self._judge.trouble}"
        names = ", ".join(dict.fromkeys(self._names))
        return ConfigError("RWD002", "no response of a batch got a reward", names, "finite numbers", fix)

    def check(self, prompts: Arrays, state: TrainerState) -> list[str]:
        """Try the functions on a right answer to each prompt, at a progress of the run.

        Returns:
            Notes for the user.

        Raises:
            ConfigError: RWD001, a function failed.

        """
        records = records_of(prompts["reward_data"])
        tried_rewards: list[float] = []
        for _, evaluator in self._evaluators:
            if isinstance(evaluator, Processes):
                evaluator.refuses_losses = True
        for text, record in zip(self._prompts(prompts), records, strict=True):
            answer = str(record.get("answer", ""))
            response = Response(text, answer, (), True, record, self._longest, self._is_chat, trainer_state=state)
            if self._has_environment:
                turn = {"role": _POLICY, "content": answer}
                response = replace(response, conversation=(turn,), episode_reward=0.0)
            for _, evaluator in self._evaluators:
                # One response at a time: a function that fails for one of many ends no run.
                tried_rewards += evaluator.rewards([response])[0]
                if isinstance(evaluator, InPlace | Processes) and evaluator.takes_groups:
                    evaluator.rewards([response] * 2)  # A single reward may be meant for all that there are.
        if any(map(math.isfinite, tried_rewards)) or not {JUDGE, MODEL}.isdisjoint(self._names):
            return []
        names = ", ".join(dict.fromkeys(self._names))
        return [f"no right answer that was tried got a reward from {names}, and a batch without any ends the run"]

    def _prompts(self, prompts: Arrays) -> list[str]:
        masks = prompts["attention_mask"].astype(bool)
        return [self._text(ids[mask]) for ids, mask in zip(prompts["input_ids"], masks, strict=True)]

    def _responses(self, prompts: Arrays, responses: Responses, states: Sequence[TrainerState]) -> Iterator[Response]:
        samples = len(responses.ids) // len(prompts["input_ids"])
        ids = responses.ids[:, responses.prompt_width :].cpu()
        masks = responses.mask.cpu().bool()
        texts = self._prompts(prompts)
        records = records_of(prompts["reward_data"])
        for row, has_ended in enumerate(responses.ended.tolist()):
            prompt = row // samples
            tokens = tuple(ids[row][masks[row]].tolist())
            text_tokens = tokens[:-1] if has_ended else tokens  # A text would show an end token that isn't special.
            text = self._text(text_tokens)
            response = Response(texts[prompt], text, tokens, has_ended, records[prompt], self._longest, self._is_chat)
            yield replace(response, trainer_state=states[prompt]) if states else response

    def _conversations(
        self, texts: Sequence[Response], responses: Responses, episode_rewards: Sequence[float]
    ) -> Iterator[Response]:
        """Yield responses with their turns, and with what was before the first one as prompt."""
        width = responses.prompt_width
        ids = responses.ids.cpu()
        is_token = responses.attention_mask.cpu().bool()
        is_own = responses.mask.cpu().bool()
        for row, (response, reward) in enumerate(zip(texts, episode_rewards, strict=True)):
            opening = ids[row, :width][is_token[row, :width]]
            tokens = ids[row, width:][is_token[row, width:]]
            sampled = is_own[row][is_token[row, width:]]
            turns = tuple(self._turns(tokens.tolist(), sampled.tolist()))
            last_content = ""
            for turn in turns:
                if turn["role"] == _POLICY:
                    last_content = turn["content"]
            yield replace(
                response,
                prompt=self._text(opening),
                text=last_content,
                conversation=turns,
                episode_reward=None if math.isnan(reward) else reward,
            )

    def _turns(self, tokens: Sequence[int], sampled: Sequence[bool]) -> Iterator[Mapping[str, str]]:
        """Yield the texts of a conversation's turns, each of successive tokens of one side."""
        for is_own, group in groupby(zip(sampled, tokens, strict=True), itemgetter(0)):
            ids = list(map(itemgetter(1), group))
            if is_own and ids[-1] in self._ends:
                del ids[-1]
            yield {"role": _POLICY if is_own else "environment", "content": self._text(ids)}

    def _text(self, ids: Any) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def evaluators_of(table: Reward, models: Mapping[str, Evaluator | None]) -> list[tuple[list[int], Evaluator]]:
    """Return evaluators with the numbers of their functions; `models` has those of the judge and the reward model."""
    parts: list[tuple[list[int], Evaluator]] = []
    by_limit: dict[float | None, list[int]] = {}
    for index, name in enumerate(table.functions):
        model = models.get(name)
        if model is not None:
            parts.append(([index], model))
        else:
            limit_s = limit_of(name, table.deadline_s)
            by_limit.setdefault(limit_s, []).append(index)
    for limit_s, indices in by_limit.items():
        names = [table.functions[index] for index in indices]
        if limit_s is None:
            parts.append((indices, InPlace(names, table.by_task)))
        else:
            parts.append((indices, Processes(names, table.processes, limit_s, table.by_task)))
    return parts


def _parts(names: Sequence[str], rows: Sequence[Sequence[float]]) -> dict[str, npt.NDArray[np.float64]]:
    """Return the rewards by function, and the figures of functions that give several."""
    parts = {name: np.array([row[column] for row in rows]) for column, name in enumerate(names)}
    for column, name in enumerate(names):
        for number, row in enumerate(rows):
            reward = row[column]
            if not isinstance(reward, PartedReward):
                continue
            for part, figure in reward.parts.items():
                absent = np.full(len(rows), math.nan)
                parts.setdefault(f"{name}/{part}", absent)[number] = figure
    return parts


def _extra(names: Sequence[str], row: Sequence[float]) -> dict[str, Any]:
    """Return what functions have logged of a response, to be shown in its record."""
    extra_columns: dict[str, Any] = {}
    for name, reward in zip(names, row, strict=True):
        if isinstance(reward, PartedReward):
            for column, value in reward.extra.items():
                extra_columns[f"{name}/{column}"] = value
    return extra_columns


def _sum(rewards: npt.NDArray[np.float64]) -> tuple[float, float]:
    is_present = np.isfinite(rewards)
    return float(np.nansum(rewards)), float(is_present.sum())


def rollout_records(ids: Sequence[str], scored: Scored, count: int) -> tuple[Mapping[str, Any], ...]:
    """Return records of the first responses of a batch: those to its first prompt, then those to the next one.

    Args:
        ids: epoch, slice and sample of each prompt, with hyphens in between.
        scored: texts of the responses and their rewards.
        count: largest number of records.

    """
    samples = scored.total.shape[1]
    records: list[Mapping[str, Any]] = []
    for row, response in enumerate(scored.responses[:count]):
        prompt, sample_number = divmod(row, samples)
        records.append(_record(ids[prompt], response, scored, prompt, sample_number))
    return tuple(records)


def _record(key: str, response: Response, scored: Scored, prompt: int, sample_number: int) -> Mapping[str, Any]:
    epoch, index, sample = map(int, key.split("-"))
    parts = {name: _finite(part[prompt, sample_number]) for name, part in scored.parts.items()}
    answer = response.data.get("answer")
    details: dict[str, Any] = {}
    if response.conversation:
        turns = [{**turn, "content": turn["content"][:_LONGEST]} for turn in response.conversation]
        details["conversation"] = turns
    extra_columns = scored.extra[prompt * scored.total.shape[1] + sample_number]
    if extra_columns:
        details["extra"] = extra_columns
    return {
        "epoch": epoch,
        "slice": index,
        "sample": sample,
        "number": sample_number,
        "prompt": response.prompt[-_LONGEST:],
        "response": response.text[:_LONGEST],
        "answer": None if answer is None else str(answer)[:_LONGEST],
        "ids": list(response.ids[:_LONGEST]),
        "tokens": len(response.ids),
        "ended": response.ended,
        "reward": _finite(scored.total[prompt, sample_number]),
        "rewards": parts,
        **details,
    }


def _finite(reward: float) -> float | None:
    return float(reward) if math.isfinite(reward) else None
