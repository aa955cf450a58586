"""Steps whose responses are made ahead, beside the same job in synchronous steps.

Each run is an `Island` with one model worker beside it, and the outer step of the job; runs take turns of a round. In
the first rounds, those that are timed, generation is slowed three times: it waits for two thirds of its time, which
leaves the cores to the training. Numbers don't depend on time, so the rounds that follow only learn.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from chaoslab.processes import cpu_s, descendants, title

from benchmarks.rl.task import batches, sorting, tiny_job
from hypha_ray.driver.ray_cluster import connected
from hypha_ray.rl.island import Island

SEEDS = 2
ROUNDS = 20
STEPS = 10
SLOWED = 6
"""Rounds with a slow generator; the first one, in which processes warm up, isn't counted."""
STALENESS = (0, 1, 2)
"""Steps that responses may be behind, of each run; 0: synchronous."""
ROWS = tuple(f"rl_ahead_{ahead}{figure}" for ahead in STALENESS[1:] for figure in ("", "_pass"))
LEAST = 1.5
CLOSE = 0.03
"""Least gain in steps/s, and largest loss of right responses."""


class Run:
    """A job that learns by steps of an island, without a scheduler.

    Args:
        dataset: prepared prompts.
        ahead: steps that responses may be behind.
        seed: seed of the run.
        log: file for the hits of the place that slows generation.

    """

    def __init__(self, dataset: Path, ahead: int, seed: int, log: Path) -> None:
        flags = [f"--rl.staleness={ahead}", "--rl.model_workers=2", f"--run.seed={seed}"]
        hits = ",".join(map(str, range(1, SLOWED * STEPS + 1)))
        slow = [f'--testing.failpoints=["rl.generate=triple@{hits}"]', f"--testing.failpoint_log={log}"]
        job, tokenizer = tiny_job(dataset, *flags, *slow)
        self._island = Island(job, tokenizer)
        self._prompts = batches(dataset, job.rounds.max_batch_size)
        self._validation = list(islice(batches(dataset, 64, "validation"), 4))
        self._global = []
        for parameter in self._island.model.parameters():
            self._global.append(parameter.detach().clone().requires_grad_())
        outer = job.outer_optimizer
        self._outer = torch.optim.SGD(self._global, outer.learning_rate, outer.momentum, nesterov=True)
        self.seconds: list[float] = []
        """Seconds of each round."""
        self.trainer_s: list[float] = []
        """CPU seconds of each round by the process that trains."""
        self.generator_s: list[float] = []
        """CPU seconds of each round by the processes that generate for all runs, waiting left out."""
        self.behind = 0.0
        """Largest number of steps that the responses of a batch were behind."""

    def take_round(self, number: int) -> None:
        """Take the steps of a round, and the outer step, which isn't counted."""
        prompts = list(islice(self._prompts, STEPS))
        generators = _generators_s()
        trained = time.process_time()
        began = time.perf_counter()
        for step, batch in enumerate(prompts):
            self._island.announce(iter(prompts[step + 1 :]))
            sums = self._island.step(batch).sums
            behind, tokens = sums.get("staleness", (0.0, 1.0))
            self.behind = max(self.behind, behind / tokens)
        self.seconds.append(time.perf_counter() - began)
        self.trainer_s.append(time.process_time() - trained)
        self.generator_s.append(_generators_s() - generators)
        self._take_outer_step()
        self._island.merged(number + 1)

    def passed(self) -> float:
        """Share of right responses to the validation prompts."""
        right, prompts = self._island.evaluate(self._validation)["pass@1"]
        return right / prompts

    def close(self) -> None:
        """End the process that generates."""
        self._island.close()

    @torch.no_grad()
    def _take_outer_step(self) -> None:
        parameters = list(self._island.model.parameters())
        for weights, parameter in zip(self._global, parameters, strict=True):
            weights.grad = weights.detach() - parameter
        self._outer.step()
        for weights, parameter in zip(self._global, parameters, strict=True):
            parameter.copy_(weights)


def ahead() -> dict[str, dict[str, Any]]:
    """Steps/s of asynchronous runs ÷ those of synchronous ones, and how much less they have learned."""
    torch.set_num_threads(1)
    seeds: list[list[Run]] = []
    passed: list[list[float]] = []
    with tempfile.TemporaryDirectory() as scratch, connected("bench"):
        dataset = sorting(Path(scratch))
        for seed in range(SEEDS):
            runs = [Run(dataset, steps, seed, Path(scratch, f"hits-{seed}-{steps}")) for steps in STALENESS]
            for number in range(ROUNDS):
                turn = number % len(runs)
                for run in runs[turn:] + runs[:turn]:
                    run.take_round(number)
            passed.append([run.passed() for run in runs])
            for run in runs:
                run.close()
            seeds.append(runs)
    rows: dict[str, dict[str, Any]] = {}
    plain_runs = [runs[0] for runs in seeds]
    learned = [mean(shares_of_run) for shares_of_run in zip(*passed, strict=True)]
    for index, steps in enumerate(STALENESS[1:], 1):
        rows[f"rl_ahead_{steps}"] = _speed(steps, plain_runs, [runs[index] for runs in seeds])
        shares = {}
        for seed, seed_shares in enumerate(passed):
            shares[f"seed_{seed}"] = f"{seed_shares[0]:.3f} {seed_shares[index]:.3f}"
        rows[f"rl_ahead_{steps}_pass"] = {"value": learned[0] - learned[index], "target": f"<= {CLOSE:g}", **shares}
    return rows


def _speed(steps: int, plain: Sequence[Run], ahead: Sequence[Run]) -> dict[str, Any]:
    """Return the row of runs with so many steps of staleness: the ratio of rounds that were taken in turn.

    Raises:
        ValueError: responses were further behind.

    """
    most = max(run.behind for run in ahead)
    if most > steps:
        raise ValueError(f"responses were {most} steps behind, {steps} are allowed")
    before = _slowed([run.seconds for run in plain])
    after = _slowed([run.seconds for run in ahead])
    first, middle, third = np.quantile(before / after, (0.25, 0.5, 0.75))
    times = {}
    for name, runs in (("plain", plain), ("ahead", ahead)):
        times[f"{name}_step_ms"] = _median_ms([run.seconds for run in runs])
        times[f"{name}_trainer_cpu_ms"] = _median_ms([run.trainer_s for run in runs])
        times[f"{name}_generator_cpu_ms"] = _median_ms([run.generator_s for run in runs])
    spread = {"q1": round(first, 2), "q3": round(third, 2), "rounds": len(before), "most_behind": round(most, 2)}
    return {"value": float(middle), "target": f">= {LEAST:g}", **spread, **times}


def _median_ms(rounds: Sequence[Sequence[float]]) -> float:
    """Median time of a step in milliseconds, of runs' rounds in seconds."""
    round_s = float(np.median(_slowed(rounds)))
    return round(1e3 * round_s / STEPS, 1)


def _slowed(rounds: Sequence[Sequence[float]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Join the times of the rounds that count."""
    return np.concatenate([times[1:SLOWED] for times in rounds])


def _generators_s() -> float:
    """CPU seconds of all model workers so far."""
    pids = [pid for pid in descendants(os.getpid()) if title(pid).startswith("ray::ModelWorker")]
    return sum(cpu_s(pid) for pid in pids)
