"""The benchmark table: every row is a figure, or a ratio measured side by side in one run.

    python jobs/bench.py
    python jobs/bench.py --only planner inner_overhead --json bench.json
    python jobs/bench.py --only start --beside ../other-checkout

With no row named, all are measured, which takes hours; a name that is no row's lists them. `start` names all rows about
the start and the end of a command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hypha_ray.config.entry_point import require_writable, run, write_result
from hypha_ray.config.keys import choice_remedy
from hypha_ray.config.options import parse_options
from hypha_ray.errors import ConfigError
from hypha_ray.files import use_tools

use_tools()

Rows = dict[str, dict[str, Any]]
"""Row name to its value, the target, and the conditions."""


@dataclass
class Arguments:
    """Measure what the README claims."""

    only: list[str] = field(default_factory=list)
    """Rows to measure; all if none is named."""
    json: Path | None = None
    """File to write the rows to; -: standard output."""
    plots: Path | None = None
    """Folder to draw them in, those that have a plot."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the rows of one GPU; cpu: a stand-in of tiny size, to find mistakes."""
    beside: Path | None = None
    """Another checkout, with whose starts those of this one are compared in turns: the rows of `start` are ratios."""


def groups(device: str = "cuda", beside: Path | None = None) -> dict[tuple[str, ...], Callable[[], Rows]]:
    """Rows that are measured together; those of one GPU on a device, and starts also `beside` another checkout."""
    from benchmarks.bridge import bridge
    from benchmarks.codecs import DOWNWARD, codecs
    from benchmarks.data_faults import ROWS as DATA_FAULTS
    from benchmarks.data_faults import data_faults
    from benchmarks.device_exchange import ROWS as DEVICE
    from benchmarks.device_exchange import device_exchange
    from benchmarks.exchange import EXCHANGES, SIZES, exchange
    from benchmarks.gpu.rows import groups_on
    from benchmarks.relay import relay
    from benchmarks.sinks import ROWS as SINKS
    from benchmarks.sinks import sinks
    from benchmarks.slice_path import ROWS as SLICE_PATH
    from benchmarks.slice_path import slice_path
    from benchmarks.start import ROWS as START
    from benchmarks.start import start
    from benchmarks.throughput import inner_loop
    from benchmarks.wide_area.overlap import overlap
    from benchmarks.wide_area.peak import peak
    from benchmarks.wide_area.time_to_loss import time_to_loss

    from hypha_ray.codec import NAMES

    return {
        **_of_scheduling(),
        ("start", *START): partial(start, beside),
        SINKS: sinks,
        ("inner_overhead", "inner_loop_cpu", "data_wait_fraction"): inner_loop,
        **_of_reinforcement(),
        ("bridge_receive", "bridge_throughput", "bridge_file"): bridge,
        ("bridge_relay",): relay,
        SLICE_PATH: slice_path,
        DATA_FAULTS: data_faults,
        tuple(f"{row}_{millions}M_{count}" for millions, count in SIZES for row in EXCHANGES): exchange,
        DEVICE: device_exchange,
        ("time_to_loss",): time_to_loss,
        ("overlap_none", "overlap", "overlap_one_in_flight", "overlap_three_in_flight"): overlap,
        ("peak_bytes",): peak,
        **_of_convergence(),
        (*(f"codec_{name}" for name in NAMES[1:]), DOWNWARD): codecs,
        **groups_on(device),
    }


def _of_scheduling() -> dict[tuple[str, ...], Callable[[], Rows]]:
    """Rows of plans, the scheduler's core, predictions of runs, and the market."""
    from benchmarks.scheduling.core import ROWS as CORE
    from benchmarks.scheduling.core import core
    from benchmarks.scheduling.market import market
    from benchmarks.scheduling.planner import ROWS as PLANNER
    from benchmarks.scheduling.planner import plan_time, planner
    from benchmarks.scheduling.prediction import ROWS as PREDICTION
    from benchmarks.scheduling.prediction import prediction
    from benchmarks.scheduling.streams import streams

    return {
        PLANNER: planner,
        ("plan_64_ms", "plan_10000_ms"): plan_time,
        CORE: core,
        ("streams_500",): streams,
        ("hire", "exchange_leases", "selection_10000"): market,
        PREDICTION: prediction,
    }


def _of_reinforcement() -> dict[tuple[str, ...], Callable[[], Rows]]:
    """Rows of reinforcement learning."""
    from benchmarks.rl.ahead import ROWS as AHEAD
    from benchmarks.rl.ahead import ahead
    from benchmarks.rl.engines import LONG, ROUND, long_responses, rounds
    from benchmarks.rl.steps import ROWS as RL
    from benchmarks.rl.steps import rl

    return {RL: rl, AHEAD: ahead, ROUND: rounds, LONG: long_responses}


def _of_convergence() -> dict[tuple[str, ...], Callable[[], Rows]]:
    """Rows of the losses that ways of exchange lead to."""
    from benchmarks.convergence.asynchrony import ROWS as ASYNCHRONY
    from benchmarks.convergence.asynchrony import asynchrony
    from benchmarks.convergence.exchange_options import ROWS as OPTIONS
    from benchmarks.convergence.exchange_options import options
    from benchmarks.convergence.quality import KINDS, quality

    return {
        ASYNCHRONY: asynchrony,
        OPTIONS: options,
        **{(row, f"{row}_alone"): partial(quality, row) for row in KINDS},
    }


def main() -> None:
    """Measure, print, write."""
    arguments = parse_options(Arguments, __doc__, sys.argv[1:])
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it when it is imported, and some rows start Ray twice.
    if arguments.beside is not None and not (arguments.beside / "jobs" / "diloco.py").is_file():
        raise ConfigError("CFG003", "--beside is no checkout", str(arguments.beside), fix="name its folder")
    require_writable("--json", arguments.json)
    measures = _chosen(arguments)
    rows: Rows = {}
    failed: list[str] = []
    for number, (names, measure) in enumerate(measures.items(), 1):
        print(f"measuring {', '.join(names)} ({number} of {len(measures)}) …", file=sys.stderr)
        try:
            new_rows = measure()
        except Exception as error:  # The other rows are worth having.
            failed.append(names[0])
            print(f"{names[0]}: no figure, {type(error).__name__}: {error}", file=sys.stderr)
            continue
        _show(new_rows)
        rows |= new_rows
        if arguments.json is not None:
            write_result("--json", arguments.json, json.dumps(rows, indent=2) + "\n")
    if arguments.plots is not None:
        from benchmarks.plots import draw

        for file in draw(rows, arguments.plots):
            print(f"drawn: {file}", file=sys.stderr)
    if failed:
        sys.exit(f"without figures: {', '.join(failed)}")


def _chosen(arguments: Arguments) -> dict[tuple[str, ...], Callable[[], Rows]]:
    """Groups that have a row to be measured.

    Raises:
        ConfigError: CFG001, there is no row of a given name.

    """
    measures = groups(arguments.device, arguments.beside)
    names = [name for group in measures for name in group]
    unknown = sorted(set(arguments.only) - set(names))
    if unknown:
        allowed = ", ".join(dict.fromkeys(names))
        remedy = choice_remedy(unknown[0], " | ".join(names))
        raise ConfigError("CFG001", f"no row {unknown[0]!r}", allowed=allowed, fix=remedy)
    only = set(arguments.only or names)
    return {group: measure for group, measure in measures.items() if only & set(group)}


def _show(rows: Rows) -> None:
    for name, row in rows.items():
        conditions = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("value", "target"))
        print(f"{name:<20} {row['value']:>10.4g}   {row['target']:<8} {conditions}", flush=True)


if __name__ == "__main__":
    run(main)
