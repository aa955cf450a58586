"""The common case in one pass over memory: fp32 weights, their mean, and Nesterov's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hypha_ray.config import Job
from hypha_ray.config.schema import Sync
from hypha_ray.config.tables.optimizers import OuterOptimizer
from hypha_ray.kernels import Averaged, is_worth_it, load_ahead, nesterov, portions
from hypha_ray.server.groups import Group
from hypha_ray.server.merge import Values, Work, shares
from hypha_ray.types import Flat


def is_common(outer: OuterOptimizer, sync: Sync) -> bool:
    """Whether a job's outer steps are of this kind."""
    fp32 = sync.codec == "fp32" and not sync.traits.sends_gradients
    return fp32 and (outer.name, sync.merge) == ("nesterov", "mean")


def get_ready(job: Job, flats: Iterable[Flat]) -> None:
    """Load the kernel of a job's outer steps in the background, if arrays of these sizes use it."""
    if is_common(job.outer_optimizer, job.sync):
        load_ahead("outer", max((array.size for flat in flats for array in flat.values()), default=0))


def in_one_pass(
    values: Values, weights: Sequence[float], eta: float, mu: float, group: Group, theta: bool, state: bool
) -> Work[list[float]] | None:
    """Work of `merge.sweep` on a block; results are bit-identical to those of `mean` and `outer_step`.

    Args:
        values: the workers' weights.
        weights: weight of each worker in the mean.
        eta: the outer learning rate.
        mu: the outer momentum.
        group: θ and state, and the arrays for new ones.
        theta: whether new θ is wanted.
        state: whether new momentum is wanted.

    Returns:
        The work; None if the values aren't fp32 weights, are too few, or the kernel can't be compiled here.

    """
    as_they_are = not (values.relative or values.deltas) and all(scale == 1 for scale in values.scales)
    replaces = eta == 1 and mu == 0
    fits = values.theta.dtype == torch.float32 and len(group.state) == 1
    if not as_they_are or replaces or not fits or not is_worth_it("outer", values.theta.numel()):
        return None
    table, (old,), (new,) = portions(shares(weights)), group.state, group.new_state

    def work(part: slice, _: torch.Tensor, __: torch.Tensor) -> list[float]:
        room = group.new_theta[part] if theta else None, new[part] if state else None
        return nesterov(eta, mu, Averaged(values.read(part), table, group.theta[part], old[part], *room))

    return work
