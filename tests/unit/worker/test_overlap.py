"""Whose turn it is, and a worker that has weights of its own beside the global ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import fragments_of_round, outer_steps_before
from hypha_ray.types import Delta, Evaluated, FragmentUpdate, Merged, Plan, Report, Span
from hypha_ray.worker.batches import Meter
from tests.support.worker_bench import CONFIG, Bench, plan_of


def at_first_result(bench: Bench, plan: Plan, whole: bool = False) -> None:
    """Answer the first result with the next round's plan and the weights that the run began with."""

    def answer(event: Any) -> None:
        if isinstance(event, dict) and len(bench.of(dict)) == 1:
            bench.inbox.assign(plan)
            bench.inbox.merge(FragmentUpdate(plan.round, 0, whole=whole), bench.theta)

    bench.on_event = answer


@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("warmup", [0, 4])
def test_every_fragment_has_its_turn_and_the_last_round_has_all(fragments: int, stagger: bool, warmup: int) -> None:
    rounds = {"update_rounds": 11, "warmup_rounds": warmup}
    job = Job.model_validate({"rounds": rounds, "sync": {"fragments": fragments, "stagger": stagger}})
    shown = [fragments_of_round(job, number) for number in range(11)]
    assert all(shown[number] == tuple(range(fragments)) for number in (*range(warmup), 10))
    assert all(len(one) == (1 if stagger else fragments) for one in shown[warmup:-1])
    for number in range(11):
        for fragment in shown[number]:
            assert outer_steps_before(job, number, fragment) == sum(fragment in one for one in shown[warmup:number])


def ahead_of(number: int, first: int, samples: int, ahead: int) -> Plan:
    spans, more = Span(0, 0, first, first + samples), Span(0, 0, first + samples, first + samples + ahead)
    return Plan(number, 0, (spans,), 8, keep=frozenset({0}), ahead=(more,) if ahead else ())


def test_worker_goes_ahead_while_the_result_is_on_its_way_and_counts_that_to_the_next_round() -> None:
    bench = Bench(sync={"delay_steps": 2})
    bench.parts = 2

    def answer(event: Any) -> None:
        if isinstance(event, Delta) and event.round == 0:
            bench.inbox.assign(ahead_of(1, 24, 32, 0))
        if isinstance(event, dict) and len(bench.of(dict)) == 1:
            bench.inbox.merge(FragmentUpdate(1, 0, whole=False), bench.theta)

    bench.on_event = answer
    bench.run(ahead_of(0, 0, 24, 16))
    first, second = bench.of(Delta)
    assert (first.spans, second.spans) == ((Span(0, 0, 0, 24),), (Span(0, 0, 24, 56),))
    assert (second.samples, second.batches) == (32, 4)
    reports = [event for event in bench.said if isinstance(event, Report) and event.round == 1]
    assert bench.said.index(reports[0]) > bench.said.index(bench.of(Merged)[1]), (
        "it speaks of a round before that begins"
    )
    assert sum(report.samples for report in reports) == 32
    assert bench.of(Merged)[1].waited_s < 1.0


def test_steps_made_ahead_are_kept_in_the_part_that_mixing_says() -> None:
    def weights(mixing: float, warmup: int = 0) -> np.ndarray:
        bench = Bench(sync={"delay_steps": 2, "mixing": mixing}, rounds={"warmup_rounds": warmup})
        bench.parts = 2

        at_first_result(bench, ahead_of(1, 24, 16, 0))
        result: np.ndarray = bench.run(ahead_of(0, 0, 24, 16)).of(dict)[1]["parameters/float32"]
        return result

    start = Bench().theta["parameters/float32"]
    none, half, all_ = (weights(mixing) for mixing in (0.0, 0.5, 1.0))
    assert np.array_equal(none, start), "all of the round was made ahead"
    assert np.array_equal(half, start + np.float32(0.5) * (all_ - start)) or np.allclose(
        half, (start + all_) / 2, atol=1e-7
    )
    assert np.abs(all_ - start).max() > 1e-3
    assert np.array_equal(weights(1.0, warmup=1), start), "what the warm-up gives isn't mixed"


def test_evaluation_is_of_the_global_weights_and_leaves_the_workers_own_alone() -> None:
    def run(evaluate: int) -> Bench:
        bench = Bench(sync={"delay_steps": 1, "mixing": 1.0})
        bench.parts = 2

        share = (Span(0, 0, 0, evaluate),) if evaluate else ()
        at_first_result(bench, Plan(1, 0, ahead_of(1, 24, 16, 0).spans, 8, share, frozenset({0})))
        return bench.run(ahead_of(0, 0, 24, 8))

    with_one, without = run(32), run(0)
    untrained = Bench().run(plan_of(8, evaluate=32)).of(Evaluated)[0]
    assert with_one.of(Evaluated)[0].sums == untrained.sums
    assert np.array_equal(with_one.of(dict)[1]["parameters/float32"], without.of(dict)[1]["parameters/float32"])


def test_worker_that_is_sent_all_weights_drops_its_own() -> None:
    bench = Bench(sync={"delay_steps": 1, "mixing": 1.0})
    bench.parts = 2

    at_first_result(bench, ahead_of(1, 24, 8, 0), whole=True)
    bench.run(ahead_of(0, 0, 24, 8))
    assert np.array_equal(bench.of(dict)[1]["parameters/float32"], bench.theta["parameters/float32"])


def test_worker_hands_over_only_the_fragment_whose_turn_it_is() -> None:
    bench = Bench(model={"config": {**CONFIG, "n_layer": 2}}, sync={"fragments": 2}, rounds={"update_rounds": 5})
    bench.run(plan_of(8, number=1))
    (delta,), (payload,) = bench.of(Delta), bench.of(dict)
    assert delta.fragments == 1 and delta.payload_bytes == sum(array.nbytes for array in payload.values())
    assert {name: len(array) for name, array in payload.items()} == bench.layout.groups(1)


def test_batches_made_ahead_have_the_learning_rates_of_their_place_in_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A linear schedule over 4 rounds of 4 steps: a batch has the rate of the step that its round has come to."""
    rates: list[float] = []
    real = Meter.step

    def step(meter: Meter, result: Any, samples: int, learning_rate: float) -> None:
        rates.append(learning_rate)
        real(meter, result, samples, learning_rate)

    monkeypatch.setattr(Meter, "step", step)
    bench = Bench(
        rounds={"update_rounds": 4, "samples_between_updates": 32, "max_batch_size": 8},
        inner_optimizer={"learning_rate": 0.16, "schedule": "linear"},
        sync={"delay_steps": 2},
    )
    bench.parts = 2
    at_first_result(bench, ahead_of(1, 24, 32, 0))
    bench.run(ahead_of(0, 0, 24, 16))
    # Round 0 has 24 samples, and so is the next one taken to have as long as its own plan isn't known.
    steps = [4 * 0 / 24, 4 * 8 / 24, 4 * 16 / 24, 4 + 4 * 0 / 24, 4 + 4 * 8 / 24, 4 + 4 * 16 / 32, 4 + 4 * 24 / 32]
    assert rates == pytest.approx([0.16 * (1 - step / 16) for step in steps])
