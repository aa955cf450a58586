"""Parts of a batch for the processes of a worker, whose models are equal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypha_ray.errors import ConfigError
from hypha_ray.types import Samples


def parts_of(batch: Samples, count: int) -> list[Samples]:
    """Cut a batch into that many parts, of which the first ones may be larger by a sample, and the last ones empty."""
    whole, rest = divmod(len(batch), count)
    ends = [number * whole + min(number, rest) for number in range(count + 1)]
    return [batch.part(slice(start, stop)) for start, stop in pairwise(ends)]


def require_equal(built: str, others: Iterable[str]) -> None:
    """Refuse processes whose models have other fingerprints than this one's.

    Raises:
        ConfigError: MODEL022.

    """
    if any(other != built for other in others):
        what = "the processes of a worker have built different models from the same job file"
        raise ConfigError("MODEL022", what, fix="name a model whose weights don't change, by model.revision")
