"""The server's rules with one defect each: their source with one place changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.server import gates, merge, reducer

MUTANTS = {
    "gate judges two": (gates, "if len(norms) < 3 or middle == 0:", "if middle == 0:"),
    "gate stands at the median": (gates, "limit = times * middle", "limit = middle"),
    "gate is off": (gates, "if n > limit else None", "if False else None"),
    "gate divides zeros": (gates, "len(norms) < 3 or middle == 0", "len(norms) < 3"),
    "clip lengthens": (gates, "min(1.0, limit / norm)", "limit / norm"),
    "clip does nothing": (gates, "[min(1.0, limit / norm) if norm else 1.0", "[1.0"),
    "trim drops nothing": (merge, "drop = max(1, int(trim * len(values)))", "drop = int(trim * len(values)) // 2"),
    "trim drops one end": (merge, "[drop : len(values) - drop]", "[drop:]"),
    "median takes the upper one": (
        merge,
        "torch.lerp(ordered[half - 1], ordered[half], 0.5",
        "torch.lerp(ordered[half], ordered[half], 0.5",
    ),
    "median doesn't sort": (
        merge,
        "ordered, half = torch.stack(values).sort(dim=0).values",
        "ordered, half = torch.stack(values)",
    ),
    "clipped norms are recorded": (reducer, "attempt.deltas.setdefault(group, norms)", "attempt.deltas[group] = norms"),
    "damage is overlooked": (reducer, "if any(damaged):", "if False:"),
}
"""Name to module, place and defect."""


def planted(name: str, patch: pytest.MonkeyPatch) -> None:
    """Run the module anew with that defect, in place of the sound one."""
    module, old, new = MUTANTS[name]
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{name}: its place is gone, or isn't unique"
    namespace = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), "mutant", "exec"), namespace)
    for key, value in namespace.items():
        for holder in (module, reducer):
            if key in vars(holder) and getattr(vars(holder)[key], "__module__", None) == module.__name__:
                patch.setattr(holder, key, value)
