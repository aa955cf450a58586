"""Lines of a dry run about machines: the workers that fit, in each group and in all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from hypha_ray.config import Job
from hypha_ray.market.requirements import NodeResources, group_need


def machine_lines(job: Job, workers: Collection[int], nodes: Sequence[NodeResources]) -> Iterator[str]:
    """Lines about the workers of these numbers, which fit on the nodes; the last one is of the whole job."""
    first = 0
    for group in job.workers:
        last = first + group.count - 1
        numbers = f"workers {first} to {last}, each" if group.count > 1 else f"worker {first}"
        fitting = sum(first <= worker <= last for worker in workers)
        yield f"{numbers} with {group_need(group)}: {fitting} of {group.count} fit"
        first += group.count
    yield f"resources: {len(workers)} of {job.num_workers} workers fit; nodes: {len(nodes)}"
