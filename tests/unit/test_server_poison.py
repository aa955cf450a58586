"""One poisoned worker of eight, under each rule by which deltas are merged."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hypha_ray.config.schema import OuterOptimizer, Sync
from hypha_ray.server.gates import Received
from hypha_ray.server.reducer import Rules, initial_momentum, reduce
from hypha_ray.types import Entry, Flat, Layout, Verdict

GROUP, SIZE, WORKERS = "parameters/float32", 1000, 8
LAYOUT = Layout((Entry("w", "float32", (SIZE,), 0, GROUP, 0, SIZE),))
PLAIN = OuterOptimizer(learning_rate=1.0, momentum=0.0)
RULES = {
    "mean": Sync(),
    "clip": Sync(clip=1.0, norm_gate=1e9),
    "trimmed_mean": Sync(merge="trimmed_mean"),
    "median": Sync(merge="median"),
}
RNG = np.random.default_rng(7)
THETA = RNG.standard_normal(SIZE).astype(np.float32)
COMMON = RNG.normal(0, 0.01, SIZE)
DELTAS = [(COMMON + RNG.normal(0, 0.005, SIZE)).astype(np.float32) for _ in range(WORKERS)]
BAD = 5


def received(deltas: dict[int, np.ndarray]) -> list[Received]:
    return [Received(worker, 0, 10, {GROUP: THETA + delta}) for worker, delta in deltas.items()]


def outcome(messages: list[Received], sync: Sync) -> tuple[np.ndarray, Verdict]:
    rules = Rules(LAYOUT, 0, PLAIN, sync=sync)
    theta, _, verdict = reduce(0, {GROUP: THETA}, initial_momentum(LAYOUT, 0), messages, rules)
    return theta[GROUP], verdict


def others() -> dict[int, np.ndarray]:
    return {worker: delta for worker, delta in enumerate(DELTAS) if worker != BAD}


def with_bad(payload: Flat) -> list[Received]:
    return sorted([*received(others()), Received(BAD, 0, 10, payload)], key=lambda one: one.worker)


def spoilt(place: int, value: float) -> Flat:
    array = THETA + DELTAS[BAD]
    array[place] = value
    return {GROUP: array}


UNUSABLE: dict[str, Callable[[], Flat]] = {
    "nan": lambda: spoilt(0, np.nan),
    "inf": lambda: spoilt(SIZE - 1, np.inf),
    "minus inf": lambda: spoilt(17, -np.inf),
    "shape": lambda: {GROUP: THETA[:-1]},
    "transposed": lambda: {GROUP: THETA.reshape(10, -1)},
    "not contiguous": lambda: {GROUP: np.repeat(THETA, 2)[::2]},
    "float16": lambda: {GROUP: THETA.astype(np.float16)},
    "float64": lambda: {GROUP: THETA.astype(np.float64)},
    "integers": lambda: {GROUP: THETA.astype(np.int32)},
    "renamed": lambda: {"parameters/bfloat16": THETA},
    "one more": lambda: {GROUP: THETA, "buffers/float32": THETA},
    "empty": dict,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("poison", UNUSABLE)
def test_unusable_delta_is_as_absent_to_the_bit(poison: str, rule: str) -> None:
    theta, verdict = outcome(with_bad(UNUSABLE[poison]()), RULES[rule])
    without, _ = outcome(received(others()), RULES[rule])
    assert [rejection.worker for rejection in verdict.rejected] == [BAD]
    assert theta.tobytes() == without.tobytes()


@pytest.mark.parametrize("rule", ["mean", "trimmed_mean", "median"])
def test_huge_delta_is_rejected_by_its_norm_and_as_absent_to_the_bit(rule: str) -> None:
    theta, verdict = outcome(with_bad({GROUP: THETA + 1e6 * DELTAS[BAD]}), RULES[rule])
    assert [rejection.worker for rejection in verdict.rejected] == [BAD]
    assert "more than 10 times the median" in verdict.rejected[0].reason
    assert theta.tobytes() == outcome(received(others()), RULES[rule])[0].tobytes()


def test_delta_that_would_overflow_the_step_is_found_by_its_norm() -> None:
    _, verdict = outcome(with_bad({GROUP: np.full(SIZE, 3e38, np.float32)}), Sync())
    assert [rejection.worker for rejection in verdict.rejected] == [BAD]


def test_huge_delta_is_clipped_to_the_median_norm_where_that_is_asked_for() -> None:
    theta, verdict = outcome(with_bad({GROUP: THETA + 1e6 * DELTAS[BAD]}), RULES["clip"])
    assert not verdict.rejected
    assert verdict.accepted[BAD].norm > 1e5 * verdict.accepted[0].norm
    assert relative_error(theta - THETA) < 0.3


def relative_error(update: np.ndarray) -> float:
    honest = np.mean(DELTAS, axis=0)
    return float(np.linalg.norm(update - honest) / np.linalg.norm(honest))


@pytest.mark.parametrize(
    ("rule", "least", "most"), [("mean", 0.2, 0.35), ("trimmed_mean", 0, 0.15), ("median", 0, 0.2)]
)
def test_delta_of_the_wrong_sign_is_borne_by_the_robust_rules_alone(rule: str, least: float, most: float) -> None:
    theta, verdict = outcome(with_bad({GROUP: THETA - DELTAS[BAD]}), RULES[rule])
    assert not verdict.rejected
    assert least <= relative_error(theta - THETA) <= most


@pytest.mark.parametrize("rule", RULES)
def test_zero_delta_is_taken(rule: str) -> None:
    _, verdict = outcome(with_bad({GROUP: THETA.copy()}), RULES[rule])
    assert not verdict.rejected and verdict.accepted[BAD].norm == 0


@pytest.mark.parametrize("rule", RULES)
def test_all_zero_deltas_are_no_strangers_to_each_other(rule: str) -> None:
    theta, verdict = outcome(received(dict.fromkeys(range(4), np.zeros(SIZE, np.float32))), RULES[rule])
    assert not verdict.rejected and theta.tobytes() == THETA.tobytes()


def test_two_deltas_never_judge_each_other() -> None:
    _, verdict = outcome(received({0: DELTAS[0], 1: 1e6 * DELTAS[1]}), Sync(norm_gate=1.5))
    assert not verdict.rejected


def test_most_deltas_being_zero_makes_no_stranger_of_the_others() -> None:
    zero = np.zeros(SIZE, np.float32)
    _, verdict = outcome(received({0: DELTAS[0], 1: zero, 2: zero}), Sync())
    assert not verdict.rejected


def test_trimmed_mean_is_what_numpy_makes_of_it() -> None:
    weights = np.sort(np.stack([THETA + delta for delta in DELTAS]), axis=0)
    for trim, drop in ((0.125, 1), (0.3, 2), (0.01, 1)):
        theta, _ = outcome(received(dict(enumerate(DELTAS))), Sync(merge="trimmed_mean", trim=trim))
        assert np.abs(theta - weights[drop : WORKERS - drop].mean(axis=0)).max() < 1e-6


@pytest.mark.parametrize("workers", [2, 3, 7, 8])
@pytest.mark.parametrize("merge", ["median", "trimmed_mean"])
def test_median_is_what_numpy_makes_of_it_and_what_is_left_of_two(merge: str, workers: int) -> None:
    if merge == "median" or workers == 2:
        theta, _ = outcome(received(dict(enumerate(DELTAS[:workers]))), Sync(merge=merge))
        exact = np.median(np.stack([THETA + delta for delta in DELTAS[:workers]]), axis=0)
        assert np.abs(theta - exact).max() < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_arrival_order_changes_no_bit(rule: str) -> None:
    messages = received(dict(enumerate(DELTAS[:4])))
    assert len({outcome(list(order), RULES[rule])[0].tobytes() for order in permutations(messages)}) == 1


@given(
    arrays.arrays(np.float32, SIZE, elements=st.floats(-8, 8, width=32)),
    st.integers(1, 9),
    st.sampled_from(list(RULES)),
)
@settings(max_examples=60, deadline=None)
def test_identical_weights_stay_what_they_are(weights: np.ndarray, workers: int, rule: str) -> None:
    messages = [Received(worker, 0, 3 + worker, {GROUP: weights}) for worker in range(workers)]
    assert np.array_equal(outcome(messages, RULES[rule])[0], weights)


def test_clipping_leaves_what_is_short_enough_alone() -> None:
    messages = received(dict(enumerate(DELTAS)))
    assert outcome(messages, Sync(clip=5.0))[0].tobytes() == outcome(messages, Sync())[0].tobytes()
