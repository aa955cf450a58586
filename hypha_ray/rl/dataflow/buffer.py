"""Metadata of the samples of a step: which keys are there and where, and which calls may begin.

The readiness rule is that of ReaLHF's buffer (arXiv:2406.14088): a call may begin with the samples that have all of its
keys, the oldest first. A sample leaves when every call is through with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from hypha_ray.rl.dataflow.graph import Call, Graph
from hypha_ray.rl.dataflow.plan import Shard, Where
from hypha_ray.rl.dataflow.sample import Meta


class Buffer:
    """Samples of a step on their way through the graph. It holds no arrays.

    Args:
        graph: calls that each sample goes through once.

    """

    def __init__(self, graph: Graph) -> None:
        self._calls = [call.name for call in graph.calls]
        self._ids: dict[str, None] = {}  # in the order in which they came, the oldest first
        self._where: dict[str, dict[str, Shard]] = defaultdict(dict)  # by key and id
        self._tokens: dict[str, dict[str, int]] = defaultdict(dict)  # by key and id
        self._begun: dict[str, set[str]] = defaultdict(set)  # by call
        self._ended: dict[str, set[str]] = defaultdict(set)  # by call

    def __len__(self) -> int:
        return len(self._ids)

    def put(self, meta: Meta, shard: Shard) -> None:
        """Add ids that a fetch has brought.

        Raises:
            ValueError: an id is there already.

        """
        for name in meta.ids:
            if name in self._ids:
                raise ValueError(f"sample {name} was fetched twice")
        self._ids |= dict.fromkeys(meta.ids)
        self.amend(meta, shard)

    def amend(self, meta: Meta, shard: Shard) -> None:
        """Add keys that a call has made."""
        for key in meta.lengths:
            self._where[key].update(dict.fromkeys(meta.ids, shard))
            self._tokens[key].update(zip(meta.ids, meta.tokens(key), strict=True))

    def ready(self, call: Call) -> tuple[str, ...]:
        """Return the ids that a call may begin with and hasn't begun with, the oldest first."""
        able = self._ids.keys() - self._begun[call.name]
        for key in call.takes:
            able &= self._where[key].keys()
        return tuple(name for name in self._ids if name in able)

    def begin(self, call: Call, ids: Iterable[str]) -> None:
        """Note that a call has been given ids."""
        self._begun[call.name].update(ids)

    def end(self, call: Call, ids: Iterable[str]) -> tuple[str, ...]:
        """Note that a call is through with ids; return those that all calls are through with, which leave."""
        self._ended[call.name].update(ids)
        through = set.intersection(*(self._ended[name] for name in self._calls))
        over = tuple(name for name in self._ids if name in through)
        columns: list[dict[str, Any]] = [self._ids, *self._where.values(), *self._tokens.values()]
        for column in columns if over else ():
            for name in over:
                column.pop(name, None)
        for calls in (*self._begun.values(), *self._ended.values()):
            calls.difference_update(over)
        return over

    @property
    def where(self) -> Where:
        """Places of all ids under each key."""
        return self._where

    def tokens(self, ids: Iterable[str], key: str) -> list[int]:
        """Return the tokens that ids have under a key."""
        return [self._tokens[key][name] for name in ids]
