"""The account of a mixture with one defect each: its source with one place changed."""

from __future__ import annotations

from functools import cache

from hypha_ray.scheduler.ledger import mixture
from hypha_ray.scheduler.ledger.mixture import Mixture
from tests.support.mutation import mutated

RELEASE = "ledger.release(worker, _of(number, keep))"
MISSING = "missing = [max(0.0, weight * total - count) for"

MUTANTS = {
    "weights don't add up to one": ("[weight / sum(weights) for weight in weights]", "list(weights)"),
    "all datasets have the same weight": (
        "[weight / sum(weights) for weight in weights]",
        "[1 / len(weights) for _ in weights]",
    ),
    "a batch doesn't make up for those before it": (MISSING, "missing = [weight * size for"),
    "a batch has its rest from the first dataset": ("(deal[number] - wanted[number], number)", "number"),
    "a rest goes to the smallest remainder": (
        "deal[number] - wanted[number]",
        "wanted[number] - deal[number]",
    ),
    "a dataset may give back what it had too much": ("max(0.0, weight * total - count)", "weight * total - count"),
    "batches of one assignment aren't added up": ("counts.update(dict(enumerate(deals[-1])))", "pass"),
    "samples at hand don't count": ("_counted(self.held(worker)) + self._used", "self._used"),
    "used samples don't count": (" + self._used.get(worker, Counter())", ""),
    "samples of a delta aren't recorded": (".update(_counted(spans))", ""),
    "shares of the last commit are forgotten": ("for worker, counts in shares.items()}", "for worker, counts in ()}"),
    "batches are dealt as a whole": ("size = min(batch, samples)", "size = samples"),
    "samples come dataset by dataset": ("return tuple(_dealt(deals, taken))", "return tuple(chain(*taken))"),
    "only the first dataset gets samples back": (
        RELEASE,
        f"number or {RELEASE}",
    ),
    "a leaver keeps nothing": (RELEASE, "ledger.release(worker)"),
    "the epoch is that of the first dataset": ("min(ledger.epoch for ledger in", "next(ledger.epoch for ledger in"),
    "a completed dataset has no cursors": ("else ledger.sizes", "else {}"),
    "a dataset's newer epoch isn't ahead": ("if ledger.epoch > self.epoch else {}", "if False else {}"),
    "used samples of the second dataset aren't restored": (
        "if dataset_of(span[1]) == number]",
        "if dataset_of(span[1]) == number == 0]",
    ),
    "slices are fed ahead of one dataset": ("zip_longest(*parts)", "zip_longest(*parts[:1])"),
}


@cache
def mutant(name: str) -> type[Mixture]:
    """The account with that defect."""
    damaged: type[Mixture] = mutated(mixture, name, MUTANTS).Mixture
    return damaged
