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
ROWS = tuple(f"rl_ahead_{ahead}{what}" for ahead in STALENESS[1:] for what in ("", "_pass"))
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
        self._global = [one.detach().clone().requires_grad_() for one in self._island.model.parameters()]
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
            behind, tokens = self._island.step(batch).sums.get("staleness", (0.0, 1.0))
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
        for weights, own in zip(self._global, parameters, strict=True):
            weights.grad = weights.detach() - own
        self._outer.step()
        for weights, own in zip(self._global, parameters, strict=True):
            own.copy_(weights)


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
    for place, steps in enumerate(STALENESS[1:], 1):
        rows[f"rl_ahead_{steps}"] = _speed(steps, [runs[0] for runs in seeds], [runs[place] for runs in seeds])
        learned = [mean(each) for each in zip(*passed, strict=True)]
        shares = {f"seed_{seed}": f"{each[0]:.3f} {each[place]:.3f}" for seed, each in enumerate(passed)}
        rows[f"rl_ahead_{steps}_pass"] = {"value": learned[0] - learned[place], "target": f"<= {CLOSE:g}", **shares}
    return rows


def _speed(steps: int, plain: Sequence[Run], ahead: Sequence[Run]) -> dict[str, Any]:
    """Return the row of runs with so many steps of staleness: the ratio of rounds that were taken in turn.

    Raises:
        ValueError: responses were further behind.

    """
    if (most := max(run.behind for run in ahead)) > steps:
        raise ValueError(f"responses were {most} steps behind, {steps} are allowed")
    before, after = (_slowed([run.seconds for run in runs]) for runs in (plain, ahead))
    first, middle, third = np.quantile(before / after, (0.25, 0.5, 0.75))
    times = {
        f"{name}_{what}_ms": round(1e3 * float(np.median(_slowed([getattr(run, kept) for run in runs]))) / STEPS, 1)
        for name, runs in (("plain", plain), ("ahead", ahead))
        for what, kept in (("step", "seconds"), ("trainer_cpu", "trainer_s"), ("generator_cpu", "generator_s"))
    }
    spread = {"q1": round(first, 2), "q3": round(third, 2), "rounds": len(before), "most_behind": round(most, 2)}
    return {"value": float(middle), "target": f">= {LEAST:g}", **spread, **times}


def _slowed(rounds: Sequence[Sequence[float]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Join what was measured of the rounds that count."""
    return np.concatenate([each[1:SLOWED] for each in rounds])


def _generators_s() -> float:
    """CPU seconds of all model workers so far."""
    return sum(cpu_s(pid) for pid in descendants(os.getpid()) if title(pid).startswith("ray::ModelWorker"))
