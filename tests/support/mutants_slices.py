"""The ledger with one defect each."""

from __future__ import annotations

from functools import cache

from hypha_ray.scheduler import epoch, ledger
from hypha_ray.scheduler.ledger import Ledger
from tests.support.mutation import (
    Defect,
    attribute,
    call,
    drop,
    iterated,
    mutated,
    operation,
    returned,
    statement,
    value,
)

MUTANTS = {
    "commit leaves samples assigned": Defect("scheduler.ledger", "Ledger.commit", drop("held")),
    "commit takes foreign samples": Defect("scheduler.ledger", "_unused", operation("or", "{0}")),
    "commit takes the same samples twice": Defect(
        "scheduler.ledger", "_unused", call("samples_of", "samples_of(set({0}))", 3)
    ),
    "commit takes spans that run backwards": Defect("scheduler.ledger", "_unused", call("any", "False")),
    "commit does half of a bad delta": Defect(
        "scheduler.ledger",
        "Ledger.commit",
        value(
            "=",
            "type('Lazy', (dict,), {'__missing__': lambda _, worker: "
            "_unused(worker, self.held.get(worker, []), deltas[worker])})()",
        ),
    ),
    "commit counts for the oldest epoch": Defect(
        "scheduler.ledger", "Ledger.commit", attribute("epoch", "self._oldest")
    ),
    "commit doesn't count": Defect("scheduler.epoch", "Epoch.use", drop("unused")),
    "commit forgets what was used before": Defect("scheduler.epoch", "Epoch.use", call("joined", "joined([{0.1}])")),
    "release loses the last span": Defect("scheduler.ledger", "Ledger.release", iterated("{}[:-1]")),
    "release isn't counted": Defect("scheduler.epoch", "Epoch.give_back", drop("_available")),
    "release isn't queued": Defect("scheduler.epoch", "Epoch.give_back", drop("_enqueue")),
    "release leaves a slice touched": Defect("scheduler.epoch", "Epoch._enqueue", operation("not in", "False", 1)),
    "release forgets what was free": Defect("scheduler.epoch", "Epoch.give_back", call("joined", "[{0.1}]")),
    "release takes what is to be kept": Defect(
        "scheduler.ledger", "Ledger.release", call("_unused", "_unused({0}, {1}, ())")
    ),
    "release lets the worker keep nothing": Defect("scheduler.ledger", "Ledger.release", drop("held")),
    "epoch is begun early": Defect("scheduler.epoch", "Epoch.assign", attribute("_available", "max(0, {} - 1)")),
    "epochs close one at a time": Defect("scheduler.ledger", "Ledger._close_epochs", statement("_oldest", "{}\nbreak")),
    "cached slices don't matter": Defect("scheduler.ledger", "Ledger.assign", value("=", "{{1}}", 2)),
    "own slices don't matter": Defect("scheduler.ledger", "Ledger.assign", value("=", "{{0}}", 2)),
    "shared slices don't matter": Defect("scheduler.epoch", "Epoch._rank", returned("1", 3)),
    "queue trusts old keys": Defect("scheduler.epoch", "Epoch._next_slice", operation("==", "{1} is not None")),
    "upcoming empties the queue": Defect("scheduler.epoch", "Epoch.next_slices", iterated("{}[:-1]")),
    "state has one run of each slice": Defect(
        "scheduler.ledger", "Ledger.state", call("extend", "{of}.extend({0}[:1])")
    ),
    "state has one epoch": Defect("scheduler.ledger", "Ledger.state", call("values", "[*{}][:1]", 1)),
    "restore starts at epoch 0": Defect("scheduler.ledger", "Ledger.restore", drop("_oldest")),
    "restore forgets to count": Defect("scheduler.epoch", "Epoch.restore", drop("_available")),
}


@cache
def mutant(name: str) -> type[Ledger]:
    """The ledger with that defect."""
    damaged: type[Ledger] = mutated([epoch, ledger], name, MUTANTS)[-1].Ledger
    return damaged
