"""A step of reinforcement learning by requests to model workers, in turn with the same step as straight-line code."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rl.task import batches, sorting, tiny_job
from hypha_ray.config import Job
from hypha_ray.driver.ray_cluster import connected
from hypha_ray.model.lora import build_trained
from hypha_ray.model.tokenizers import vocabulary_of
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.optim.schedules import inner_steps
from hypha_ray.plugins import find
from hypha_ray.rl.engines.native import draw, training_sampling
from hypha_ray.rl.island import Island
from hypha_ray.rl.policy import Policy, PolicyObjective, Rollout, end_tokens
from hypha_ray.rl.scoring import Scorer
from hypha_ray.types import Samples

WARM_UP = 3
"""Turns that aren't counted."""
SIZES = {"": (32, 4, 60), "_long": (96, 24, 16)}
"""Prompts of a step, tokens of a response, and turns, by the ends of the rows' names."""
WAYS = {"": (1, 1.03), "_one_actor": (2, 1.25), "_two_actors": (3, 1.25)}
"""Model workers and the largest ratio, by the middles of the rows' names."""
ROWS = tuple(f"rl{actors}{size}" for size in SIZES for actors in WAYS)
LONG_TARGET = 1.03
"""Largest ratio of a long step, by any way."""


class StraightLine:
    """A step of GRPO without model workers, graph or requests."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self._job = job
        self._model = build_trained(job).eval()
        self._policy = Policy(self._model, 1.0, None, vocabulary_of(tokenizer))
        self._ends = end_tokens(self._model, tokenizer)
        self._scorer = Scorer(job.rl, tokenizer)
        self._objective = PolicyObjective(job.rl)
        self._optimizer = build_optimizer(self._model, job.inner_optimizer, inner_steps(job), job.num_workers)

    def step(self, batch: Samples) -> None:
        """Generate, reward, and take an optimizer step."""
        rl = self._job.rl
        ids = torch.from_numpy(batch.arrays["input_ids"]).long()
        mask = torch.from_numpy(batch.arrays["attention_mask"]).long()
        sampling = training_sampling(rl)
        uniform = draw(self._job.run.seed, batch.keys, sampling)
        responses = self._policy.sample(ids, mask, uniform, sampling, self._ends)
        scores = self._scorer.score(batch.arrays, responses)
        rewards = torch.from_numpy(scores.total).float()
        lengths = responses.mask.sum(1).view(rewards.shape)
        advantage = find("advantages", rl.recipe.advantage)(rewards, lengths)
        advantages = advantage.view(-1, 1).expand_as(responses.mask)
        counted = responses.mask.sum(1) > 0
        rollout = Rollout(responses, responses.mask, advantages, responses.logprobs, None, counted)
        self._optimizer.zero_grad()
        weights, total = self._objective.weights(rollout)
        loss, _ = self._objective.loss(rollout, weights, self._policy.score(responses))
        (loss / total).backward()
        self._optimizer.step(self._optimizer.norm())

    @property
    def weights(self) -> list[torch.Tensor]:
        """Weights of the policy."""
        return [parameter.detach() for parameter in self._model.parameters()]


def rl() -> dict[str, dict[str, Any]]:
    """Time of a step by requests ÷ that of straight-line code: in the trainer's process, and with actors beside it."""
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch, connected("bench"):
        dataset = sorting(Path(scratch))
        for size, (prompts, tokens, turns) in SIZES.items():
            rows |= _of_size(size, dataset, prompts, tokens, turns)
    return rows


def _of_size(size: str, dataset: Path, prompts: int, tokens: int, turns: int) -> dict[str, dict[str, Any]]:
    prompted = batches(dataset, prompts)
    with ExitStack() as stack:
        methods: dict[str, Callable[[Samples], Any]] = {}
        islands = {}
        for method, (workers, _) in WAYS.items():
            job, tokenizer = _job(dataset, tokens, workers)
            island = Island(job, tokenizer)
            stack.callback(island.close)
            islands[method] = island
            methods[method] = island.step
        straight = StraightLine(*_job(dataset, tokens, 1))
        times = _times({"straight": straight.step, **methods}, prompted, turns)
        for method, island in islands.items():
            problem = f"rl{method} takes other steps"
            for expected, parameter in zip(straight.weights, island.model.parameters(), strict=True):
                torch.testing.assert_close(parameter.detach(), expected, atol=1e-5, rtol=1e-4, msg=problem)
    least = {method: float(np.quantile(seconds, 0.25)) for method, seconds in times.items()}
    conditions = {
        "turns": turns,
        "prompts": prompts,
        "tokens": tokens,
        "straight_ms": round(1e3 * least["straight"], 1),
    }
    rows = {}
    for method, (_, short_target) in WAYS.items():
        target = LONG_TARGET if size else short_target
        row: dict[str, Any] = {"value": least[method] / least["straight"], "target": f"<= {target:g}"}
        for quarter in (1, 2, 3):
            seconds = float(np.quantile(times[method], quarter / 4))
            row[f"q{quarter}_ms"] = round(1e3 * seconds, 1)
        rows[f"rl{method}{size}"] = row | conditions
    return rows


def _times(
    methods: dict[str, Callable[[Samples], Any]], prompted: Iterator[Samples], turns: int
) -> dict[str, list[float]]:
    """Take a step on each batch by every method, in an order that rotates; return seconds of steps."""
    times: dict[str, list[float]] = {method: [] for method in methods}
    names = list(methods)
    for turn in range(WARM_UP + turns):
        batch = next(prompted)
        start = turn % len(names)
        for method in names[start:] + names[:start]:
            began = time.perf_counter()
            methods[method](batch)
            times[method].append(time.perf_counter() - began)
    return {method: seconds[WARM_UP:] for method, seconds in times.items()}


def _job(dataset: Path, tokens: int, workers: int) -> tuple[Job, Any]:
    """Return the job, whose policy hardly learns so that steps stay alike, and its tokenizer."""
    sizes = f"--rl.generation.max_response_tokens={tokens}", f"--rl.model_workers={workers}"
    return tiny_job(dataset, *sizes, "--inner_optimizer.learning_rate=1e-6")
