"""A plain model of the parameter server in float64, and random rounds that a server has to get right beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hypha_ray.codec import Form
from hypha_ray.config.schema import Sync
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.server.payloads import Received
from hypha_ray.types import Entry, Flat, Layout, Verdict

WEIGHTS, WIDE = "parameters/float32", "parameters/float64"
STATISTICS, COUNTERS = "buffers/float32", "buffers/int64"
SIZES = {WEIGHTS: 200, WIDE: 40, STATISTICS: 6, COUNTERS: 2}
TRAINED = (WEIGHTS, WIDE)
PLAIN, FAST = OuterOptimizer(learning_rate=1.0, momentum=0.0), OuterOptimizer(learning_rate=10.0)

Wide = dict[str, np.ndarray]


def layout_of(sizes: Mapping[str, int]) -> Layout:
    """One tensor in each group."""
    return Layout(tuple(Entry(group, group.split("/")[1], (n,), 0, group, 0, n) for group, n in sizes.items()))


class Differences:
    """A codec whose payloads are deltas."""

    name, yields = "differences", "deltas"

    def encode(self, weights: Flat, theta: Flat | None) -> Flat:
        assert theta is not None
        return {group: array - theta[group] if group in TRAINED else array for group, array in weights.items()}

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        return {group: Form(group.split("/")[1], size) for group, size in groups.items()}

    def decode(
        self, payload: Mapping[str, torch.Tensor], group: str, part: slice, theta: torch.Tensor | None = None
    ) -> torch.Tensor:
        return payload[group][part]


FORMS = ("shape", "dtype", "names", "strided")
"""Poisons that show in a payload's form."""
DAMAGES = ("nan", "inf", "quiet nan")
"""Poisons that show in a norm that is no number."""
FACTORS = {"huge": 1e6, "large": 20.0, "flip": -1.0, "zero": 0.0, "small": 1e-3, "giant": 0.0}
"""Poisons that are numbers like others, and what they multiply a delta by."""


def poisoned(payload: Flat, theta: Flat, poison: str | None, relative: bool) -> Flat:
    """A payload with that damage."""
    spoilt = {group: array.copy() for group, array in payload.items()}
    factor = FACTORS["small"] if poison == "quiet nan" else FACTORS.get(poison or "")
    for group in payload.keys() & {*TRAINED} if factor is not None else ():
        origin = 0 if relative else theta[group]
        spoilt[group] = (origin + factor * (payload[group] - origin)).astype(payload[group].dtype)
    match poison:
        case "nan" | "inf":
            spoilt[WEIGHTS][-1] = float(poison)
        case "quiet nan":
            spoilt[STATISTICS][1] = np.nan
        case "giant":
            spoilt[WEIGHTS][:] = 3e38
        case "shape":
            spoilt[WEIGHTS] = spoilt[WEIGHTS][:-1]
        case "dtype":
            spoilt[WEIGHTS] = spoilt[WEIGHTS].astype(np.float16)
        case "names":
            spoilt[f"{WEIGHTS}/renamed"] = spoilt.pop(WEIGHTS)
        case "strided":
            spoilt[WEIGHTS] = np.repeat(spoilt[WEIGHTS], 2)[::2]
    return spoilt


@dataclass(frozen=True)
class Message:
    """A delta on its way, and what is wrong with it."""

    received: Received
    poison: str | None
    repeated: bool = False


class Round:
    """A random round: θ and momentum, rules, and deltas of which many are poisoned."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.relative = bool(rng.integers(2))
        self.outer = (PLAIN, FAST)[rng.integers(2)]
        self.sync = Sync(
            merge=("mean", "trimmed_mean", "median")[rng.integers(3)],
            weighting=("samples", "uniform")[rng.integers(2)],
            trim=(0.125, 0.3, 0.45)[rng.integers(3)],
            norm_gate=(10.0, 3.0)[rng.integers(2)],
            clip=(None, None, 1.0, 2.0)[rng.integers(4)],
        )
        self.theta = self._flat(1.0)
        self.momentum = {group: self._flat(0.01)[group] for group in TRAINED}
        self.common = self._flat(0.01)
        self.messages = [message for worker in range(rng.integers(1, 10)) for message in self._from(worker)]
        rng.shuffle(self.messages)  # type: ignore[arg-type]

    def _flat(self, scale: float) -> Flat:
        flat: Flat = {}
        for group, size in SIZES.items():
            values = self.rng.standard_normal(size) * scale
            flat[group] = (values * 1e6 if group == COUNTERS else values).astype(group.split("/")[1])
        return flat

    def _from(self, worker: int) -> list[Message]:
        poisons = (None, *FORMS, *DAMAGES, *FACTORS, "no samples", "repeated")
        poison = poisons[self.rng.integers(1, len(poisons)) if self.rng.random() < 0.4 else 0]
        noise = self._flat(0.005)
        weights = {group: self.theta[group] + self.common[group] + noise[group] for group in SIZES}
        sent = Differences().encode(weights, self.theta) if self.relative else weights
        sent = poisoned(sent, self.theta, poison, self.relative)
        samples = {"no samples": 0, "giant": 10**7}.get(poison or "", int(self.rng.integers(1, 50)))
        messages = [Message(Received(worker, 3, samples, sent), poison)]
        if poison == "repeated":
            older = poisoned(sent, self.theta, "flip", self.relative)
            messages.append(Message(Received(worker, 2, samples, older), poison, repeated=True))
        return messages

    def delta(self, message: Message) -> Wide:
        """What a payload says a worker changed, in float64; of buffers its value."""
        payload = message.received.payload
        origin = {g: 0 if self.relative or g not in TRAINED else self.theta[g].astype(np.float64) for g in payload}
        return {group: array.astype(np.float64) - origin[group] for group, array in payload.items()}


class Model:
    """What a round must come to."""

    def __init__(self, round: Round) -> None:
        self.round = round
        self.rejected: set[int] = set()
        self.left = [message for message in round.messages if self._is_whole(message)]
        self.left.sort(key=lambda message: message.received.worker)
        self.norms = {message.received.worker: self._norm(message) for message in self.left}
        while strange := self._strangers():
            self._drop(strange)
        self.theta = self._theta() if self.left else dict(round.theta)
        if any(np.abs(array).max() > np.finfo(group.split("/")[1]).max for group, array in self._floats()):
            self._drop({message.received.worker for message in self.left})
            self.theta = dict(round.theta)

    def _floats(self) -> Iterable[tuple[str, Any]]:
        return ((group, array) for group, array in self.theta.items() if group != COUNTERS)

    def _is_whole(self, message: Message) -> bool:
        whole = not message.repeated and message.poison not in (*FORMS, *DAMAGES, "no samples")
        if not whole:
            self.rejected.add(message.received.worker)
        return whole

    def _drop(self, workers: set[int]) -> None:
        self.rejected |= workers
        self.left = [message for message in self.left if message.received.worker not in workers]

    def _norm(self, message: Message) -> float:
        return float(np.linalg.norm(np.concatenate([self.round.delta(message)[group] for group in TRAINED])))

    def _median(self) -> float:
        return float(np.median([self.norms[message.received.worker] for message in self.left]))

    def _strangers(self) -> set[int]:
        if len(self.left) < 3 or self._median() == 0:
            return set()
        limit = self.round.sync.norm_gate * self._median()
        return {one.received.worker for one in self.left if self.norms[one.received.worker] > limit}

    def _scale(self, message: Message) -> float:
        norm, clip = self.norms[message.received.worker], self.round.sync.clip
        if clip is None or len(self.left) < 3 or self._median() == 0 or norm == 0:
            return 1.0
        return min(1.0, clip * self._median() / norm)

    def _theta(self) -> Wide:
        round, result = self.round, {COUNTERS: self.left[0].received.payload[COUNTERS]}
        for group in (*TRAINED, STATISTICS):
            scales = [self._scale(one) if group in TRAINED else 1.0 for one in self.left]
            rows = np.stack([s * round.delta(one)[group] for s, one in zip(scales, self.left, strict=True)])
            result[group] = self._merged(rows)
            if group in TRAINED:
                velocity = round.outer.momentum * round.momentum[group] + result[group]
                step = result[group] + round.outer.momentum * velocity
                result[group] = round.theta[group] + round.outer.learning_rate * step
        return result

    def _merged(self, rows: np.ndarray) -> np.ndarray:
        sync, n = self.round.sync, len(rows)
        if sync.merge == "mean":
            samples = [one.received.weight if sync.weighting == "samples" else 1 for one in self.left]
            return np.asarray(np.average(rows, axis=0, weights=samples))
        drop = max(1, int(sync.trim * n))
        if sync.merge == "median" or n <= 2 * drop:
            return np.asarray(np.median(rows, axis=0))
        return np.asarray(np.sort(rows, axis=0)[drop : n - drop].mean(axis=0))


def examine(server: Any, seed: int) -> None:
    """Have a server do a random round: the model's result, to the bit that of a round without what it rejects."""
    round = Round(seed)
    model = Model(round)
    theta, momentum, verdict = reduced(server, round, round.messages)
    assert {rejection.worker for rejection in verdict.rejected} == model.rejected
    assert [one.worker for one in verdict.accepted] == [message.received.worker for message in model.left]
    for one in verdict.accepted:
        assert np.isclose(one.norm, model.norms[one.worker], rtol=1e-3, atol=1e-6)
    for group in SIZES:
        rounding = (
            1e-6
            * round.outer.learning_rate
            * max(1.0, *(np.abs(one.received.payload[group]).max() for one in model.left), 0.0)
        )
        assert np.abs(theta[group] - model.theta[group]).max() <= rounding, group
    absent = reduced(server, round, model.left)
    assert bits(absent[0]) == bits(theta) and bits(absent[1]) == bits(momentum)
    assert absent[2] == replace(verdict, rejected=())


def reduced(server: Any, round: Round, messages: Iterable[Message]) -> tuple[Flat, Flat, Verdict]:
    """What a server makes of a round's θ and momentum with these messages."""
    codec = {"codec": Differences()} if round.relative else {}
    rules = server.ReduceSpec(layout_of(SIZES), 0, round.outer, round.sync, **codec)
    received = [message.received for message in messages]
    result: tuple[Flat, Flat, Verdict] = server.reduce(7, round.theta, round.momentum, received, rules)
    return result


def bits(flat: Flat) -> dict[str, bytes]:
    """The very bits of all arrays."""
    return {group: array.tobytes() for group, array in flat.items()}
