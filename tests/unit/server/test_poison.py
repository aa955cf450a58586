"""One poisoned worker of eight under each rule by which deltas are merged, sent as weights and as deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hypha_ray.config.schema import Sync
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, initial_momentum, reduce
from hypha_ray.types import Flat, Rejection, Verdict
from tests.support.server_model import (
    DAMAGES,
    FORMS,
    PLAIN,
    STATISTICS,
    WEIGHTS,
    WIDE,
    Differences,
    bits,
    layout_of,
    poisoned,
)

pytestmark = pytest.mark.usefixtures("compiled_steps")

WORKERS, BAD = 8, 5
LAYOUT = layout_of({WEIGHTS: 1000, STATISTICS: 3})
SYNCS = {
    "mean": Sync(),
    "clip": Sync(clip=1.0),
    "trimmed_mean": Sync(merge="trimmed_mean"),
    "median": Sync(merge="median"),
}
RNG = np.random.default_rng(7)
THETA = {WEIGHTS: RNG.standard_normal(1000).astype(np.float32), STATISTICS: np.ones(3, np.float32)}
COMMON = RNG.normal(0, 0.01, 1000)
DELTAS = [(COMMON + RNG.normal(0, 0.005, 1000)).astype(np.float32) for _ in range(WORKERS)]
SENT = [{WEIGHTS: THETA[WEIGHTS] + delta, STATISTICS: RNG.random(3, np.float32)} for delta in DELTAS]

rules = pytest.mark.parametrize("rule", SYNCS)
kinds = pytest.mark.parametrize("relative", [False, True], ids=["weights", "deltas"])


def deliver(payloads: dict[int, Flat], sync: Sync, relative: bool = False, outer: OuterOptimizer = PLAIN) -> Outcome:
    """What becomes of payloads of these workers, given as weights and sent as weights or deltas."""
    codec = {"codec": Differences()} if relative else {}
    return finish([Received(worker, 0, 10, sent) for worker, sent in payloads.items()], sync, outer, **codec)


Outcome = tuple[Flat, Verdict]


def finish(received: Sequence[Received], sync: Sync, outer: OuterOptimizer = PLAIN, **codec: Differences) -> Outcome:
    some = ReduceSpec(LAYOUT, 0, outer, sync, **codec)
    theta, _, verdict = reduce(0, THETA, initial_momentum(LAYOUT, 0), received, some)
    return theta, verdict


def encoded(relative: bool) -> dict[int, Flat]:
    sent = [Differences().encode(weights, THETA) for weights in SENT] if relative else SENT
    return dict(enumerate(sent))


def others(relative: bool = False) -> dict[int, Flat]:
    return {worker: sent for worker, sent in encoded(relative).items() if worker != BAD}


def with_poison(poison: str, relative: bool = False) -> dict[int, Flat]:
    payloads = encoded(relative)
    return {**payloads, BAD: poisoned(payloads[BAD], THETA, poison, relative)}


REASONS = {
    "nan": "non-finite values in parameters/float32",
    "inf": "non-finite values in parameters/float32",
    "quiet nan": "non-finite values in buffers/float32",
    "shape": "shape (999,) of parameters/float32 instead of (1000,), contiguous",
    "dtype": "dtype float16 of parameters/float32 instead of float32",
    "names": "groups buffers/float32, parameters/float32/renamed instead of buffers/float32, parameters/float32",
    "strided": "shape (1000,) of parameters/float32 instead of (1000,), contiguous",
    "huge": "norm 3.57e+05 is more than 10 times the median 0.363",
    "giant": "norm 9.49e+39 is more than 10 times the median 0.363",
}


@rules
@kinds
@pytest.mark.parametrize("poison", [*FORMS, *DAMAGES])
def test_unusable_delta_is_as_absent_to_the_bit(poison: str, relative: bool, rule: str) -> None:
    check_as_absent(poison, relative, rule)


@rules
@kinds
@pytest.mark.parametrize("poison", ["huge", "giant"])
def test_huge_delta_is_rejected_by_its_norm_and_as_absent_to_the_bit(poison: str, relative: bool, rule: str) -> None:
    check_as_absent(poison, relative, rule)


def check_as_absent(poison: str, relative: bool, rule: str) -> None:
    theta, verdict = deliver(with_poison(poison, relative), SYNCS[rule], relative)
    absent, without = deliver(others(relative), SYNCS[rule], relative)
    assert verdict.rejected == (Rejection(BAD, REASONS[poison]),)
    assert bits(theta) == bits(absent)
    assert replace(verdict, rejected=()) == without


@rules
def test_repeated_delta_is_as_absent_to_the_bit(rule: str) -> None:
    received = [Received(worker, 0, 10, sent) for worker, sent in enumerate(SENT)]
    older = received[BAD]._replace(incarnation=-1, payload=with_poison("flip")[BAD])
    once, verdict = finish(received, SYNCS[rule])
    for message in (received[BAD], older):
        theta, again = finish([message, *received], SYNCS[rule])
        assert bits(theta) == bits(once)
        assert again == replace(verdict, rejected=(Rejection(BAD, "repeated: incarnation 0 of this worker is taken"),))


def test_huge_delta_that_alone_would_overflow_the_step_leaves_the_others_in() -> None:
    outer = OuterOptimizer(learning_rate=100.0)
    theta, verdict = deliver(with_poison("giant"), Sync(), outer=outer)
    assert [rejection.worker for rejection in verdict.rejected] == [BAD]
    assert bits(theta) == bits(deliver(others(), Sync(), outer=outer)[0])


def error(theta: Flat) -> float:
    """How far the update is from the mean of the seven sound deltas, as a part of that."""
    sound = np.mean([delta for worker, delta in enumerate(DELTAS) if worker != BAD], axis=0)
    return float(np.linalg.norm(theta[WEIGHTS] - THETA[WEIGHTS] - sound) / np.linalg.norm(sound))


@kinds
@pytest.mark.parametrize(
    ("rule", "least", "most"),
    [("mean", 0.24, 0.27), ("clip", 0.24, 0.27), ("trimmed_mean", 0.07, 0.15), ("median", 0.10, 0.15)],
)
def test_delta_of_the_wrong_sign_is_borne_by_the_robust_rules_alone(
    rule: str, least: float, most: float, relative: bool
) -> None:
    theta, verdict = deliver(with_poison("flip", relative), SYNCS[rule], relative)
    assert not verdict.rejected
    assert least <= error(theta) <= most


@kinds
@pytest.mark.parametrize(
    ("rule", "least", "most"),
    [("mean", 0.12, 0.13), ("clip", 0.12, 0.14), ("trimmed_mean", 0.07, 0.12), ("median", 0.10, 0.15)],
)
def test_zero_delta_is_taken_and_shortens_the_mean(rule: str, least: float, most: float, relative: bool) -> None:
    theta, verdict = deliver(with_poison("zero", relative), SYNCS[rule], relative)
    assert not verdict.rejected and verdict.accepted[BAD].norm == 0
    assert least <= error(theta) <= most


@kinds
def test_huge_delta_that_no_gate_stops_is_clipped_to_the_median_norm(relative: bool) -> None:
    theta, verdict = deliver(with_poison("huge", relative), Sync(norm_gate=1e9, clip=1.0), relative)
    assert verdict.accepted[BAD].norm == pytest.approx(1e6 * np.linalg.norm(DELTAS[BAD]), rel=1e-3)
    assert error(theta) < 0.1
    unclipped, _ = deliver(with_poison("huge", relative), Sync(norm_gate=1e9), relative)
    assert error(unclipped) > 1e5


def test_buffers_are_merged_by_the_rule_and_never_clipped() -> None:
    statistics = np.stack([sent[STATISTICS] for sent in SENT])
    for rule, exact in (("clip", statistics.mean(axis=0)), ("median", np.median(statistics, axis=0))):
        theta, _ = deliver(encoded(False), SYNCS[rule])
        assert theta[STATISTICS] == pytest.approx(exact, abs=1e-6)


def scaled(*factors: float) -> dict[int, Flat]:
    """Payloads whose deltas are these multiples of one, of norm 1; θ is 0 then."""
    unit = np.full(1000, 1000**-0.5, np.float32)
    return {worker: {**SENT[0], WEIGHTS: np.float32(factor) * unit} for worker, factor in enumerate(factors)}


@pytest.mark.parametrize(
    ("factors", "rejected"),
    [
        ((1, 9.99, 1), []),
        ((1, 10.01, 1), [1]),
        ((1, 1e6), []),
        ((0, 1, 0), []),
        ((0, 0, 0, 0), []),
        ((1, 1, 0, 0, 0), []),
        ((0, 1, 1), []),
        ((1, 1, 2, 16, 40), [4, 3]),
        ((0.1, 1.5, 2, 12, 1e6), [4]),
    ],
)
def test_norm_gate_rejects_what_is_far_longer_than_the_median(factors: tuple[float, ...], rejected: list[int]) -> None:
    _, verdict = finish([Received(w, 0, 1, sent) for w, sent in scaled(*factors).items()], Sync(), codec=Differences())
    assert [rejection.worker for rejection in verdict.rejected] == sorted(rejected)
    assert [one.norm for one in verdict.accepted] == pytest.approx(
        [factor for worker, factor in enumerate(factors) if worker not in rejected], rel=1e-6
    )


@pytest.mark.parametrize(
    ("factors", "mean"), [((1, 4, 1), 1.0), ((1, 2, 3), 5 / 3), ((1, 9), 5.0), ((0, 9, 0), 3.0), ((9, 3, 3, 3), 3.0)]
)
def test_clipping_shortens_what_is_longer_than_the_median_and_nothing_else(
    factors: tuple[float, ...], mean: float
) -> None:
    theta, verdict = deliver(scaled(*factors), Sync(clip=1.0), relative=True)
    assert (theta[WEIGHTS] - THETA[WEIGHTS]).astype(np.float64).sum() == pytest.approx(mean * 1000**0.5, rel=1e-4)
    assert [one.norm for one in verdict.accepted] == pytest.approx(factors, rel=1e-6)


def test_clipping_that_clips_nothing_changes_no_bit() -> None:
    assert bits(deliver(encoded(False), Sync(clip=5.0))[0]) == bits(deliver(encoded(False), Sync())[0])


def test_norms_go_over_all_groups_of_parameters() -> None:
    layout = layout_of({WEIGHTS: 4, WIDE: 4})
    zeros = {WEIGHTS: np.zeros(4, np.float32), WIDE: np.zeros(4)}
    sent = [{WEIGHTS: np.full(4, 3, np.float32), WIDE: np.full(4, long / 2)} for long in (8.0, 8.0, 80.0)]
    received = [Received(worker, 0, 1, payload) for worker, payload in enumerate(sent)]
    for sync, rejected in ((Sync(), 0), (Sync(norm_gate=8.0), 1)):
        verdict = reduce(0, zeros, initial_momentum(layout, 0), received, ReduceSpec(layout, 0, PLAIN, sync))[2]
        assert len(verdict.rejected) == rejected
    assert [one.norm for one in verdict.accepted] == pytest.approx([10.0, 10.0])


ROWS = arrays.arrays(np.float32, (5, 6), elements=st.floats(-100, 100, width=32, allow_subnormal=False))
MODES = st.sampled_from(list(SYNCS))
ORDERS = st.sampled_from(list(permutations(range(5))))


def small(rows: Sequence[np.ndarray], workers: Sequence[int], sync: Sync, relative: bool) -> tuple[bytes, Verdict]:
    layout, theta = layout_of({WEIGHTS: 6}), {WEIGHTS: np.linspace(-1, 1, 6, dtype=np.float32)}
    some = ReduceSpec(layout, 0, PLAIN, sync, **({"codec": Differences()} if relative else {}))
    received = [Received(worker, 0, 3 + worker, {WEIGHTS: row}) for worker, row in zip(workers, rows, strict=True)]
    new, _, verdict = reduce(0, theta, initial_momentum(layout, 0), received, some)
    return new[WEIGHTS].tobytes(), verdict


@pytest.mark.slow
@given(ROWS, ORDERS, MODES, st.booleans())
@settings(max_examples=80, deadline=None)
def test_any_order_of_arrival_gives_the_same_bits(
    rows: np.ndarray, order: tuple[int, ...], mode: str, relative: bool
) -> None:
    shuffled = small(rows[list(order)], order, SYNCS[mode], relative)
    assert shuffled == small(rows, range(5), SYNCS[mode], relative)


@given(ROWS, ORDERS, st.sampled_from(["trimmed_mean", "median"]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_trimmed_mean_and_median_do_not_care_which_worker_has_which_delta(
    rows: np.ndarray, order: tuple[int, ...], mode: str, relative: bool
) -> None:
    renamed, _ = small(rows + 0.0, order, SYNCS[mode], relative)
    assert renamed == small(rows + 0.0, range(5), SYNCS[mode], relative)[0]


@given(ROWS, st.integers(1, 9), MODES)
@settings(max_examples=80, deadline=None)
def test_identical_weights_of_any_number_stay_what_they_are_to_the_bit(
    rows: np.ndarray, workers: int, mode: str
) -> None:
    assert small([rows[0]] * workers, range(workers), SYNCS[mode], False)[0] == rows[0].tobytes()
