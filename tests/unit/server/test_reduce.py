"""A round's reduction: the outer optimizer's numbers, and what must not change a single bit of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hypha_ray.codec import NAMES, Form, codec, encoder
from hypha_ray.config.schema import Sync
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.server.merge import BLOCK
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, blank, initial_momentum, reduce
from hypha_ray.types import Contribution, Entry, Flat, Layout, Rejection

pytestmark = pytest.mark.usefixtures("compiled_steps")

GROUP, MEAN, COUNT = "parameters/float32", "buffers/float32", "buffers/int64"
DILOCO, PLAIN = OuterOptimizer(), OuterOptimizer(learning_rate=1.0, momentum=0.0)


def layout(size: int, statistics: int = 3, counters: int = 2) -> Layout:
    groups = {GROUP: size, MEAN: statistics, COUNT: counters}
    return Layout(
        tuple(Entry(f"t{i}", group.split("/")[1], (n,), 0, group, 0, n) for i, (group, n) in enumerate(groups.items()))
    )


def flat(seed: int, size: int, scale: float = 1.0) -> Flat:
    rng = np.random.default_rng(seed)
    values = {
        GROUP: (rng.standard_normal(size) * scale).astype(np.float32),
        MEAN: rng.standard_normal(3).astype(np.float32),
        COUNT: np.array([seed, 2 * seed]),
    }
    for array in values.values():
        array.flags.writeable = False
    return values


def bits(*flats: Flat) -> list[bytes]:
    return [one[group].tobytes() for one in flats for group in sorted(one)]


SIZE = BLOCK + 12_345
RULES = ReduceSpec(layout(SIZE), 0, DILOCO)
THETA, MOMENTUM = flat(100, SIZE), {GROUP: flat(101, SIZE, 0.1)[GROUP]}
RECEIVED = tuple(Received(worker, 0, 10 + worker, flat(worker, SIZE)) for worker in range(4))


def with_values(delta: Received, group: str, place: int, value: float) -> Received:
    array = delta.payload[group].copy()
    array[place] = value
    return delta._replace(payload={**delta.payload, group: array})


def only_parameters(values: np.ndarray) -> tuple[ReduceSpec, Flat]:
    size = len(values)
    return ReduceSpec(Layout((Entry("w", "float32", (size,), 0, GROUP, 0, size),)), 0, DILOCO), {GROUP: values}


@pytest.mark.slow
def test_reduce_of_the_reference_systems_deltas_gives_its_updates() -> None:
    rules, theta = only_parameters(np.zeros(5, np.float32))
    rules = replace(rules, outer=OuterOptimizer(learning_rate=0.1, momentum=0.7))
    first = {GROUP: np.full(5, 0.5, np.float32)}
    theta1, momentum1, _ = reduce(0, theta, initial_momentum(rules.layout, 0), [Received(0, 0, 1, first)], rules)
    second = {GROUP: theta1[GROUP] + np.array([0.1, 0.2, 0.3, 0.4, 0.5], np.float32)}
    theta2, _, _ = reduce(1, theta1, momentum1, [Received(0, 0, 1, second)], rules)
    assert theta1[GROUP] == pytest.approx([0.085] * 5, abs=1e-7)
    assert theta2[GROUP] - theta1[GROUP] == pytest.approx([0.0415, 0.0585, 0.0755, 0.0925, 0.1095], abs=1e-7)


FLOATS = arrays.arrays(np.float32, (4, 9), elements=st.floats(-100, 100, width=32, allow_subnormal=False))


@pytest.mark.slow
@given(FLOATS, st.floats(0.01, 2), st.floats(0.01, 0.99))
@settings(max_examples=60, deadline=None)
def test_reduce_sequence_of_rounds_is_torch_sgd_to_the_bit(steps: np.ndarray, eta: float, mu: float) -> None:
    rules, theta = only_parameters(steps[0])
    rules = replace(rules, outer=OuterOptimizer(learning_rate=eta, momentum=mu))
    oracle = torch.nn.Parameter(torch.tensor(steps[0]))
    sgd = torch.optim.SGD([oracle], eta, momentum=mu, nesterov=True, foreach=False)
    momentum = initial_momentum(rules.layout, 0)
    for number, weights in enumerate(steps[1:]):
        oracle.grad = oracle.detach() - torch.tensor(weights)
        sgd.step()
        theta, momentum, _ = reduce(number, theta, momentum, [Received(0, 0, 1, {GROUP: weights})], rules)
    assert np.array_equal(theta[GROUP], oracle.detach().numpy())
    assert np.array_equal(momentum[GROUP], -sgd.state[oracle]["momentum_buffer"].numpy())


def test_reduce_one_worker_plain_average_gives_its_own_bits() -> None:
    theta, momentum, verdict = reduce(3, THETA, MOMENTUM, [RECEIVED[2]], replace(RULES, outer=PLAIN))
    assert bits(theta) == bits(RECEIVED[2].payload)
    assert np.array_equal(momentum[GROUP], RECEIVED[2].payload[GROUP] - THETA[GROUP])
    assert verdict.round == 3 and verdict.update_norm == pytest.approx(verdict.accepted[0].norm)


@pytest.mark.parametrize("outer", [PLAIN, DILOCO])
@pytest.mark.parametrize("workers", [2, 3, 5, 9])
def test_reduce_identical_workers_gives_the_same_bits_for_any_number(outer: OuterOptimizer, workers: int) -> None:
    rules = replace(RULES, outer=outer)
    crowd = [Received(worker, 0, 7 * worker + 1, RECEIVED[0].payload) for worker in range(workers)]
    alone, together = reduce(0, THETA, MOMENTUM, crowd[:1], rules), reduce(0, THETA, MOMENTUM, crowd, rules)
    assert bits(*alone[:2]) == bits(*together[:2])


def test_reduce_any_order_of_arrival_gives_the_same_bits() -> None:
    results = [reduce(0, THETA, MOMENTUM, order, RULES) for order in permutations(RECEIVED[:3])]
    assert len({tuple(bits(*result[:2])) for result in results}) == 1
    assert len({result[2] for result in results}) == 1


@pytest.mark.parametrize("threads", [2, 5])
def test_reduce_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    alone, together = (reduce(0, THETA, MOMENTUM, RECEIVED, replace(RULES, threads=n)) for n in (1, threads))
    assert bits(*alone[:2]) == bits(*together[:2]) and alone[2] == together[2]


def test_reduce_four_workers_is_the_weighted_mean_and_one_nesterov_step() -> None:
    theta, momentum, verdict = reduce(0, THETA, MOMENTUM, RECEIVED, RULES)
    weights = [delta.weight for delta in RECEIVED]
    mean = np.average([delta.payload[GROUP].astype(np.float64) for delta in RECEIVED], axis=0, weights=weights)
    velocity = 0.9 * MOMENTUM[GROUP].astype(np.float64) + mean - THETA[GROUP]
    expected = THETA[GROUP] + 0.7 * (0.9 * velocity + mean - THETA[GROUP])
    assert np.abs(momentum[GROUP] - velocity).max() < 2e-6
    assert np.abs(theta[GROUP] - expected).max() < 2e-6
    assert verdict.update_norm == pytest.approx(np.linalg.norm(expected - THETA[GROUP]), rel=1e-6)


def test_reduce_uniform_weighting_ignores_samples_and_still_reports_them() -> None:
    rules = replace(RULES, sync=Sync(weighting="uniform"), outer=PLAIN)
    theta, _, verdict = reduce(0, THETA, MOMENTUM, RECEIVED, rules)
    mean = np.mean([delta.payload[GROUP].astype(np.float64) for delta in RECEIVED], axis=0)
    assert np.abs(theta[GROUP] - mean).max() < 1e-6
    assert [contribution.samples for contribution in verdict.accepted] == [10, 11, 12, 13]


def test_reduce_buffers_averages_floats_without_momentum_and_takes_integers_from_the_first() -> None:
    theta, momentum, _ = reduce(0, THETA, MOMENTUM, RECEIVED[::-1], replace(RULES, sync=Sync(weighting="uniform")))
    assert theta[MEAN] == pytest.approx(np.mean([delta.payload[MEAN] for delta in RECEIVED], axis=0), abs=1e-6)
    assert theta[COUNT].tolist() == RECEIVED[0].payload[COUNT].tolist()
    assert set(momentum) == {GROUP}


def test_reduce_norms_are_those_of_the_parameters_deltas() -> None:
    _, _, verdict = reduce(0, THETA, MOMENTUM, RECEIVED, RULES)
    exact = [np.linalg.norm(delta.payload[GROUP].astype(np.float64) - THETA[GROUP]) for delta in RECEIVED]
    assert [one.norm for one in verdict.accepted] == pytest.approx(exact, rel=1e-7)
    assert [(one.worker, one.incarnation) for one in verdict.accepted] == [(worker, 0) for worker in range(4)]


def test_reduce_leaves_its_inputs_alone() -> None:
    before = bits(THETA, MOMENTUM, *(delta.payload for delta in RECEIVED))
    reduce(0, THETA, MOMENTUM, RECEIVED, RULES)
    assert bits(THETA, MOMENTUM, *(delta.payload for delta in RECEIVED)) == before


DAMAGED = {
    "nan": with_values(RECEIVED[1], GROUP, 5, np.nan),
    "inf-at-the-end": with_values(RECEIVED[1], GROUP, SIZE - 1, np.inf),
    "minus-inf": with_values(RECEIVED[1], GROUP, BLOCK, -np.inf),
    "nan-in-a-buffer": with_values(RECEIVED[1], MEAN, 2, np.nan),
    "too-short": RECEIVED[1]._replace(payload={**RECEIVED[1].payload, GROUP: np.zeros(3, np.float32)}),
    "float64": RECEIVED[1]._replace(payload={**RECEIVED[1].payload, GROUP: np.zeros(SIZE)}),
    "group-missing": RECEIVED[1]._replace(payload={GROUP: RECEIVED[1].payload[GROUP]}),
    "no-samples": RECEIVED[1]._replace(weight=0),
}
REASONS = {
    "nan": f"non-finite values in {GROUP}",
    "nan-in-a-buffer": f"non-finite values in {MEAN}",
    "too-short": f"shape (3,) of {GROUP} instead of ({SIZE},), contiguous",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_reduce_rejected_delta_is_absent_to_the_bit(damage: str) -> None:
    others = [delta for delta in RECEIVED if delta.worker != 1]
    absent, present = (reduce(0, THETA, MOMENTUM, deltas, RULES) for deltas in (others, [*others, DAMAGED[damage]]))
    assert bits(*absent[:2]) == bits(*present[:2])
    assert [rejection.worker for rejection in present[2].rejected] == [1]
    assert present[2].rejected[0].reason == REASONS.get(damage, present[2].rejected[0].reason)
    assert replace(present[2], rejected=()) == absent[2]


def test_reduce_with_all_rejected_returns_state_as_it_is() -> None:
    bad = [with_values(RECEIVED[1], GROUP, 0, np.nan), DAMAGED["too-short"]._replace(worker=0)]
    theta, momentum, verdict = reduce(0, THETA, MOMENTUM, bad, RULES)
    assert theta is THETA and momentum is MOMENTUM
    assert verdict.accepted == () and verdict.update_norm == 0
    assert [rejection.worker for rejection in verdict.rejected] == [0, 1]


def test_reduce_repeated_worker_counts_once() -> None:
    twice = [*RECEIVED, RECEIVED[3]]
    once, repeated = reduce(0, THETA, MOMENTUM, RECEIVED, RULES), reduce(0, THETA, MOMENTUM, twice, RULES)
    assert bits(*once[:2]) == bits(*repeated[:2])
    assert repeated[2].rejected == (Rejection(3, "repeated: incarnation 0 of this worker is taken"),)


def test_reduce_large_legal_values_are_taken_unchanged() -> None:
    rules, theta = only_parameters(np.array([0.0, 1.0, 2.0], np.float32))
    weights = np.array([1e38, -0.0, 1e-45], np.float32)
    rules = replace(rules, outer=PLAIN)
    new, _, verdict = reduce(0, theta, initial_momentum(rules.layout, 0), [Received(0, 0, 1, {GROUP: weights})], rules)
    assert new[GROUP].tobytes() == weights.tobytes()
    assert verdict.accepted == (Contribution(0, 0, 1, pytest.approx(1e38)),)


ANY = arrays.arrays(np.float32, (4, 3), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


@pytest.mark.slow
@given(ANY)
@settings(max_examples=100, deadline=None)
def test_reduce_finite_input_never_gives_anything_else(rows: np.ndarray) -> None:
    rules, theta = only_parameters(rows[0])
    momentum = {GROUP: rows[1]}
    received = [Received(worker, 0, 1, {GROUP: row}) for worker, row in enumerate(rows[2:])]
    new_theta, new_momentum, verdict = reduce(0, theta, momentum, received, rules)
    assert np.isfinite(new_theta[GROUP]).all() and np.isfinite(new_momentum[GROUP]).all()
    assert len(verdict.accepted) + len(verdict.rejected) == 2
    assert bool(verdict.accepted) or new_theta is theta


def test_reduce_step_that_overflows_rejects_all_and_says_so() -> None:
    rules, theta = only_parameters(np.array([3e38], np.float32))
    momentum = {GROUP: np.array([3e38], np.float32)}
    new_theta, new_momentum, verdict = reduce(0, theta, momentum, [Received(0, 0, 1, dict(theta))], rules)
    assert new_theta is theta and new_momentum is momentum
    assert verdict.rejected == (Rejection(0, f"the outer step overflows in {GROUP}"),)


def test_reduce_in_fragments_gives_the_bits_of_the_whole() -> None:
    rules, theta = only_parameters(THETA[GROUP])
    received = [delta._replace(payload={GROUP: delta.payload[GROUP]}) for delta in RECEIVED]
    whole = reduce(0, theta, MOMENTUM, received, rules)
    cut = 1001
    sizes = (cut, SIZE - cut)
    entries = tuple(Entry(f"w{i}", "float32", (size,), i, GROUP, 0, size) for i, size in enumerate(sizes))
    parts = []
    for fragment, place in enumerate((slice(0, cut), slice(cut, SIZE))):
        some = replace(rules, layout=Layout(entries, (), 2), fragment=fragment)
        pieces = [delta._replace(payload={GROUP: delta.payload[GROUP][place]}) for delta in received]
        parts.append(reduce(0, {GROUP: THETA[GROUP][place]}, {GROUP: MOMENTUM[GROUP][place]}, pieces, some))
    for index in (0, 1):
        assert np.concatenate([part[index][GROUP] for part in parts]).tobytes() == whole[index][GROUP].tobytes()


def test_reduce_adam_counts_the_steps_of_its_fragment_not_the_rounds() -> None:
    rules, theta = only_parameters(THETA[GROUP][:9])
    rules = replace(rules, outer=OuterOptimizer(name="adam", learning_rate=0.1))
    delta = Received(0, 0, 1, {GROUP: THETA[GROUP][9:18]})
    untouched = initial_momentum(rules.layout, 0, "adam")
    first, fourth = (reduce(round, theta, untouched, [delta], replace(rules, earlier_steps=0))[0] for round in (0, 3))
    assert bits(first) == bits(fourth) != bits(reduce(3, theta, untouched, [delta], rules)[0])


def test_reduce_into_given_arrays_gives_the_same_bits_there() -> None:
    out = blank(RULES.layout, 0)
    fresh, reused = reduce(0, THETA, MOMENTUM, RECEIVED, RULES), reduce(0, THETA, MOMENTUM, RECEIVED, RULES, out)
    assert bits(*fresh[:2]) == bits(*reused[:2])
    assert reused[0] is out[0] and reused[1] is out[1]


def test_reduce_float64_parameters_stay_float64() -> None:
    group = "parameters/float64"
    rules = ReduceSpec(Layout((Entry("w", "float64", (4,), 0, group, 0, 4),)), 0, PLAIN)
    theta, weights = {group: np.zeros(4)}, {group: np.full(4, 1 / 3)}
    received = [Received(worker, 0, 1, weights) for worker in range(3)]
    new, momentum, _ = reduce(0, theta, initial_momentum(rules.layout, 0), received, rules)
    assert new[group].tobytes() == weights[group].tobytes() and momentum[group].dtype == np.float64


class Difference:
    """A codec whose payloads are deltas."""

    name, yields = "difference", "deltas"

    def encode(self, weights: Flat, theta: Flat | None) -> Flat:
        assert theta is not None
        return {group: array - theta[group] for group, array in weights.items()}

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        return {group: Form(group.split("/")[1], size) for group, size in groups.items()}

    def decode(
        self, payload: Mapping[str, torch.Tensor], group: str, part: slice, theta: torch.Tensor | None = None
    ) -> torch.Tensor:
        return payload[group][part]


@pytest.mark.parametrize("outer", [PLAIN, DILOCO])
def test_reduce_of_deltas_equals_reduce_of_weights_up_to_rounding(outer: OuterOptimizer) -> None:
    rules, theta = only_parameters(THETA[GROUP])
    rules = replace(rules, outer=outer)
    received = [delta._replace(payload={GROUP: delta.payload[GROUP]}) for delta in RECEIVED]
    encoded = [delta._replace(payload=Difference().encode(delta.payload, theta)) for delta in received]
    weights = reduce(0, theta, MOMENTUM, received, rules)
    deltas = reduce(0, theta, MOMENTUM, encoded, replace(rules, codec=Difference()))
    for index in (0, 1):
        assert np.abs(weights[index][GROUP] - deltas[index][GROUP]).max() < 3e-6
    norms = [[one.norm for one in result[2].accepted] for result in (weights, deltas)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("sync", [Sync(), Sync(clip=1.0), Sync(merge="median")])
def test_reduce_fragment_of_counters_alone_takes_them_from_the_first(sync: Sync) -> None:
    rules = ReduceSpec(Layout((Entry("n", "int64", (2,), 0, COUNT, 0, 2),)), 0, DILOCO, sync)
    received = [Received(worker, 0, 1, {COUNT: np.array([worker, 7])}) for worker in (2, 1, 3)]
    theta, _, verdict = reduce(0, {COUNT: np.zeros(2, np.int64)}, {}, received, rules)
    assert theta[COUNT].tolist() == [1, 7] and [one.norm for one in verdict.accepted] == [0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_order_of_arrival_changes_no_bit_whatever_the_codec(name: str) -> None:
    rules, sent = replace(RULES, codec=codec(name)), []
    near = [d._replace(payload={**d.payload, GROUP: THETA[GROUP] + d.payload[GROUP] / 100}) for d in RECEIVED]
    for delta in near:
        payload, _ = encoder(name, 1.0).encode(delta.payload, THETA)
        sent.append(delta._replace(payload=payload))
    results = [
        reduce(3, THETA, MOMENTUM, order, rules) for order in (sent, sent[::-1], [sent[i] for i in (2, 0, 3, 1)])
    ]
    assert len({tuple(bits(*result[:2])) for result in results}) == 1
    exact = reduce(3, THETA, MOMENTUM, near, RULES)[0][GROUP]
    off = np.linalg.norm(results[0][0][GROUP] - exact) / np.linalg.norm(exact - THETA[GROUP])
    assert off < (1.0 if name == "topk" else 0.1)
