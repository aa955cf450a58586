"""Replies of model workers to a batch, and the figures in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from hypha_ray.rl.dataflow.graph import GENERATING
from hypha_ray.rl.dataflow.requests import Reply
from hypha_ray.rl.generator_pool import Responded, Rollout
from hypha_ray.types import PromptsOfResponder, Sums, added

Replies: TypeAlias = Mapping[str, Sequence[Reply]]
"""Replies of workers, by the names of calls."""


class Traversed(NamedTuple):
    """Replies to a batch that was taken through the graph of a step."""

    replies: Replies
    """Replies of the step, and of a stream before it."""
    before: tuple[Reply, ...]
    """Replies of draws before the step; their figures are among `sums`."""
    shown: Sequence[Mapping[str, Any]]
    """Records of a few responses."""
    sums: Sums
    """Figures beside those of `replies`."""
    transfers: Mapping[str, int]
    """Number of collectives of each kind that would make the transfers."""
    extra: int = 0
    """Number of prompts that were drawn beside those of the batch."""
    responders: tuple[PromptsOfResponder, ...] = ()
    """Prompts by the process that responded to them, if others than the worker may."""

    @property
    def collectives(self) -> Sums:
        """Figures of the transfers."""
        return {name: (float(number), 1.0) for name, number in self.transfers.items()}


def sums_of(replies: Replies) -> Sums:
    """Return the figures of all replies."""
    return added(reply.sums for reply in chain.from_iterable(replies.values()))


def with_advantages(
    records: Sequence[Mapping[str, Any]], advantages: Mapping[str, Sequence[float]]
) -> tuple[Mapping[str, Any], ...]:
    """Return the records of responses with their advantages, which are given by the ids of prompts."""
    complete: list[Mapping[str, Any]] = []
    for record in records:
        key = "-".join(str(record[part]) for part in ("epoch", "slice", "sample"))
        group = advantages.get(key)  # A group that was left out before advantages were computed has none.
        advantage = None if group is None else group[record["number"]]
        complete.append({**record, "advantage": advantage})
    return tuple(complete)


def staleness_sums(streamed: Sequence[Reply], version: int) -> Sums:
    """Return the figure of how many steps old the weights were that sampled streamed responses, by token."""
    sums: list[Sums] = []
    for reply in streamed:
        assert reply.meta is not None
        tokens = sum(reply.meta.flat("responses"))
        steps = version - reply.facts["version"]
        sums.append({"staleness": (float(steps * tokens), float(tokens))})
    return added(sums)


def shown_of(responded: Sequence[Responded[Rollout]], most: int) -> tuple[Mapping[str, Any], ...]:
    """Return the records of a batch's first responses, each with the name of the process that has given it."""
    records: list[Mapping[str, Any]] = []
    for part in responded:
        for record in part.answer.facts["shown"]:
            records.append({**record, "responder": part.responder})
    return tuple(records[:most])


def responders_of(responded: Sequence[Responded[Rollout]]) -> tuple[PromptsOfResponder, ...]:
    """Return the prompts of a batch by the process that responded to them."""
    parts: list[PromptsOfResponder] = []
    for part in responded:
        keys = part.piece.prompts.data["keys"].tolist()
        prompts = tuple((epoch, index, sample) for epoch, index, sample in keys)
        parts.append(PromptsOfResponder(part.responder, prompts))
    return tuple(parts)


def shares_of_generators(responded: Sequence[Responded[Rollout]]) -> Sums:
    """Return the figure of the share of prompts that generators have responded to, and not the worker itself."""
    prompts = 0
    by_generators = 0
    for part in responded:
        count = len(part.piece.prompts.ids)
        prompts += count
        by_generators += count * part.is_shared
    return {"by_generators": (float(by_generators), float(prompts))}


def times(traversed: Traversed) -> dict[str, float]:
    """Return the seconds that all processes have responded and rewarded for, and those that the first one has trained.

    Waits for other processes are in neither, so that they tell how many processes of the one kind keep the other busy.
    """
    generation_s = sum(reply.seconds for reply in traversed.before)
    training_s = 0.0
    for name, replies in traversed.replies.items():
        if name in GENERATING:
            generation_s += sum(reply.seconds for reply in replies)
        else:
            training_s += sum(reply.seconds for reply in replies if reply.worker == 0)
    return {"generation_s": generation_s, "training_s": training_s}
