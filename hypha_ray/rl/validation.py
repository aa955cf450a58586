"""Validation of a policy: a traverse of the graph of generation and reward for each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from hypha_ray.rl.dataflow.graph import Graph
from hypha_ray.rl.dataflow.master import Extras
from hypha_ray.rl.dataflow.requests import Reply
from hypha_ray.rl.dataflow.sample import Sample
from hypha_ray.rl.graphs import generation_hooks, validation_graph
from hypha_ray.rl.packing import sample_of
from hypha_ray.types import Samples, Sums, added

Replies: TypeAlias = Mapping[str, Sequence[Reply]]
"""Replies of workers, by the names of calls."""
Traverse: TypeAlias = Callable[[Graph, Sample, Mapping[str, Extras]], Replies]
"""Function that takes a batch through a graph, as `Master.traverse`."""


def validate(traverse: Traverse, batches: Iterable[Samples], model_workers: int = 1) -> Sums:
    """Return reward, pass@1 and length of responses, which are sampled with the same random numbers each time."""
    graph = validation_graph(model_workers)
    hooks = generation_hooks(model_workers)
    extras = {call.name: Extras({"evaluation": True}, hooks if call.op == "generate" else ()) for call in graph.calls}
    return added(sums_of(traverse(graph, sample_of(batch), extras)) for batch in batches)


def sums_of(replies: Replies) -> Sums:
    """Return the figures of all replies."""
    return added(reply.sums for each in replies.values() for reply in each)
