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
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from hypha_ray.config.entry_point import require_writable, run, write_result
from hypha_ray.config.keys import choice_remedy
from hypha_ray.config.options import make_plot_folder, parse_options
from hypha_ray.errors import ConfigError
from hypha_ray.files import use_tools

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
    from benchmarks.places import GPU, GPU_ROWS, PLACES, QUALITY, QUALITY_ROWS

    given: dict[str, tuple[object, ...]] = {"start:start": (beside,)}
    of_rows: dict[tuple[str, ...], Callable[[], Rows]] = {
        names: partial(_measured, place, *given.get(place, ())) for place, names in PLACES.items()
    }
    for row in QUALITY_ROWS:
        of_rows[row, f"{row}_alone"] = partial(_measured, QUALITY, row)
    for row in GPU_ROWS:
        of_rows["gpu", row] = partial(_measured, GPU, device, row)
    return of_rows


def _measured(place: str, *arguments: object) -> Rows:
    """Rows of a function of the benchmarks, whose libraries are loaded only now."""
    module, _, function = place.partition(":")
    rows: Rows = getattr(import_module(f"benchmarks.{module}"), function)(*arguments)
    return rows


def main() -> None:
    """Measure, print, write."""
    use_tools()
    from benchmarks.gpu.rows import is_there

    arguments = parse_options(Arguments, __doc__, sys.argv[1:])
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it when it is imported, and some rows start Ray twice.
    if arguments.beside is not None and not (arguments.beside / "jobs" / "diloco.py").is_file():
        raise ConfigError("CFG003", "--beside is no checkout", str(arguments.beside), fix="name its folder")
    require_writable("--json", arguments.json)
    measures = _chosen(arguments)
    if arguments.plots is not None:
        make_plot_folder("--plots", arguments.plots)
    rows: Rows = {}
    failed: list[str] = []
    for number, (names, measure) in enumerate(measures.items(), 1):
        if "gpu" not in names or is_there(arguments.device):
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
        ConfigError: CFG001, there is no row of a given name; CFG011, no row is measured beside another checkout.

    """
    measures = groups(arguments.device, arguments.beside)
    names = [name for group in measures for name in group]
    unknown = sorted(set(arguments.only) - set(names))
    if unknown:
        allowed = ", ".join(dict.fromkeys(names))
        remedy = choice_remedy(unknown[0], " | ".join(names))
        raise ConfigError("CFG001", f"no row {unknown[0]!r}", allowed=allowed, fix=remedy)
    only = set(arguments.only or names)
    chosen = {group: measure for group, measure in measures.items() if only & set(group)}
    if arguments.beside is not None and all("start" not in group for group in chosen):
        raise ConfigError(
            "CFG011", "--beside is for the rows of start alone", fix="leave it out, or add start to --only"
        )
    return chosen


def _show(rows: Rows) -> None:
    for name, row in rows.items():
        conditions = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("value", "target"))
        print(f"{name:<20} {row['value']:>10.4g}   {row['target']:<8} {conditions}", flush=True)


if __name__ == "__main__":
    run(main)
