"""The server with one defect each."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypha_ray.server import merge, outer, payloads, reduce
from tests.support.mutation import Defect, call, condition, iterated, mutated, operation, returned, value

MUTANTS = {
    "a worker counts twice": Defect("server.payloads", "admit", operation("and", "False")),
    "the oldest incarnation counts": Defect("server.payloads", "admit", operation("-", "{0}", 1)),
    "deltas come in order of arrival": Defect("server.payloads", "admit", value("key", "lambda one: 0")),
    "deltas without samples count": Defect("server.payloads", "admit", operation("<", "False")),
    "names aren't compared": Defect("server.payloads", "misfit", operation("!=", "len({0}) != len({1})", 1)),
    "dtypes aren't compared": Defect("server.payloads", "misfit", operation("!=", "False", 2)),
    "strided arrays count": Defect("server.payloads", "misfit", operation("or", "{0} or {1}")),
    "damage is overlooked": Defect("server.reduce", "_Result._damage", operation("not", "False")),
    "damage shifts the median": Defect(
        "server.reduce",
        "_Result.reasons_to_reject",
        returned("[one or far for one, far in zip({}, excessive([*map(self.norm, range(workers))], gate))]", 1),
    ),
    "an overflow is everybody's fault": Defect(
        "server.reduce",
        "_Result.reasons_to_reject",
        call("any", "{} and all(map(math.isfinite, self.changes.values()))", 2),
    ),
    "an overflow is nobody's fault": Defect("server.reduce", "_Result.reasons_to_reject", condition("False", 3)),
    "nobody is gated": Defect("server.payloads", "excessive", operation(">", "False")),
    "two are gated": Defect("server.payloads", "", value("_ENOUGH", "2")),
    "the gate stands at the median": Defect("server.payloads", "excessive", operation("*", "{1}")),
    "the gate is set by the mean": Defect("server.payloads", "_median", call("median", "sum({0}) / len({0})")),
    "among zeros everything is too long": Defect("server.payloads", "excessive", condition("True", 1)),
    "nobody is clipped": Defect("server.payloads", "clip_scales", operation("/", "1.0")),
    "short deltas are made longer": Defect("server.payloads", "clip_scales", condition("{0} > 0 < {1}")),
    "among zeros everything is clipped": Defect("server.payloads", "clip_scales", condition("{0} > {1}")),
    "clipping goes by one group": Defect("server.reduce", "_scales", iterated("{}[:1]", 3)),
    "buffers are clipped": Defect(
        "server.reduce",
        "_Reduction.merge_buffer",
        call("_values", "_values({0}, {1}, {2}, {3}, self.scales)"),
    ),
    "clipped norms are recorded": Defect(
        "server.merge", "Values.block", call("square_sum", "square_sum({0} * self.scales[len(squares)])")
    ),
    "a clipped weight forgets θ": Defect("server.merge", "Values.block", call("add", "{1} * {2}")),
    "deltas are taken for weights": Defect("server.reduce", "_values", operation("==", "False")),
    "norms leave groups out": Defect("server.reduce", "_Result.norm", call("is_trained", "{0}[-1] == '2'")),
    "samples don't weigh": Defect("server.merge", "weights_of", condition("False", 1)),
    "uniform weights aren't": Defect("server.merge", "weights_of", condition("True", 1)),
    "trimming ignores its part": Defect("server.merge", "merger", call("max", "1")),
    "trimming may drop nothing": Defect("server.merge", "merger", call("max", "{1}")),
    "one end is trimmed": Defect(
        "server.merge", "trimmed_mean.merge", call("middle_mean", "middle_mean({0.0}[2 * {0.1.0}:], {1})")
    ),
    "trimming weighs by samples": Defect(
        "server.merge", "trimmed_mean", call("mean", "{} if {0.1.1.1} else mean(range(1, {0.1.0} + 1))")
    ),
    "the median is the mean": Defect("server.merge", "merger", call("trimmed_mean", "trimmed_mean({0}, 1)", 2)),
    "the median weighs the middle two": Defect("server.merge", "trimmed_mean", operation("*", "range(1, {1} + 1)", 1)),
    "sorting stops early": Defect("server.merge", "ascending", call("len", "{} - 1", 1)),
    "sorting passes over every other pair": Defect("server.merge", "ascending", operation("%", "0")),
    "sorting writes into payloads": Defect("server.merge", "ascending", value("=", "[*{2}]", 1)),
    "one pass takes deltas for weights": Defect("server.outer", "fused_step", operation("not", "True", 1)),
    "one pass doesn't clip": Defect("server.outer", "fused_step", call("all", "True")),
    "one pass weighs all alike": Defect("server.outer", "fused_step", call("shares", "shares([1] * len({0}))")),
    "one pass averages instead of trimming": Defect(
        "server.outer", "has_fused_kernel", operation("==", "{0} == ('nesterov', {0.1})", 2)
    ),
}


@cache
def mutant(name: str) -> Any:
    """The reducer with that defect."""
    return mutated([payloads, merge, outer, reduce], name, MUTANTS)[-1]
