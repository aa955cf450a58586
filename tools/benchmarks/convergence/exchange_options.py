"""Cost of ways to hide or to ease exchanges: DiLoCo's validation loss with each of them, over its loss without.

All train the model of `quality` on equally many tokens, and each part of it is exchanged every `ROUND` steps.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from benchmarks.convergence.quality import Side, diloco, outcomes

STEPS = 1200
ROUND = 20
DELAY = 10
FRAGMENTS = 2
WARM_UP = 100
SEEDS = (1, 2)
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "option_fragments": {"sync": {"fragments": FRAGMENTS}},
    "option_delay": {"sync": {"delay_steps": DELAY}},
    "option_mixing": {"sync": {"delay_steps": DELAY, "mixing": 0.5}},
    "option_warm_up": {"rounds": {"warmup_rounds": WARM_UP, "update_rounds": WARM_UP + (STEPS - WARM_UP) // ROUND}},
}
"""Row, and tables of the job file."""
ROWS = tuple(name for name in OPTIONS if name != "plain")


def side(name: str) -> Side:
    """Settings of a run with this option."""
    sync = OPTIONS[name].get("sync", {})
    plain = diloco(ROUND // sync.get("fragments", 1), 0.7, 0.8, ("fp32", "fp32"), learning_rate=4e-3, min_lr_rate=0.1)
    tables = {**plain.tables, **OPTIONS[name], "sync": {**plain.tables["sync"], **sync}}
    return replace(plain, tables=tables, total=STEPS)


def options() -> dict[str, dict[str, Any]]:
    """Losses with each option over the loss without any: means over seeds."""
    by_option = outcomes({name: side(name) for name in OPTIONS}, SEEDS)
    losses = {}
    for name, outcomes_of_option in by_option.items():
        losses[name] = [outcome.reported for outcome in outcomes_of_option]
    return {name: _row(name, losses, by_option[name][0].traffic) for name in ROWS}


def _row(name: str, losses: dict[str, list[float]], traffic: float) -> dict[str, Any]:
    settings = {}
    for table in OPTIONS[name].values():
        for key, value in table.items():
            if key != "update_rounds":
                settings[key] = value
    return {
        "value": mean(losses[name]) / mean(losses["plain"]),
        "target": "-",
        "loss": " ".join(f"{loss:.4f}" for loss in losses[name]),
        "plain": " ".join(f"{loss:.4f}" for loss in losses["plain"]),
        "seeds": len(SEEDS),
        "steps": STEPS,
        "steps_between_exchanges": ROUND,
        "traffic": f"1/{traffic:.0f}",
        **settings,
    }
