"""The ledger with one defect each: its source with one place changed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hypha_ray.scheduler.ledger import epoch, ledger
from hypha_ray.scheduler.ledger.ledger import Ledger

AVAILABLE = "samples = min(samples, self._available)\n        self._available -="
BACK = "self._available += span.samples\n        self._file(span.slice)"
EPOCHS = "for epoch in self._epochs.values() for part"
NOT_ALL_ITS_OWN = "or samples_of(held) - samples_of(left) != samples_of(spans)"
QUEUE = "if rank == self._rank(self._order[place]):"
RESTS = """\
        rest = {worker: _rest(worker, self.held.get(worker, []), spans) for worker, spans in deltas.items()}
        for worker, spans in deltas.items():
            self.held[worker] = rest[worker]
"""
ONE_BY_ONE = """\
        for worker, spans in deltas.items():
            self.held[worker] = _rest(worker, self.held.get(worker, []), spans)
"""

MUTANTS = {
    "commit leaves samples assigned": ("self.held[worker] = rest[worker]", "pass"),
    "commit takes foreign samples": (NOT_ALL_ITS_OWN, ""),
    "commit takes the same samples twice": ("!= samples_of(spans)", "!= samples_of(set(spans))"),
    "commit takes spans that run backwards": ("any(span.samples < 1 for span in spans)", "False"),
    "commit does half of a bad delta": (RESTS, ONE_BY_ONE),
    "commit counts for the oldest epoch": ("self._epochs[span.epoch].use(", "self._epochs[self._oldest].use("),
    "commit doesn't count": ("self.unused -= span.samples", "pass"),
    "commit forgets what was used before": ("*self.used.get(span.slice, ()), span", "span"),
    "release loses the last span": ("for span in rest:", "for span in rest[:-1]:"),
    "release isn't counted": (BACK, "self._file(span.slice)"),
    "release isn't queued": (BACK, "self._available += span.samples"),
    "release leaves a slice touched": ("            if index not in self.used:\n", "            if False:\n"),
    "release forgets what was free": ("joined([*self._free[span.slice], span])", "[span]"),
    "release takes what is to be kept": ("self.held.pop(worker, []), keep)", "self.held.pop(worker, []), ())"),
    "release lets the worker keep nothing": ("self.held[worker] = list(keep)", "pass"),
    "epoch is begun early": (AVAILABLE, AVAILABLE.replace("self._available)", "max(0, self._available - 1))")),
    "epochs close one at a time": ("while self._oldest in self._epochs", "if self._oldest in self._epochs"),
    "cached slices don't matter": ("known = {*cached, ", "known = {"),
    "own slices don't matter": (", *(span.slice for span in held)}", "}"),
    "shared slices don't matter": ("return 2 if self._assigned[index] else 1", "return 1"),
    "queue trusts old keys": (QUEUE, "if self._rank(self._order[place]) is not None:"),
    "upcoming empties the queue": ("for key in keys:", "for key in keys[:-1]:"),
    "state has one run of each slice": ("for span in part)", "for span in part[:1])"),
    "state has one epoch": (EPOCHS, "for epoch in [*self._epochs.values()][:1] for part"),
    "restore starts at epoch 0": ('ledger._oldest = state["epoch"]', "pass"),
    "restore forgets to count": ("        self._available -= used\n", ""),
}


@cache
def mutant(name: str) -> type[Ledger]:
    """The ledger with that defect."""
    old, new = MUTANTS[name]
    sources = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (epoch, ledger)]
    assert sum(source.count(old) for source in sources) == 1, f"{name}: its place is gone, or isn't unique"
    namespaces = [_run(source.replace(old, new)) for source in sources]
    shared = ("Epoch", "LedgerError", "by_slice", "samples_of", "without")
    namespaces[1].update({key: namespaces[0][key] for key in shared})
    damaged: type[Ledger] = namespaces[1]["Ledger"]
    return damaged


def _run(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "mutant"}
    exec(compile(source, "mutant", "exec"), namespace)
    return namespace
