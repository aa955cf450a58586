"""Metadata of the samples of a step: which keys are there and where, and which calls may begin.

The readiness rule is that of ReaLHF's buffer (arXiv:2406.14088): a call may begin with the samples that have all of its
keys, the oldest first. A sample leaves when every call is through with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hypha_ray.rl.dataflow.graph import Call, Graph
from hypha_ray.rl.dataflow.plan import Shard
from hypha_ray.rl.dataflow.sample import Meta


@dataclass
class _Slot:
    where: dict[str, Shard] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)


class Buffer:
    """Samples of a step on their way through the graph. It holds no arrays.

    Args:
        graph: calls that each sample goes through once.

    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._slots: dict[str, _Slot] = {}  # in the order in which ids came, the oldest first

    def __len__(self) -> int:
        return len(self._slots)

    def put(self, meta: Meta, shard: Shard) -> None:
        """Add ids that a fetch has brought.

        Raises:
            ValueError: an id is there already.

        """
        for name in meta.ids:
            if name in self._slots:
                raise ValueError(f"sample {name} was fetched twice")
            self._slots[name] = _Slot()
        self.amend(meta, shard)

    def amend(self, meta: Meta, shard: Shard) -> None:
        """Add keys that a call has made."""
        for key in meta.lengths:
            for name, tokens in zip(meta.ids, meta.tokens(key), strict=True):
                slot = self._slots[name]
                slot.where[key], slot.tokens[key] = shard, tokens

    def ready(self, call: Call) -> tuple[str, ...]:
        """Return the ids that a call may begin with and hasn't begun with, the oldest first."""
        takes = frozenset(call.takes)
        return tuple(
            name for name, slot in self._slots.items() if call.name not in slot.begun and slot.where.keys() >= takes
        )

    def begin(self, call: Call, ids: Iterable[str]) -> None:
        """Note that a call has been given ids."""
        for name in ids:
            self._slots[name].begun.add(call.name)

    def end(self, call: Call, ids: Iterable[str]) -> tuple[str, ...]:
        """Note that a call is through with ids; return those that all calls are through with, which leave."""
        for name in ids:
            self._slots[name].ended.add(call.name)
        calls = len(self._graph.calls)
        over = tuple(name for name, slot in self._slots.items() if len(slot.ended) == calls)
        for name in over:
            del self._slots[name]
        return over

    def where(self, ids: Iterable[str]) -> dict[str, Mapping[str, Shard]]:
        """Return the places of all keys of ids."""
        return {name: self._slots[name].where for name in ids}

    def tokens(self, ids: Iterable[str], key: str) -> list[int]:
        """Return the tokens that ids have under a key."""
        return [self._slots[name].tokens[key] for name in ids]
