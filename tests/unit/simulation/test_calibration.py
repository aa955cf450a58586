"""Calibration: what is fitted to a run directory whose times are known by construction."""

from __future__ import annotations

import json
import math
import random
from dataclasses import astuple
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.simulation.calibration import BatchRecords, calibrate
from hypha_ray.store.snapshots import write_snapshot
from hypha_ray.telemetry.sinks.files import read_jsonl
from hypha_ray.types import Entry, Layout
from tests.support.fleet import job_of
from tests.support.recorded_run import COMMIT_S, EVALUATE_S, MERGE_S, OVERHEAD_S, REDUCE_S, START_S, write_run


def test_calibrate_steady_run_finds_each_part_of_a_round(tmp_path: Path) -> None:
    fit = calibrate(write_run(tmp_path / "steady"))
    assert [worker.batch_s for worker in fit.workers] == [0.1, 0.2]
    assert [worker.jitter for worker in fit.workers] == [0.0, 0.0]
    assert [worker.drift for worker in fit.workers] == [0.0, 0.0]
    assert fit.typical("evaluate_s") == EVALUATE_S
    assert fit.typical("overhead_s") == pytest.approx(OVERHEAD_S)
    assert fit.typical("merge_s") == pytest.approx(MERGE_S)
    assert fit.typical("reduce_s") == pytest.approx(REDUCE_S)
    assert fit.typical("commit_s") == pytest.approx(COMMIT_S)
    assert fit.starts_s == (START_S, START_S)


def test_calibrate_first_round_evaluates_nothing(tmp_path: Path) -> None:
    times = calibrate(write_run(tmp_path / "run")).times
    assert [part.evaluate_s for part in times] == [0.0, EVALUATE_S, EVALUATE_S, EVALUATE_S]


def test_calibrate_slow_first_round_is_left_out_of_batch_times(tmp_path: Path) -> None:
    rounds = [(0.9, 0.9), *[(0.1, 0.2)] * 5]
    fit = calibrate(write_run(tmp_path / "cold", rounds))
    assert [worker.batch_s for worker in fit.workers] == [0.1, 0.2]


def test_calibrate_speeds_that_swing_gives_their_amplitude(tmp_path: Path) -> None:
    swing = [1 + 0.2 * math.sin(2 * math.pi * number / 16) for number in range(16)]
    rounds = [(0.1, 0.2), *[(0.1 * factor, 0.2) for factor in swing]]
    swinging, steady = calibrate(write_run(tmp_path / "drift", rounds)).workers
    assert swinging.drift == pytest.approx(0.2, rel=0.05)
    assert steady.drift == 0.0


def test_fits_of_noisy_reports_give_the_noise_of_one_batch_not_of_their_means() -> None:
    dice = random.Random(0)
    records = []
    for number in range(1, 200):
        for _ in range(4):
            batches = [0.1 * dice.lognormvariate(0.0, 0.15) for _ in range(5)]
            record = {"kind": "step", "worker": 3, "round": number, "samples": 20, "batch_s": fmean(batches)}
            records.append(record)
    (worker,) = BatchRecords(job_of(rounds={"max_batch_size": 4}), records).fits({})
    assert worker.jitter == pytest.approx(0.15, rel=0.1)
    assert worker.batch_s == pytest.approx(0.1, rel=0.03)
    assert worker.drift < 0.03


def test_calibrate_resumed_run_takes_the_last_record_of_a_repeated_round(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "resumed")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    *_, last_round = (line for line in lines if '"kind": "round"' in line)
    repeated = json.loads(last_round) | {"bytes_up": 1}
    (folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(repeated)]) + "\n", encoding="utf-8")
    fit = calibrate(folder)
    assert [record.number for record in fit.rounds] == [0, 1, 2, 3]
    assert fit.rounds[-1].bytes_up == 1


def test_calibrate_run_of_one_batch_a_round_takes_batch_times_from_its_rounds(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "steps", batches=(1, 1), sync={"strategy": "sync"})
    records = read_jsonl(folder / "metrics.jsonl")
    for record in records:
        if record["kind"] == "step":
            record["batch_s"] = None
        elif record["kind"] == "round":
            record |= {"batch_s": {}, "time_by_worker": {"0": {"training": 0.1}, "1": {"training": 0.3}}}
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    assert [worker.batch_s for worker in calibrate(folder).workers] == [0.1, 0.3]
    untimed = [{"kind": "step"} if record["kind"] == "step" else record | {"time_by_worker": {}} for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, untimed)), encoding="utf-8")
    with pytest.raises(CheckpointError, match="run steps has no times of batches") as error:
        calibrate(folder)
    assert error.value.code == "SIM001"


def test_calibrate_lost_workers_are_counted_by_kind(tmp_path: Path) -> None:
    losses = [
        {"kind": "loss", "worker": 0, "monotonic_s": 104.0, "reason": "silent for 5 s"},
        {"kind": "loss", "worker": 1, "monotonic_s": 105.0, "reason": "its process died"},
        {"kind": "loss", "worker": 1, "monotonic_s": 106.0, "reason": "its process died"},
    ]
    fit = calibrate(write_run(tmp_path / "run", events=losses))
    assert fit.losses == {"hang": 1, "kill": 2}


def test_calibrate_leases_with_prices_gives_them_by_worker(tmp_path: Path) -> None:
    lease = {"kind": "lease", "worker": 1, "incarnation": 10001, "kept": False, "price": 2.5}
    cost = {"kind": "cost", "cost": 0.75}
    fit = calibrate(write_run(tmp_path / "run", events=[lease, cost, cost]))
    assert [worker.price for worker in fit.workers] == [None, 2.5]
    assert fit.cost == 1.5


def test_calibrate_running_run_takes_the_size_from_an_unencoded_delta(tmp_path: Path) -> None:
    assert calibrate(write_run(tmp_path / "run", summary={})).parameter_bytes == 4000


def test_calibrate_running_run_with_encoded_deltas_says_that_the_size_is_unknown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", summary={}, sync={"codec": "int4"})
    with pytest.raises(CheckpointError, match="don't tell the model's size") as error:
        calibrate(folder)
    assert error.value.code == "SIM001"


def test_calibrate_killed_run_with_encoded_deltas_takes_the_size_from_its_newest_snapshot(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", summary={}, sync={"codec": "int4"})
    group = "parameters/float32"
    layout = Layout(
        (Entry("a", "float32", (30, 20), 0, group, 0, 600), Entry("b", "bfloat16", (20,), 0, group, 600, 20))
    )
    entries = [astuple(entry) for entry in layout.entries]
    state = {"entries": entries, "tied": [], "fragments": 1, "layout_sha256": layout.sha256()}
    write_snapshot(folder, 3, {"a": np.zeros((30, 20), np.float32)}, {}, {}, state)
    assert calibrate(folder).parameter_bytes == 4 * 620


def test_calibrate_one_round_is_too_short(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "short", [(0.1, 0.2)])
    with pytest.raises(CheckpointError, match="short is too short to simulate — got 1 complete rounds, allowed 2"):
        calibrate(folder)


def test_calibrate_run_without_a_barrier_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", sync={"strategy": "async"})
    with pytest.raises(ConfigError, match="without a barrier") as error:
        calibrate(folder)
    assert error.value.code == "SIM002"


def test_calibrate_folder_without_a_run_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        calibrate(tmp_path)
    assert error.value.code == "CKPT001"
