"""Continuous batching in turn with the model's own loop: rounds of tiny steps, and long responses of unequal length."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rl.task import batches, sorting, tiny_job
from hypha_ray.model.lora import build_trained
from hypha_ray.model.tokenizers import vocabulary_of
from hypha_ray.rl.engines.continuous import ContinuousEngine
from hypha_ray.rl.engines.native import Sampling, draw
from hypha_ray.rl.island import Island
from hypha_ray.rl.policy import Policy, end_tokens
from hypha_ray.types import Samples

ROUNDS = 7
STEPS = 10
CALLS = 2
"""Turns that are counted, after one that isn't: rounds, steps of a round, and calls of long responses."""
PROMPTS = 32
SAMPLES = 8
TOKENS = (64, 128)
"""Most tokens of long responses; random weights end one after fourteen in the mean."""
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "max_position_embeddings": 256}
"""Sizes of the model of long responses: 3.4 million parameters."""
ROUND = ("continuous_round",)
LONG = tuple(f"continuous_{tokens}" for tokens in TOKENS)
LEAST = 1.3
"""Largest time of a round by continuous batching ÷ one by the model's own loop."""


def long_responses() -> dict[str, dict[str, Any]]:
    """Time of long responses by continuous batching ÷ by the model's own loop."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        dataset = sorting(Path(scratch))
        return {f"continuous_{tokens}": _long(dataset, tokens) for tokens in TOKENS}


def rounds() -> dict[str, dict[str, Any]]:
    """Time of rounds of the tiny job, whose responses have four tokens at most, by both."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as islands:
        dataset = sorting(Path(scratch))
        prompts = batches(dataset, PROMPTS)
        methods: dict[str, Callable[[], Any]] = {}
        for engine in ("native", "continuous"):
            island = Island(*tiny_job(dataset, f"--rl.generation.engine={engine}"))
            islands.callback(island.close)
            methods[engine] = partial(_take_round, island, prompts)
        times = _times(methods, ROUNDS)
    return {"continuous_round": _row(times, f"<= {LEAST:g}", rounds=ROUNDS, steps=STEPS)}


def _take_round(island: Island, prompts: Iterator[Samples]) -> None:
    for batch in islice(prompts, STEPS):
        island.step(batch)


def _long(dataset: Path, tokens: int) -> dict[str, Any]:
    """Responses to the same prompts by all methods; `anew` sets manager and cache up for each call."""
    sizes = [f"--model.config.{name}={value}" for name, value in SIZES.items()]
    job, tokenizer = tiny_job(dataset, *sizes)
    policy = Policy(build_trained(job).eval(), 1.0, None, vocabulary_of(tokenizer))
    ends = end_tokens(policy.model, tokenizer)
    sampling = Sampling(SAMPLES, tokens, vocabulary=policy.vocabulary)
    batch = next(batches(dataset, PROMPTS))
    ids, mask = (torch.from_numpy(batch.arrays[name]).long() for name in ("input_ids", "attention_mask"))
    cached = ContinuousEngine(0)
    anew = ContinuousEngine(0)

    def set_up_anew() -> Any:
        anew.close()
        return anew.generate(policy.model, ids, mask, batch.keys, sampling, ends)

    uniform = draw(0, batch.keys, sampling)
    methods = {
        "native": lambda: policy.sample(ids, mask, uniform, sampling, ends),
        "continuous": lambda: cached.generate(policy.model, ids, mask, batch.keys, sampling, ends),
        "anew": set_up_anew,
    }
    mean = {}
    for method in ("native", "continuous"):
        lengths = methods[method]().mask.sum(1)
        mean[f"mean_tokens_{method}"] = round(float(lengths.mean()), 1)
    return _row(_times(methods, CALLS), "<= 1", calls=CALLS, responses=PROMPTS * SAMPLES, **mean)


def _times(methods: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Run all methods in turns, in an order that rotates; return seconds of those that count."""
    times: dict[str, list[float]] = {method: [] for method in methods}
    names = list(methods)
    for turn in range(1 + turns):
        first = turn % len(names)
        for method in names[first:] + names[:first]:
            began = time.perf_counter()
            methods[method]()
            times[method].append(time.perf_counter() - began)
    return {method: seconds[1:] for method, seconds in times.items()}


def _row(times: Mapping[str, list[float]], target: str, **conditions: Any) -> dict[str, Any]:
    """Return the ratio of the least disturbed turns, and times of all methods."""
    least_s = {method: float(np.quantile(seconds, 0.25)) for method, seconds in times.items()}
    shown = {f"{method}_s": round(seconds, 3) for method, seconds in least_s.items()}
    return {"value": least_s["continuous"] / least_s["native"], "target": target, **shown, **conditions}
