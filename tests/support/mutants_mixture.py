"""The account of a mixture with one defect each."""

from __future__ import annotations

from functools import cache

from hypha_ray.scheduler import mixture
from hypha_ray.scheduler.mixture import Mixture
from tests.support.mutation import Defect, attribute, call, drop, mutated, operation, value

MUTANTS = {
    "weights don't add up to one": Defect("scheduler.mixture", "Mixture.__init__", operation("/", "{0}")),
    "all datasets have the same weight": Defect(
        "scheduler.mixture", "Mixture.__init__", operation("/", "1 / len({1.0})")
    ),
    "a batch doesn't make up for those before it": Defect(
        "scheduler.mixture", "_deal", call("max", "{1.0.0} * batch_samples")
    ),
    "a batch has its rest from the first dataset": Defect(
        "scheduler.mixture", "_deal", value("key", "lambda dataset: {0.0.0.1}")
    ),
    "a rest goes to the smallest remainder": Defect("scheduler.mixture", "_deal", operation("-", "{1} - {0}", 2)),
    "a dataset may give back what it had too much": Defect("scheduler.mixture", "_deal", call("max", "{1}")),
    "batches of one assignment aren't added up": Defect("scheduler.mixture", "Mixture._deals", drop("update")),
    "samples at hand don't count": Defect("scheduler.mixture", "Mixture._counts", operation("+", "{1}")),
    "used samples don't count": Defect("scheduler.mixture", "Mixture._counts", operation("+", "{0}")),
    "samples of a delta aren't recorded": Defect("scheduler.mixture", "Mixture.commit", call("update", "{of}")),
    "shares of the last commit are forgotten": Defect("scheduler.mixture", "Mixture.__init__", call("items", "()")),
    "batches are dealt as a whole": Defect("scheduler.mixture", "Mixture._deals", call("min", "{1}")),
    "samples come dataset by dataset": Defect(
        "scheduler.mixture", "Mixture.assign", call("_interleave", "chain(*{1})")
    ),
    "only the first dataset gets samples back": Defect(
        "scheduler.mixture", "Mixture.release", call("release", "{1.0} or {}")
    ),
    "a leaver keeps nothing": Defect("scheduler.mixture", "Mixture.release", call("release", "{of}.release({0})")),
    "the epoch is that of the first dataset": Defect("scheduler.mixture", "Mixture.epoch", call("min", "next({0})")),
    "a completed dataset has no cursors": Defect(
        "scheduler.mixture", "Mixture._of_epoch", attribute("sizes", "dict()")
    ),
    "a dataset's newer epoch isn't ahead": Defect("scheduler.mixture", "Mixture.ahead", operation(">", "False")),
    "used samples of the second dataset aren't restored": Defect(
        "scheduler.mixture", "Mixture.__init__", operation("==", "{0} == {1} == 0", 2)
    ),
    "slices are fed ahead of one dataset": Defect(
        "scheduler.mixture", "Mixture.upcoming", call("zip_longest", "zip_longest(*{0.0}[:1])")
    ),
}


@cache
def mutant(name: str) -> type[Mixture]:
    """The account with that defect."""
    (module,) = mutated([mixture], name, MUTANTS)
    damaged: type[Mixture] = module.Mixture
    return damaged
