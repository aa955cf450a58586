"""Note on the parameters that Muon takes, and on those that it leaves to AdamW."""

from __future__ import annotations

from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.optim.muon_weights import MATRICES, shares


def muon_notes(case: Case) -> list[str]:
    """Return a note with the numbers of parameters of both optimizers; none under another inner optimizer."""
    if case.job.inner_optimizer.name != "muon":
        return []
    counts = shares(case.network)
    total = sum(counts.values())
    taken = counts.pop(MATRICES, 0)
    rest = ", ".join(f"{count:,} of {kind}" for kind, count in counts.items())
    note = f"muon steps on {taken:,} of {total:,} parameters ({taken / max(1, total):.1%}), those of matrices"
    return [f"{note}; AdamW on the rest: {rest}" if rest else note]
