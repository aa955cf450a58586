"""The server with one defect each: its source with one place changed."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hypha_ray.server import admission, fused, merge, outer, reduce

DAMAGED = "        if any(damaged):\n            return damaged\n"
ALL_NORMS = "excessive([self.norm(index) for index in range(workers)], gate)"
AT_ONCE = DAMAGED.replace("damaged\n", f"[one or far for one, far in zip(damaged, {ALL_NORMS})]\n")
OWN_SCALES = "            values = _values(group, before, payloads, spec)\n"
SCALED_TOO = "            values = _values(group, before, payloads, spec, scales)\n"
WEIGHED = 'list(weights) if sync.weighting == "samples" else [1] * len(weights)'
MIDDLE = "mean([1] * (workers - 2 * drop))"
ALL_FINITE = "all(map(math.isfinite, self.changes.values()))"
DROPPED = "max(1, int(sync.trim * workers))"
NORM = "if is_trained(group)))\n\n    def update_norm"

MUTANTS = {
    "a worker counts twice": ("if admitted and admitted[-1].worker == delta.worker:", "if False:"),
    "the oldest incarnation counts": ("(one.worker, -one.incarnation)", "(one.worker, one.incarnation)"),
    "deltas come in order of arrival": ("key=lambda one: (one.worker, -one.incarnation)", "key=lambda one: 0"),
    "deltas without samples count": ("elif delta.weight < least:", "elif False:"),
    "names aren't compared": ("if payload.keys() != form.keys():", "if len(payload) != len(form):"),
    "dtypes aren't compared": ("if array.dtype != np.dtype(dtype):", "if False:"),
    "strided arrays count": (" or not array.flags.c_contiguous", ""),
    "damage is overlooked": ("if not math.isfinite(squares[index]):", "if False:"),
    "damage shifts the median": (DAMAGED, AT_ONCE),
    "an overflow is everybody's fault": ("if any(strange):", f"if any(strange) and {ALL_FINITE}:"),
    "an overflow is nobody's fault": ("if overflows else None]", "if False else None]"),
    "nobody is gated": ("if n > limit else None", "if False else None"),
    "two are gated": ("_ENOUGH = 3", "_ENOUGH = 2"),
    "the gate stands at the median": ("limit = times * middle if", "limit = middle if"),
    "the gate is set by the mean": ("return median(norms) if", "return sum(norms) / len(norms) if"),
    "among zeros everything is too long": ("times * middle if middle else math.inf", "times * middle"),
    "nobody is clipped": ("[limit / norm if norm > limit", "[1.0 if norm > limit"),
    "short deltas are made longer": ("if norm > limit > 0 else", "if norm > 0 < limit else"),
    "among zeros everything is clipped": ("if norm > limit > 0 else", "if norm > limit else"),
    "clipping goes by one group": ("sum(one[index] for one in squares)", "sum(one[index] for one in squares[:1])"),
    "buffers are clipped": (OWN_SCALES, SCALED_TOO),
    "clipped norms are recorded": ("square_sum(delta))\n", "square_sum(delta * scale))\n"),
    "a clipped weight forgets θ": ("torch.add(before, delta, alpha=scale)", "delta * scale"),
    "deltas are taken for weights": ('spec.codec.yields == "deltas"', "False"),
    "norms leave groups out": (NORM, NORM.replace("is_trained(group)", "group[-1] == '2'")),
    "samples don't weigh": (WEIGHED, "[1] * len(weights)"),
    "uniform weights aren't": (WEIGHED, "list(weights)"),
    "trimming ignores its part": (DROPPED, "1"),
    "trimming may drop nothing": (DROPPED, "int(sync.trim * workers)"),
    "one end is trimmed": ("[drop : workers - drop]", "[2 * drop :]"),
    "trimming weighs by samples": (MIDDLE, f"{MIDDLE} if drop else mean(range(1, workers + 1))"),
    "the median is the mean": ("return trimmed_mean(workers, workers)", "return trimmed_mean(workers, 1)"),
    "the median weighs the middle two": (MIDDLE, "mean(range(1, workers - 2 * drop + 1))"),
    "sorting stops early": ("for turn in range(len(rows)):", "for turn in range(len(rows) - 1):"),
    "sorting passes over every other pair": ("range(turn % 2, len(rows) - 1, 2)", "range(0, len(rows) - 1, 2)"),
    "sorting writes into payloads": ("[value.clone() for value in values]", "[*values]"),
    "one pass takes deltas for weights": ("not (values.relative or values.deltas)", "True"),
    "one pass doesn't clip": ("all(scale == 1 for scale in values.scales)", "True"),
    "one pass weighs all alike": ("portions(shares(weights))", "portions(shares([1] * len(weights)))"),
    "one pass averages instead of trimming": ('== ("nesterov", "mean")', '== ("nesterov", sync.merge)'),
}  # fmt: skip


@cache
def mutant(name: str) -> Any:
    """The reducer with that defect."""
    old, new = MUTANTS[name]
    modules = (admission, merge, outer, fused, reduce)
    sources = {module.__name__: Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules}
    assert sum(source.count(old) for source in sources.values()) == 1, f"{name}: its place is gone, or isn't unique"
    package = f"mutant_server_{len(sys.modules)}"
    for module, source in sources.items():
        _load(module.replace("hypha_ray.server", package), source.replace(old, new), package, [*sources])
    return sys.modules[f"{package}.reduce"]


def _load(name: str, source: str, package: str, family: list[str]) -> None:
    """Run a module that imports its defective neighbours instead of the real ones."""
    for member in family:
        source = source.replace(f"from {member} import", f"from {member.replace('hypha_ray.server', package)} import")
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
