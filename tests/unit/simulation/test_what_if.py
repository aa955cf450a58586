"""Predictions from a recorded run whose times are known: every expected figure is computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.driver.what_if import answers
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.simulation.calibration import calibrate
from hypha_ray.simulation.options import parse_trials
from hypha_ray.simulation.predictions import Prediction, WhatIf, best, predict
from hypha_ray.simulation.run_scenario import DataSize
from tests.support.recorded_run import EVALUATE_S, OVERHEAD_S, PAYLOAD_BYTES, REDUCE_S, START_S, write_run

ROUNDS = 4
TRAINING_S = 2.0
"""Seconds of 20 batches of 0.1 s, or of 10 of 0.2 s."""
RUN_S = START_S + ROUNDS * (TRAINING_S + OVERHEAD_S + REDUCE_S) + (ROUNDS - 1) * EVALUATE_S
"""Seconds to the last round's new weights; no evaluation comes before the first round."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "steady")


def predicted(run: Path, *trials: str) -> WhatIf:
    return predict(calibrate(run), run, parse_trials(trials), lambda job: DataSize())


def tried(run: Path, trial: str) -> Prediction:
    (prediction,) = predicted(run, trial).trials
    return prediction


def test_predict_run_itself_takes_the_time_and_bytes_that_it_took(run: Path) -> None:
    what_if = predicted(run)
    assert what_if.recorded.result.time_s == pytest.approx(RUN_S)
    totals = {row.name: row for row in what_if.totals}
    assert totals["time_s"].error == pytest.approx(0.0, abs=1e-6)
    assert totals["bytes_up"].predicted == ROUNDS * 2 * PAYLOAD_BYTES
    assert totals["bytes_down"].predicted == ROUNDS * 2 * PAYLOAD_BYTES
    assert [row.name for row in what_if.rounds] == ["1", "2", "3", "4"]
    assert [row.error for row in what_if.rounds] == pytest.approx([0.0] * ROUNDS, abs=1e-6)


def test_predict_half_the_samples_takes_half_the_time_of_batches(run: Path) -> None:
    prediction = tried(run, "rounds.samples_between_updates=60")
    # Nothing is known in the first round: 8 and 7 batches, of which the 7 of 0.2 s last longer.
    expected_s = RUN_S - ROUNDS * TRAINING_S + 7 * 0.2 + (ROUNDS - 1) * TRAINING_S / 2
    assert prediction.result.time_s == pytest.approx(expected_s)
    assert prediction.result.bytes_up == ROUNDS * 2 * PAYLOAD_BYTES


def test_predict_codec_sends_the_bytes_of_its_format(run: Path) -> None:
    prediction = tried(run, "sync.codec=int4")
    chunks = -(-1000 // 128)
    assert prediction.result.bytes_up == ROUNDS * 2 * chunks * 66
    assert any("int4" in note for note in prediction.notes)


def test_predict_visible_changes_are_as_many_as_in_the_run(tmp_path: Path) -> None:
    codecs = {"codec": "visible", "downward_codec": "visible"}
    folder = write_run(tmp_path / "visible", sync=codecs)
    metrics = folder / "metrics.jsonl"
    content = metrics.read_text(encoding="utf-8").replace(f'"bytes_up": {2 * PAYLOAD_BYTES}', '"bytes_up": 200')
    content = content.replace(f'"bytes_down": {2 * PAYLOAD_BYTES}', '"bytes_down": 120')
    metrics.write_text(content, encoding="utf-8")

    recorded = predicted(folder).recorded
    doubled = tried(folder, "rounds.update_rounds=8")
    other = tried(folder, "sync.codec=int4")

    # Of 1000 parameters bf16 has 2000 bytes, which the last round's delta may take.
    assert recorded.result.bytes_up == (ROUNDS - 1) * 2 * 100 + 2 * 2000
    assert doubled.result.bytes_up == (2 * ROUNDS - 1) * 2 * 100 + 2 * 2000
    assert recorded.result.bytes_down == ROUNDS * 2 * 60
    assert other.result.bytes_down == ROUNDS * 2 * 60
    assert "bytes of visible are 5.0% up and 3.0% down of those of bf16, as in the run" in recorded.notes


def test_predict_slower_worker_gets_fewer_batches(run: Path) -> None:
    prediction = tried(run, "testing.slowdown=[1, 2]")
    # 30 batches by workers of 0.1 and 0.4 s: 24 and 6 end together. The first round divides them by chance.
    later = [record["batches"] for record in prediction.result.round_metrics[2:]]
    assert all(batches[0] in (23, 24, 25) and batches[0] + batches[1] == 30 for batches in later)
    assert prediction.result.time_s == pytest.approx(RUN_S + ROUNDS * 0.4, rel=0.05)


def test_predict_slow_link_adds_the_time_of_each_payload(run: Path) -> None:
    prediction = tried(run, "machines.up_mbps=0.032")  # 4000 bytes take a second.
    assert prediction.result.time_s == pytest.approx(RUN_S + ROUNDS * 1.0)


def test_predict_machine_that_its_trace_takes_away(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spot.csv").write_text(f"at_s,machine,event\n{START_S + 1.5},0,leave\n")
    result = tried(run, "machines.1.available=spot.csv,resources.min_workers=1").result
    assert result.events["loss"] == 1
    # The first worker alone trains on all samples from then on: 30 batches of 0.1 s in a round.
    assert result.round_s[-1] == pytest.approx(30 * 0.1 + OVERHEAD_S + REDUCE_S + EVALUATE_S, rel=0.3)


def test_predict_day_and_night_of_a_run_that_had_none(run: Path) -> None:
    always = tried(run, "machines.diurnal.least=1.0")
    assert always.result.time_s == pytest.approx(RUN_S)
    assert [group["diurnal"]["least"] for group in always.result.settings["machines"]] == [1.0, 1.0]


def test_predict_run_with_patience_is_simulated_to_its_last_round(tmp_path: Path) -> None:
    run = write_run(tmp_path / "patient", rounds={"patience": 1})
    recorded = predicted(run).recorded
    assert recorded.result.rounds == ROUNDS
    assert recorded.result.time_s == pytest.approx(RUN_S)
    assert any("rounds.patience" in note for note in recorded.notes)


def test_predict_run_whose_workers_are_described_in_groups(tmp_path: Path) -> None:
    run = write_run(tmp_path / "groups", workers=[{"count": 1}, {"count": 1, "cpu": 2.0}])
    what_if = predicted(run, "sync.codec=int8")
    assert what_if.recorded.result.time_s == pytest.approx(RUN_S)
    assert [group["cpu"] for group in what_if.trials[0].result.settings["job"]["workers"]] == [1.0, 2.0]


def test_predict_fewer_evaluations_save_their_time(run: Path) -> None:
    prediction = tried(run, "rounds.evaluate_every=0")
    assert prediction.result.time_s == pytest.approx(RUN_S - (ROUNDS - 1) * EVALUATE_S)


def test_predict_more_workers_are_like_those_of_the_run_in_turn(run: Path) -> None:
    prediction = tried(run, "resources.num_workers=4")
    assert prediction.result.time_s == pytest.approx(RUN_S - ROUNDS * TRAINING_S / 2, rel=0.15)
    assert "workers 2 … 3 are taken to be like those of the run, in turn" in prediction.notes
    assert prediction.result.bytes_up == ROUNDS * 4 * PAYLOAD_BYTES


def test_predict_killed_worker_starts_again_and_its_batches_are_repeated(run: Path) -> None:
    prediction = tried(run, 'testing.failpoints=["worker.step:1=kill@15"],testing.failpoint_log=hits')
    assert prediction.result.events["loss"] == 1
    assert prediction.result.samples == ROUNDS * 120
    assert prediction.result.time_s > RUN_S + 0.3


def test_predict_prices_give_the_cost_of_all_leases(run: Path) -> None:
    prediction = tried(run, "machines.price=3600")
    assert prediction.has_prices
    # Two leases at a price of 1 a second, from the hire to the end of the last evaluation.
    assert prediction.result.cost == pytest.approx(2 * (RUN_S + EVALUATE_S), rel=0.05)
    assert not predicted(run).recorded.has_prices


def test_predict_steady_run_is_certain(run: Path) -> None:
    recorded = predicted(run).recorded
    assert recorded.spread["time_s"] == pytest.approx(0.0, abs=1e-9)
    assert recorded.uncertainty("time_s") == pytest.approx(0.0, abs=1e-6)


def test_predict_noisy_run_says_how_far_its_figures_may_be_off(tmp_path: Path) -> None:
    times = [(0.1, 0.2), (0.13, 0.2), (0.08, 0.25), (0.12, 0.16), (0.09, 0.22)]
    what_if = predicted(write_run(tmp_path / "noisy", times))
    error = next(row.error for row in what_if.totals if row.name == "time_s")
    assert error is not None
    recorded = what_if.recorded
    assert recorded.spread["time_s"] > 0
    assert recorded.uncertainty("time_s") ** 2 == pytest.approx(
        recorded.spread["time_s"] ** 2 + (error * recorded.result.time_s) ** 2
    )


@pytest.mark.parametrize(
    ("trial", "code", "text"),
    [
        ("sync.codek=int4", "CFG001", r"--try: unknown key sync\.codek. Fix: did you mean .sync\.codec"),
        ("workers=3", "CFG002", r"^error\[CFG002\]: --try: workers has the wrong type .*resources\.num_workers"),
        (
            "model.token=hidden",
            "CFG102",
            r"^error\[CFG102\]: --try: model\.token: others can read a secret on the (?!.*hidden)",
        ),
        ("machines.up_mbits=5", "CFG001", "did you mean up_mbps"),
        ("machines.7.price=5", "CFG003", "0 … 1"),
        ("machines.price=much", "CFG002", "machines.price has the wrong type"),
        ("machines.price=1e308", "CFG003", r"allowed number ≥ 0 and ≤ 1000000000000"),
        ("machines.diurnal.peak_hour=3", "CFG012", r"machines\.diurnal\.peak_hour needs machines\.diurnal\.least"),
        ("machines.diurnal=3", "CFG001", "machines.diurnal is a table"),
        ("machines.site.name=run", "CFG001", "site has no keys of its own"),
        ("head=5", "CFG001", "head is a table"),
        ("machines.failures.every_h=-1", "CFG003", "machines.failures.every_h is out of range"),
        ("machines.up_mbps=1e-300", "CFG003", r"machines\.0\.up_mbps is too low for the model"),
        ("sync.codec=int5", "CFG003", "int4"),
        ("model.config.hidden_size=64", "SIM003", "only a run with it can tell"),
        ("worker.compile=true", "SIM003", "only a run with it can tell"),
        ("preference.reference=none", "SIM003", "only a run with it can tell"),
        ("sync.merge=median", "SIM003", "only a run with it can tell"),
        ("sync.clip=2.0", "SIM003", "only a run with it can tell"),
        ("rounds.patience=1", "SIM003", "only a run with it can tell"),
        ("checkpoint.every_rounds=2", "SIM003", "only a run with it can tell"),
        ("resources.worker.cpu=2", "SIM003", "only a run with it can tell"),
        ("run.seed=3", "SIM003", "changes nothing that is simulated"),
        ("sync.mixing=0.4", "SIM003", "changes nothing that is simulated"),
        ("sync.grace_s=60", "SIM003", r"sync\.grace_s changes nothing beside no sync\.quorum"),
        ("sync.period=3", "SIM003", r"changes nothing beside sync\.strategy = 'diloco'"),
        ("sync.norm_gate=5.0", "SIM003", "changes nothing that is simulated"),
        ("preference.beta=0.2", "SIM003", "changes nothing that is simulated"),
        ("inner_optimizer.learning_rate=0.1", "SIM003", "changes nothing that is simulated"),
        ("telemetry.sinks=console", "SIM003", "changes nothing that is simulated"),
        ("sync.codec=int4,run.name=other", "SIM003", "run.name changes nothing that is simulated"),
        ("run.mode=replay", "CFG011", "isn't simulated"),
    ],
)
def test_predict_wrong_setting_is_one_clear_error(run: Path, trial: str, code: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        predicted(run, trial)
    assert error.value.code == code


def test_predict_shorter_floor_of_batches_is_hidden_by_the_runs_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "floor", testing={"batch_times_s": [0.1, 0.2]})
    longer = tried(run, "testing.batch_times_s=[0.2, 0.4]")
    assert longer.result.time_s == pytest.approx(RUN_S + ROUNDS * TRAINING_S, rel=0.02)
    with pytest.raises(ConfigError, match="hides how long batches are"):
        predicted(run, "testing.batch_times_s=[0.05, 0.2]")


# ── the choice ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_best_without_limits_is_the_fastest(run: Path) -> None:
    what_if = predicted(run, "rounds.samples_between_updates=60", "testing.slowdown=[2, 2]")
    assert best(what_if.all, None, None) is what_if.trials[0]


def test_best_with_a_deadline_and_prices_is_the_cheapest_in_time(run: Path) -> None:
    dear = "machines.price=10,rounds.samples_between_updates=60"
    what_if = predicted(run, "machines.price=1", dear, "machines.price=0.1,testing.slowdown=[9, 9]")
    assert best(what_if.trials, 2 * RUN_S, None) is what_if.trials[0]
    assert best(what_if.trials, RUN_S - 2, None) is what_if.trials[1]
    assert best(what_if.trials, 1.0, None) is None


def test_best_with_a_budget_leaves_out_what_has_no_price(run: Path) -> None:
    what_if = predicted(run, "machines.price=3600")
    assert best(what_if.all, None, 1000.0) is what_if.trials[0]
    assert best(what_if.all, None, 1.0) is None


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_answers_of_equal_questions_are_equal_bytes(run: Path, tmp_path: Path) -> None:
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    texts = [list(answers(str(run), ["sync.codec=int4"], file=file)) for file in files]
    assert texts[0] == texts[1]
    assert files[0].read_bytes() == files[1].read_bytes()
    rows: list[dict[str, Any]] = json.loads(files[0].read_text(encoding="utf-8"))
    assert [row["try"] for row in rows] == ["as recorded", "sync.codec=int4"]
    for row in rows:
        wanted = {"settings", "rounds", "time_s", "bytes_up", "bytes_down", "utilisation", "idle_fraction", "goodput"}
        assert wanted | {"cost", "events", "uncertainty"} <= row.keys()
        assert row["cost"] is None
    assert rows[0]["compared"]["bytes_up"] == {"predicted": 32000.0, "actual": 32000.0, "error": 0.0}
    assert rows[1]["settings"]["job"]["sync"]["codec"] == "int4"


def test_answers_begin_with_the_headline_and_name_the_best(run: Path) -> None:
    texts = list(answers(str(run), ["rounds.samples_between_updates=60"], deadline="1h"))
    assert texts[0] == "simulated: times, bytes and costs; no loss curve"
    assert any(text.startswith("total time") for text in texts)
    assert any(text.startswith("best: rounds.samples_between_updates=60") for text in texts)
    assert any("standard deviation over 5 seeds" in text for text in texts)


def test_answers_for_a_deadline_that_nothing_meets_say_so(run: Path) -> None:
    texts = list(answers(str(run), deadline="2s"))
    assert "best: none of these ends within 2.00 s" in texts


def test_small_costs_and_budgets_have_digits_that_tell_them_apart(run: Path) -> None:
    """Two machines at 1 an hour for some seconds cost thousandths."""
    texts = list(answers(str(run), ["machines.price=1"], budget=0.0016))
    assert "best: none of these ends for at most 0.0016" in texts
    (row,) = [text for text in texts if text.startswith("machines.price=1  ")]
    cost = float(row.split()[-4])
    assert cost == pytest.approx(2 * (RUN_S + EVALUATE_S) / 3600, rel=0.06)


@pytest.mark.parametrize(
    ("questions", "code"),
    [
        ({"budget": 5.0}, "CFG011"),
        ({"budget": -5.0, "tries": ("machines.price=1",)}, "CFG003"),
        ({"deadline": "soon"}, "CFG003"),
        ({"tries": ("sync.codec",)}, "CFG015"),
    ],
)
def test_answers_to_wrong_questions_are_one_clear_error(run: Path, questions: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfigError) as error:
        list(answers(str(run), **questions))
    assert error.value.code == code


def test_answers_about_no_run_name_the_nearest(run: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no run") as error:
        list(answers("no-such-run"))
    assert error.value.code == "CKPT001"


def test_predict_sizes_of_fragments_are_those_of_the_model(run: Path) -> None:
    def sizes(job: Job) -> DataSize:
        return DataSize(fragment_parameters=(600, 400) if job.sync.fragments == 2 else ())

    what_if = predict(calibrate(run), run, parse_trials(["sync.fragments=2"]), sizes)
    # Fragments take turns, and the last round has both: 600, 400, 600 and 1000 parameters of two workers.
    assert what_if.trials[0].result.bytes_up == 2 * 4 * (600 + 400 + 600 + 1000)
