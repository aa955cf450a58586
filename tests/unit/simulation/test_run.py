"""Simulated runs whose times, bytes and costs can be worked out by hand; joined batches change none of them."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from hypha_ray.simulation.fleet_worker import FleetWorker
from hypha_ray.simulation.fleet_world import FleetWorld
from hypha_ray.simulation.result import simulate
from hypha_ray.simulation.scenario import BatchTimes, Machine, MachineGroup, Stragglers
from hypha_ray.simulation.scenario_file import read_scenarios, scenario_names
from hypha_ray.simulation.worker import SimulatedWorker
from hypha_ray.types import Plan, Source
from tests.support.scenarios import EXACT, opened, read_text, result_of

FIRST_BATCH_S = 10.5
"""Start of 10 s, then 0.5 s for the first weights."""
TRAINED_S = 10.0
"""10 batches of each machine."""
EXCHANGE_S = 1.0 + 1.0
"""4 MB at 4 MB/s, then the outer step of two deltas of 4 MB at 8 MB/s."""
WEIGHTS_S = 0.5
"""4 MB at 8 MB/s."""
TOLERANCE_S = 0.02
"""Slices of 1 kB, which share the link with weights."""
UNEQUAL = EXACT.replace("count = 2", "count = 4").replace(
    "{ median = 1 }", "{ median = 1, spread = 0.6, drift = 0.3, drift_period_s = 37 }"
)


def test_times_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    round_s = WEIGHTS_S + TRAINED_S + EXCHANGE_S
    first_s = FIRST_BATCH_S + TRAINED_S + EXCHANGE_S
    assert result.rounds == 4
    assert result.round_s == pytest.approx([first_s, round_s, round_s, round_s], abs=TOLERANCE_S)
    assert result.time_s == pytest.approx(first_s + 3 * round_s, abs=TOLERANCE_S)


def test_bytes_are_those_of_all_deltas_and_weights(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    assert result.bytes_up == 4 * 2 * 4_000_000
    assert result.bytes_down == (4 + 1) * 2 * 4_000_000
    assert result.bytes_slices == 2 * 1024
    assert result.samples == 4 * 80


def test_shares_of_time_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    alive_s = result.time_s + WEIGHTS_S - 10.0  # The final weights are the end, the start isn't life.
    assert result.utilisation == pytest.approx(4 * TRAINED_S / alive_s, rel=2e-3)
    assert result.idle_fraction == pytest.approx(4 * (EXCHANGE_S + WEIGHTS_S) / alive_s, rel=5e-3)
    assert result.goodput == pytest.approx(result.utilisation, rel=1e-9)  # All batches are committed.


def test_cost_is_price_times_hours_of_leases(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    ended_s = result.time_s + WEIGHTS_S
    assert result.cost == pytest.approx(2 * 3.6 * ended_s / 3600, rel=1e-3)


EPOCHS = EXACT.replace("update_rounds = 4", "epochs = 3").replace("= 1024", "= 64\nsamples = 200")
"""Three epochs of 200 samples, of which the last slice has 8."""


def test_each_sample_of_a_short_last_slice_is_trained_in_every_epoch(tmp_path: Path) -> None:
    result = result_of(tmp_path, EPOCHS)
    assert result.samples == 3 * 200
    assert result.rounds == 8  # Seven of 80, and one of 40.


def test_datasets_of_a_mixture_are_taken_as_one(tmp_path: Path) -> None:
    mixture = "".join(f'[[job.dataset.mix]]\npath = "{name}"\n' for name in "ab")
    result = result_of(tmp_path, EPOCHS + mixture)
    one = result_of(tmp_path, EPOCHS)
    assert (result.samples, result.round_s, result.bytes_up) == (one.samples, one.round_s, one.bytes_up)


def test_slow_machine_gets_less_and_both_finish_together(tmp_path: Path) -> None:
    text = EXACT.replace("count = 2", "count = 1") + (
        "[[machines]]\ncount = 1\nbatch_s = { median = 3 }\nstart_s = { median = 10 }\nup_mbps = 32\ndown_mbps = 64\n"
    )
    result = result_of(tmp_path, text)
    # 20 batches in all: 15 of 1 s beside 5 of 3 s take 15 s.
    assert result.round_s[-1] == pytest.approx(15.0 + EXCHANGE_S + WEIGHTS_S, abs=TOLERANCE_S)


def test_shared_head_makes_the_exchange_longer(tmp_path: Path) -> None:
    text = EXACT + "down_gbps = 0.032\n"  # Both deltas share the 4 MB/s that one has alone else.
    result = result_of(tmp_path, text)
    assert result.round_s[-1] == pytest.approx(WEIGHTS_S + TRAINED_S + EXCHANGE_S + 1.0, abs=TOLERANCE_S)


def test_latency_counts_once_for_each_message(tmp_path: Path) -> None:
    text = EXACT.replace("[head]", '[head]\nsite = "s"').replace("count = 2", 'count = 2\nsite = "s"')
    text += '[[sites]]\nname = "s"\nlatency_ms = 100\n'
    result = result_of(tmp_path, text)
    # Weights come, the delta is announced, asked for and sent: four messages in a round.
    assert result.round_s[-1] == pytest.approx(WEIGHTS_S + TRAINED_S + EXCHANGE_S + 4 * 0.1, abs=TOLERANCE_S)


def test_overlapped_exchange_hides_behind_batches(tmp_path: Path) -> None:
    text = EXACT + "[job.sync]\nfragments = 2\ndelay_steps = 4\n"
    plain = result_of(tmp_path, EXACT, {"rounds": 10})
    overlapped = result_of(tmp_path, text, {"rounds": 10})
    assert plain.utilisation < 0.85
    assert overlapped.utilisation > 0.93
    assert overlapped.bytes_up < 0.6 * plain.bytes_up


def test_without_a_barrier_nobody_waits_for_the_slow_one(tmp_path: Path) -> None:
    text = EXACT + '[job.sync]\nstrategy = "async"\n'
    result = result_of(tmp_path, text, {"rounds": 10})
    assert result.rounds == 10
    assert 0.0 < result.idle_fraction < 1.0
    assert result.samples > 0


def test_killed_worker_is_replaced_and_no_sample_is_lost(tmp_path: Path) -> None:
    world = opened(tmp_path)
    world.later(15.0, lambda: world.kill(world.pool.machines[1]))
    world.run()
    assert world.events["kill"] == 1
    assert world.events["loss"] == 1
    assert world.samples == 4 * 80
    assert len(world.committed_at) == 4


def test_hung_worker_costs_its_lease(tmp_path: Path) -> None:
    calm = result_of(tmp_path)
    world = opened(tmp_path)
    world.later(15.0, lambda: world.hang(world.pool.machines[1]))
    world.run()
    assert world.events["hang"] == 1
    assert world.committed_at[-1] > calm.time_s
    assert world.samples == 4 * 80


def test_machine_that_is_taken_away_loses_its_payload_and_its_lease_ends(tmp_path: Path) -> None:
    world = opened(tmp_path, overrides={"machines.0.price": 1})
    machine = world.pool.machines[1]
    world.later(21.0, lambda: world.leave(machine, "away"))  # In the middle of its upload, from 20.5 s to 21.5 s.
    world.run()
    world.close()
    assert machine.leased_s == pytest.approx(21.0)
    assert world.traffic.bytes_up % 4_000_000 == 0
    assert len(world.committed_at) == 4
    assert world.samples < 4 * 80 + 1
    assert world.records[0]["workers"] == 1


def test_preempted_worker_hands_over_before_its_machine_goes(tmp_path: Path) -> None:
    world = opened(tmp_path)
    world.later(15.2, lambda: world.preempt(world.pool.machines[1], 30.0, "away"))
    world.run()
    assert world.events["leave"] == 1
    assert world.events["loss"] == 0
    assert world.samples == 4 * 80


def test_partition_shorter_than_the_lease_only_delays(tmp_path: Path) -> None:
    calm = result_of(tmp_path)
    world = opened(tmp_path)
    world.later(20.6, lambda: world.partition(world.pool.machines[1], 3.0))
    world.run()
    assert world.events["loss"] == 0
    assert world.committed_at[0] == pytest.approx(calm.round_s[0] + 3.0, abs=TOLERANCE_S)


def test_too_few_machines_end_a_run_with_a_reason(tmp_path: Path) -> None:
    text = EXACT.replace("price = 3.6", 'price = 3.6\navailable = "trace.csv"')
    text += "[job.resources]\nmax_idle_s = 60\nmin_workers = 2\n"
    (tmp_path / "trace.csv").write_text("at_s,machine,event\n15,1,leave\n")
    result = result_of(tmp_path, text)
    assert result.rounds < 4
    assert result.failure is not None
    assert "60 s" in result.failure


def test_machine_whose_trace_begins_with_a_join_is_not_there_before(tmp_path: Path) -> None:
    text = EXACT.replace("price = 3.6", 'price = 3.6\navailable = "trace.jsonl"')
    (tmp_path / "trace.jsonl").write_text('{"at_s": 30, "machine": 1, "event": "join"}\n')
    result = result_of(tmp_path, text)
    workers = [record["workers"] for record in result.round_metrics]
    assert workers[0] == 1
    assert workers[-1] == 2


def test_a_round_that_never_ends_ends_the_run_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two deltas of 4 MB are merged at 8 MB/s in a second; the limit is shorter."""
    monkeypatch.setattr("hypha_ray.simulation.fleet_world.LONGEST_ROUND_DAYS", 1e-5)
    result = result_of(tmp_path, EXACT)
    assert result.failure == "no round has ended for 1e-05 days" and result.rounds == 0
    assert 0.864 < result.time_s < 10


def test_rounds_that_take_no_time_have_their_records(tmp_path: Path) -> None:
    """Next to the time since the start, 1e-300 s is nothing: no relative error can be told, and all else can."""
    instant = EXACT.replace("{ median = 1 }", "{ median = 1e-300 }")
    result = result_of(tmp_path, instant.replace("up_mbps = 32\ndown_mbps = 64\n", ""))
    assert [record["round"] for record in result.round_metrics] == [0, 1, 2, 3]
    assert [record["plan_error"] for record in result.round_metrics[1:]] == [None, None, None]


def test_reduction_that_follows_at_once_is_made_once(tmp_path: Path) -> None:
    """Fragments of 2 MB from two workers take 0.5 s each; batches of 0.01 s are over by then, with a round in flight.

    The first round has a start of 10 s and ten batches, and the last one waits for five more before its delta.
    """
    text = EXACT.replace("median = 1 }", "median = 0.01 }").replace("up_mbps = 32\ndown_mbps = 64\n", "")
    result = result_of(tmp_path, f"{text}[job.sync]\nfragments = 2\ndelay_steps = 5\nin_flight = 2\n")
    assert result.failure is None
    assert result.round_s == pytest.approx([10 + 0.1 + 0.5, 0.5, 0.5, 0.5 + 0.05])


def test_seed_changes_times_and_equal_seeds_do_not(tmp_path: Path) -> None:
    text = EXACT.replace("{ median = 1 }", "{ median = 1, spread = 0.3, jitter = 0.1 }")
    first, again, other = (result_of(tmp_path, text, {"seed": seed}).as_json() for seed in (1, 1, 2))
    assert first == again
    assert first["round_s"] != other["round_s"]


@pytest.mark.slow
def test_intellect_1_has_the_published_utilisation() -> None:
    """Table 2 of arXiv 2412.01152: 38 minutes of training, and exchanges of 103, 382 and 469 s."""
    results = [simulate(scenario) for scenario in read_scenarios("intellect-1", {"rounds": 6})]
    utilisations = [100 * result.utilisation for result in results]
    assert utilisations == pytest.approx([95.7, 85.6, 83.0], abs=3.0)
    training_s = 38 * 60.0
    exchanges = [result.round_s[-1] - training_s for result in results]
    assert exchanges == pytest.approx([103.0, 382.0, 469.0], rel=0.02)


GRID_STEP = 1.207
"""Ratio of neighbouring bandwidths in Table 4 of arXiv 2503.09799, which has the first at which a share is reached."""
PUBLISHED_GBPS = {0.5: 1.4, 0.8: 6.2, 0.9: 13.3, 0.95: 23.3, 0.99: 86.8}
"""Bandwidth in Gbit/s by share of the time in computation, for 10 B parameters and 100 steps between exchanges."""
TRAINING_S = 80.0


def gbps_for(share: float, published: float) -> float:
    """Bandwidth from which on a simulated round has that share of computation."""
    low, high = published / 2, published * 2
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        rates = {"machines.0.up_mbps": 1000 * middle, "machines.0.down_mbps": 1000 * middle}
        result = simulate(read_scenarios("streaming-10b", {"rounds": 5, **rates})[0])
        if TRAINING_S / median(result.round_s) < share:
            low = middle
        else:
            high = middle
    return high


@pytest.mark.slow
def test_streaming_10b_needs_the_published_bandwidths() -> None:
    ratios: list[float] = []
    for share, published in PUBLISHED_GBPS.items():
        ratios.append(gbps_for(share, published) / published)
    assert max(ratios) < GRID_STEP
    assert min(ratios) > 1 / GRID_STEP
    assert median(abs(ratio - 1) for ratio in ratios) <= 0.15


SMALL = {
    "laptop": 2,
    "rack": 2,
    "three-regions": 6,
    "home-1000": 30,
    "failing-1000": 10,
    "spot-10000": 60,
    "deadline": 8,
    "intellect-1": 4,
    "streaming-10b": 2,
}
"""Workers of a small version of each scenario."""


@pytest.mark.slow
@pytest.mark.parametrize("name", scenario_names())
def test_scenario_of_the_package_runs_in_small(name: str) -> None:
    for scenario in read_scenarios(name, {"workers": SMALL[name], "rounds": 3}):
        result = simulate(scenario)
        assert result.failure is None
        assert result.rounds == 3
        assert result.samples > 0
        assert 0.0 < result.utilisation <= 1.0
        assert 0.0 <= result.idle_fraction < 1.0
        assert 0.0 < result.goodput <= 1.0
        assert result.utilisation + result.idle_fraction <= 1.0 + 1e-9


def test_on_round_is_told_each_round_without_a_loss(tmp_path: Path) -> None:
    (scenario,) = read_text(tmp_path)
    rounds: list[int] = []
    result = simulate(scenario, lambda record: rounds.append(record["round"]))
    assert rounds == [0, 1, 2, 3]
    assert all("loss" not in record for record in result.round_metrics)


class StepwiseWorker(FleetWorker):
    """Takes one batch at a time, as its base does."""

    def _train(self, plan: Plan) -> None:
        SimulatedWorker._train(self, plan)


class StepwiseWorld(FleetWorld):
    """World whose workers take one batch at a time."""

    def new_worker(self, source: Source) -> SimulatedWorker:
        machine = self._machine_of[source.worker]
        machine.began_at = self.now
        return StepwiseWorker(source, self, machine)


def finished(world: FleetWorld) -> FleetWorld:
    """The world after a run with a kill, a preemption and a hang in the middle of batches."""
    world.open()
    machines = world.pool.machines
    world.later(17.3, lambda: world.kill(machines[0]))
    world.later(31.7, lambda: world.preempt(machines[1], 5.0, "away"))
    world.later(43.9, lambda: world.hang(machines[2]))
    world.run()
    world.close()
    return world


@pytest.mark.parametrize("strategy", ["diloco", "async"])
def test_results_are_those_of_single_batches(tmp_path: Path, strategy: str) -> None:
    text = UNEQUAL.replace("samples_between_updates = 80", "samples_between_updates = 160")
    (scenario,) = read_text(tmp_path, text + f'[job.sync]\nstrategy = "{strategy}"\n', {"rounds": 8})
    together = finished(FleetWorld(scenario))
    stepwise = finished(StepwiseWorld(scenario))
    assert together.committed_at == pytest.approx(stepwise.committed_at)
    assert together.events == stepwise.events
    assert together.samples == stepwise.samples
    assert together.batches_s == pytest.approx(stepwise.batches_s)
    assert together.waited_s == pytest.approx(stepwise.waited_s)
    assert together.alive_s == pytest.approx(stepwise.alive_s)


def test_skipped_batch_leaves_the_later_ones_as_they_are() -> None:
    times = BatchTimes(median=1.0, jitter=0.3, drift=0.1)
    stragglers = Stragglers(share=0.4, factor=3.0, for_s=2.0)
    group = MachineGroup(count=1, batch_s=times, stragglers=stragglers)
    timed = Machine(3, 0, group, seed=5)
    skipped = Machine(3, 0, group, seed=5)
    for second in range(0, 200, 2):
        timed.batch_s(float(second))
        skipped.skip_batch(float(second))
        assert skipped.batch_s(second + 1.0) == timed.batch_s(second + 1.0)
