"""All states of a tiny run, breadth first: two workers, two slices, two rounds, one crash, one repeated delta.

States are told apart by everything but times and statistics: plans are made from these, but at equal speeds they make
no difference worth a state of its own. The graph has no cycle, for each step uses something up; so if every state
without a further step is a run that has ended well, every path leads to one.
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from pydantic import BaseModel

from hypha_ray.types.data import SliceInfo, Span
from hypha_ray.types.rounds import Contribution, Plan, Source, Verdict
from tests.support.tiny_run import State


def key(state: State) -> bytes:
    """Of all that matters, without times and statistics."""
    workers = sorted((number, worker.key()) for number, worker in state.workers.items())
    said = sorted(state.said, key=repr) if state.repeats else []
    outside = (sorted(state.arriving.items()), said, state.reduce, state.unwritten)
    rest = (state.crashes, state.repeats, state.over, [(p.round, p.spans) for p in state.books.log])
    return hashlib.sha256(repr((workers, outside, rest, _core_key(state.core))).encode()).digest()


def _core_key(core: Any) -> Any:
    strategy, roster = core.view().strategy, core.view().roster
    ledger, hashes = strategy.plans.ledger, core._weight_hashes
    slots = [_slot_key(slot) for slot in roster.slots.values()]
    books = (ledger.state(), sorted((number, spans) for number, spans in ledger.held.items() if spans))
    rounds = [type(strategy.state).__name__, _round_key(strategy.current)]
    rounds += [(_round_key(one.round), sorted(one.merging)) for one in strategy.pending.awaiting_merge]
    evaluation = strategy.pending._evaluation
    evaluation = evaluation and (sorted(evaluation.pending.items()), sorted(evaluation.lost))
    trust = (
        core._layout_sha256,
        sorted(hashes._known),
        sorted(hashes._claims.values()),
        sorted(strategy._inner_states),
    )
    return slots, books, rounds, evaluation, strategy.next, trust, len(core._starters), sorted(core._timers)


def _slot_key(slot: Any) -> Any:
    member = slot.member
    flags = (slot.source, slot.lease is not None, slot.failures, slot.breakdowns, slot.done)
    if member is None or slot.lease is None:
        return flags
    held = sorted(member.cached_slices)
    return (
        flags,
        member.plan,
        member.assigned,
        held,
        member.untrained,
        member.needs_inner_state,
        member.progress.batches,
    )


def _round_key(one: Any) -> Any:
    if one is None:
        return None
    deltas = sorted((number, delta.source.incarnation) for number, delta in one.deltas.items())
    return one.number, sorted(one.awaiting), deltas, sorted(one.replay_plans)


_VALUES = (Contribution, Plan, SliceInfo, Source, Span, Verdict)
_SHARED: list[Any] = []
"""Values and tables that were in any state."""
_NUMBERS: dict[Any, int] = {}
"""Their places there, of tables by their identity."""


@dataclass(frozen=True)
class Found:
    """How large the space is."""

    states: int
    depth: int
    ends: int


class _Freezer(pickle.Pickler):
    """Leaves out what can't change: all states have the same tables of the job, and equal values once."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (BaseModel, *_VALUES)):
            return NotImplemented
        known = id(obj) if isinstance(obj, BaseModel) else obj
        number = _NUMBERS.setdefault(known, len(_NUMBERS))
        if number == len(_SHARED):
            _SHARED.append(obj)
        return _shared, (number,)


def _shared(number: int) -> Any:
    return _SHARED[number]


def freeze(state: State) -> bytes:
    out = BytesIO()
    _Freezer(out, pickle.HIGHEST_PROTOCOL).dump(state)
    return out.getvalue()


def thaw(frozen: bytes) -> State:
    state: State = pickle.loads(frozen)
    return state


def search(mode: str) -> Found:
    """Go through all states; raises an error at the first one that is wrong, or that can't go on."""
    first = State(mode)
    layer, seen = [freeze(first)], {key(first)}
    depth = ends = 0
    while layer:
        following: list[bytes] = []
        for frozen in layer:
            state = thaw(frozen)
            moves = list(state.moves())
            if not moves:
                assert state.over, "nothing can happen, and the run isn't over"
                ends += 1
            for number, move in enumerate(moves):
                state = thaw(frozen) if number else state
                state.move(*move)
                if (found := key(state)) not in seen:
                    seen.add(found)
                    following.append(freeze(state))
        layer = following
        depth += bool(layer)
    return Found(len(seen), depth, ends)
