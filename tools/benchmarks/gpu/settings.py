"""The worker's loop beside a plain one, and what is chosen automatically beside all other settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from statistics import median
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from benchmarks.gpu.loops import VALIDATION, Trained, plain, train
from benchmarks.gpu.size import Size, texts
from hypha_ray.config.automatic import OFF, Value
from hypha_ray.config.conflicts import conflicts
from hypha_ray.model.execution import can_compile

AUTO: dict[str, Value] = dict.fromkeys(OFF, "auto")
CHOICES: dict[str, tuple[Value, ...]] = {
    "autocast": ("none", "bf16"),
    "compile": (False, True, "layers"),
    "fused_loss": (False, True),
    "attention": ("eager", "sdpa"),
}
"""Values of each setting that are tried with those of all others."""
LONG = 1000
"""Rounds of the job for which settings are chosen, so that it pays to compile; two of them are measured."""
BESIDE: tuple[dict[str, Value], ...] = (
    {"autocast": "bf16", "attention": "sdpa"},
    {"autocast": "bf16", "attention": "sdpa", "compile": True},
)
"""Settings of which the worker's loop and a plain one are compared."""


def loop(size: Size) -> dict[str, dict[str, Any]]:
    """Seconds of a step of a plain loop ÷ those of the worker's loop, with equal settings."""
    ids = texts(size, size.steps + VALIDATION)
    rows = {}
    compared = BESIDE if _compiles(size) else BESIDE[:1]
    for changes in compared:
        settings = OFF | changes
        job = size.job(settings)
        times = [(plain(size, job, ids), train(size, job, ids).step_s) for _ in range(2)]
        bare_s, ours_s = (median(column) for column in zip(*times, strict=True))
        name = "gpu_loop_compiled" if changes.get("compile") else "gpu_loop"
        shown = {"plain_ms": round(1e3 * bare_s, 2), "ours_ms": round(1e3 * ours_s, 2)}
        rows[name] = {"value": bare_s / ours_s, "target": ">= 0.97", **shown, **_conditions(size), **settings}
    return rows


def automatic(size: Size) -> dict[str, dict[str, Any]]:
    """Seconds of a step with the best settings ÷ those with what is chosen automatically; and a row for each setting.

    A row of a setting has the loss after all steps beside that of none. Compiled code that is on the disk isn't used.
    """
    ids = texts(size, size.steps + VALIDATION)
    trainings: dict[str, Trained] = {}
    with fresh_cache():
        for settings in combinations(size):
            try:
                trainings[_name(settings)] = train(size, size.job(settings), ids)
            except torch.OutOfMemoryError:
                print(f"{_name(settings)}: the GPU has too little memory", file=sys.stderr)
    with fresh_cache():
        chosen = train(size, size.job(AUTO, LONG), ids)
    best = min(trainings, key=lambda name: trainings[name].step_s)
    bare = trainings.get(_name(OFF | {"attention": "sdpa"}), next(iter(trainings.values())))
    value = trainings[best].step_s / chosen.step_s
    rows = {
        "gpu_auto": {"value": value, "target": ">= 0.95", "best": best, **_shown(chosen, bare), **_conditions(size)}
    }
    for name, training in trainings.items():
        rows[f"gpu_{name}"] = {"value": bare.step_s / training.step_s, "target": "", **_shown(training, bare)}
    return rows


def combinations(size: Size) -> Iterator[dict[str, Value]]:
    """Return all settings that don't exclude each other."""
    for values in product(*CHOICES.values()):
        settings = dict(zip(CHOICES, values, strict=True))
        if not list(conflicts(size.job(settings))) and (_compiles(size) or not settings["compile"]):
            yield settings


def _compiles(size: Size) -> bool:
    """Whether compiled models are measured; not on a CPU, where that takes minutes."""
    return size.device == "cuda" and can_compile()


def _name(settings: dict[str, Value]) -> str:
    """Return the name of settings: the values, and names of those that are switched on."""
    on = [name for name in ("compile", "fused_loss") if settings[name] is True]
    if settings["compile"] == "layers":
        on.append("layers")
    return "_".join([str(settings["autocast"]), *on, str(settings["attention"])])


def _shown(training: Trained, bare: Trained) -> dict[str, Any]:
    """Return the figures of a training as conditions of a row."""
    settings = {name: training.settings[name] for name in OFF}
    figures = {
        "step_ms": round(1e3 * training.step_s, 2),
        "first_s": round(training.first_s, 2),
        "peak_gib": training.peak_gib,
    }
    loss = {"loss": round(training.loss, 5), "loss_distance": round(training.loss - bare.loss, 5)}
    row = settings | figures | loss
    if training.mfu is not None:
        row["mfu"] = round(training.mfu, 4)
    return row


def _conditions(size: Size) -> dict[str, Any]:
    return {"batch": size.batch, "tokens": size.tokens, "steps": size.steps}
