"""What ways to hide or to ease exchanges cost: DiLoCo's validation loss with each of them, over its loss without.

All train the model of `quality` on equally many tokens, and each part of it is exchanged every `ROUND` steps.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.quality import Outcome, Side, corpus, diloco, outcome
from hypha_ray.scheduler.cluster import connected

STEPS, ROUND, DELAY, FRAGMENTS, WARM_UP = 1200, 20, 10, 2, 100
SEEDS = (1, 2)
PLAIN: dict[str, Any] = {}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "option_fragments": {"fragments": FRAGMENTS},
    "option_delay": {"delay_steps": DELAY},
    "option_mixing": {"delay_steps": DELAY, "mixing": 0.5},
    "option_eager": {"delay_steps": DELAY, "eager": True},
    "option_warm_up": PLAIN,
}
"""Row, and keys of the job's sync."""
ROWS = tuple(name for name in OPTIONS if name != "plain")


def side(name: str) -> Side:
    """How a run with this option trains."""
    sync = OPTIONS[name]
    plain = diloco(ROUND // sync.get("fragments", 1), 0.7, 0.8, ("fp32", "fp32"), learning_rate=4e-3, min_lr_rate=0.1)
    tables = {**plain.tables, "sync": {**plain.tables["sync"], **sync}}
    if name == "option_warm_up":
        tables["rounds"] = {"warmup_rounds": WARM_UP, "update_rounds": WARM_UP + (STEPS - WARM_UP) // ROUND}
    return Side(plain.workers, plain.batch, plain.steps, tables, STEPS)


def options() -> dict[str, dict[str, Any]]:
    """Losses with each option over the loss without any: means over seeds."""
    found: dict[str, list[Outcome]] = {name: [] for name in OPTIONS}
    with tempfile.TemporaryDirectory() as scratch, connected("bench"):
        dataset = corpus(Path(scratch))
        for seed, name in product(SEEDS, found):
            one = outcome(f"{name}-{seed}", side(name), seed, Path(scratch), dataset)
            print(f"{name}, seed {seed}: {one.choosing:.4f}, {one.reported:.4f}", file=sys.stderr, flush=True)
            found[name].append(one)
    losses = {name: [one.reported for one in outcomes] for name, outcomes in found.items()}
    return {name: _row(name, losses, found[name][0].traffic) for name in ROWS}


def _row(name: str, losses: dict[str, list[float]], traffic: float) -> dict[str, Any]:
    return {
        "value": mean(losses[name]) / mean(losses["plain"]),
        "target": "-",
        "loss": " ".join(f"{loss:.4f}" for loss in losses[name]),
        "plain": " ".join(f"{loss:.4f}" for loss in losses["plain"]),
        "seeds": len(SEEDS),
        "steps": STEPS,
        "steps_between_exchanges": ROUND,
        "traffic": f"1/{traffic:.0f}",
        **(OPTIONS[name] or {"warmup_rounds": WARM_UP}),
    }
