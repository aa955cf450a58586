"""Model function calls of a step, and their order: a call waits for the calls that make its keys.

After the dataflow graph of ReaLHF (arXiv:2406.14088, section 3): edges come from the names of inputs and outputs alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal, TypeAlias

from hypha_ray.errors import ConfigError

Operation: TypeAlias = Literal["generate", "inference", "train_step"]


@dataclass(frozen=True)
class Call:
    """One model function call."""

    name: str
    """Name of the call, such as ``actor_gen``."""
    role: str
    """Role of the model, such as ``actor``."""
    op: Operation
    """Operation of the model's interface."""
    takes: tuple[str, ...]
    """Keys that the call needs."""
    gives: tuple[str, ...] = ()
    """Keys that the call makes; empty for training."""


@dataclass(frozen=True)
class Graph:
    """Calls of a step, checked; made by `Graph.of`."""

    calls: tuple[Call, ...]
    """Calls in the order in which they were given."""
    levels: tuple[tuple[Call, ...], ...]
    """Calls by level: those of a level need nothing of each other and may run at once."""

    @classmethod
    def of(cls, calls: Iterable[Call], dataset_keys: Iterable[str]) -> Graph:
        """Check calls and order them.

        Args:
            calls: the calls, each with a name of its own.
            dataset_keys: keys that samples have before the first call.

        Raises:
            ConfigError: RL010 the calls wait for each other in a circle. RL011 a key is made twice, or two calls have
                one name. RL012 a key is made by no call and isn't in the dataset.

        """
        listed = tuple(calls)
        given = tuple(dataset_keys)
        makers = _makers(listed, given)
        for call in listed:
            for key in call.takes:
                if key not in makers and key not in given:
                    known = ", ".join(sorted({*makers, *given}))
                    raise ConfigError("RL012", f"call {call.name} needs a key that no call makes", key, known)
        return cls(listed, _levels(listed, makers))

    def text(self) -> str:
        """Return the graph as lines of text: a level a line, its calls with what they take and give."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for number, level in enumerate(self.levels):
            for call in level:
                made = f" -> {', '.join(call.gives)}" if call.gives else ""
                yield f"{number}  {call.name} ({call.role}.{call.op}): {', '.join(call.takes)}{made}"


def _makers(calls: tuple[Call, ...], dataset_keys: tuple[str, ...]) -> dict[str, Call]:
    for name, times in Counter(call.name for call in calls).items():
        if times > 1:
            raise ConfigError("RL011", f"{times} calls have one name", name, "names that differ")
    makers: dict[str, Call] = {}
    for call in calls:
        for key in call.gives:
            if key in makers or key in dataset_keys:
                other = f"call {makers[key].name}" if key in makers else "the dataset"
                raise ConfigError("RL011", f"call {call.name} makes a key that {other} has made", key)
            makers[key] = call
    return makers


def _levels(calls: tuple[Call, ...], makers: dict[str, Call]) -> tuple[tuple[Call, ...], ...]:
    order = TopologicalSorter({c.name: {makers[key].name for key in c.takes if key in makers} for c in calls})
    try:
        order.prepare()
    except CycleError as error:
        raise ConfigError("RL010", "calls wait for each other", " -> ".join(error.args[1])) from None
    levels: list[tuple[Call, ...]] = []
    while order.is_active():
        names = set(order.get_ready())
        levels.append(tuple(call for call in calls if call.name in names))
        order.done(*names)
    return tuple(levels)
