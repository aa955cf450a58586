"""Fragments that take turns, and results that workers don't wait for, on a local Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypha_ray.codec import codec
from hypha_ray.exchange_schedule import fragments_of_round
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import layout_of
from hypha_ray.types import Layout
from tests.support.faults import events, survive
from tests.support.jobs import job_of, run_job

pytestmark = pytest.mark.usefixtures("local_ray")

TABLES: dict[str, Any] = {
    "rounds": {"update_rounds": 8, "samples_between_updates": 64, "max_batch_size": 4, "evaluate_every": 3},
    "outer_optimizer": {"momentum": 0.5},
}


def part_bytes(name: str, layout: Layout, fragments: tuple[int, ...]) -> int:
    """Size of the payloads of some fragments, as the codec declares it."""
    forms = [codec(name).form(layout.groups(fragment)).values() for fragment in fragments]
    return sum(np.dtype(one.dtype).itemsize * one.size for form in forms for one in form)


def test_fragments_take_turns_and_a_round_moves_no_more_than_its_own(corpus: Path, tmp_path: Path) -> None:
    sync = {"fragments": 2, "partition": "strided", "codec": "int8", "downward_codec": "e3m0"}
    tables = {**TABLES, "rounds": {**TABLES["rounds"], "warmup_rounds": 2}}
    job = job_of("turns", corpus, sync={**sync, "delay_steps": 2, "mixing": 0.5}, **tables)
    run = run_job(job, tmp_path, corpus)
    assert set(run.used().values()) == {1} and len(run.commits()) == 8
    layout = layout_of(build_model(job.model, 0), 2, "strided")
    for record in run.of_kind("round"):
        fragments = fragments_of_round(job, record["round"])
        assert len(fragments) == (2 if record["round"] in (0, 1, 7) else 1)
        planned = 8 if record["round"] < 2 else 64
        if record["samples"] != planned:  # A worker far slower than the other keeps the batches that it has begun.
            assert record["samples"] > planned == 64 and min(record["batches"].values()) <= 3
        assert record["bytes_up"] == 2 * part_bytes("int8", layout, fragments)
        assert record["bytes_down"] == 2 * part_bytes("e3m0", layout, fragments)
        assert 0 < record["codec_error"] < 0.3
    assert part_bytes("int8", layout, (0, 1)) < layout.bytes() / 3.8
    assert part_bytes("e3m0", layout, (0, 1)) < layout.bytes() / 7.5
    losses = [record["val_loss"] for record in run.of_kind("eval")]
    assert losses[-1] < losses[0]


def test_bytes_of_codes_of_any_length_are_those_that_were_sent(corpus: Path, tmp_path: Path) -> None:
    sync = {"fragments": 2, "codec": "huffman2", "downward_codec": "huffman3"}
    job = job_of("lengths", corpus, sync=sync, **TABLES)
    run = run_job(job, tmp_path, corpus)
    layout = layout_of(build_model(job.model, 0), 2)
    rounds = run.of_kind("round")
    for record in rounds:
        elements = 2 * sum(layout.bytes(fragment) // 4 for fragment in fragments_of_round(job, record["round"]))
        assert 1 < 8 * record["bytes_up"] / elements < 2.2
        assert 1.8 < 8 * record["bytes_down"] / elements < 3.3
        assert 0.2 < record["codec_error"] < 0.6
    assert len({record["bytes_up"] for record in rounds}) > 2 and len({record["bytes_down"] for record in rounds}) > 2
    losses = [record["val_loss"] for record in run.of_kind("eval")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "sync",
    [
        {"fragments": 2, "delay_steps": 3, "mixing": 0.5},
        {"fragments": 3, "delay_steps": 3, "mixing": 0.5, "in_flight": 3, "downward_codec": "int8"},
    ],
    ids=["one in flight", "three in flight"],
)
@pytest.mark.long(keep=1)
def test_worker_killed_while_it_has_weights_of_its_own_costs_no_sample(
    sync: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    specs = ["worker.step:1=kill@21,40", "worker.after_delta:0=kill@3", "server.before_reduce=kill@5"]
    rounds = {**TABLES["rounds"], "update_rounds": 12}  # However late a killed worker is back, it has 40 steps to make.
    tables = {**TABLES, "rounds": rounds, "sync": sync, "testing": {"batch_s": 0.15}}
    run = survive(
        f"overlap-kills-{sync['fragments']}", corpus, tmp_path, [*specs, "scheduler.before_persist=kill@8"], 5, **tables
    )
    assert sorted(event["worker"] for event in events(run, "loss")) == [0, 1, 1]
    assert {event["attempt"] for event in events(run, "attempt")} == {1, 2}
    samples = [sum(delta["samples"] for delta in commit["deltas"]) for commit in run.commits()]
    # Who is lost after all others have handed over takes its part along: a later round has it.
    assert sum(count < 64 for count in samples) <= 2 and min(samples) > 0


def test_damaged_fragment_is_left_out_and_its_worker_begins_again_with_all_weights(
    corpus: Path, tmp_path: Path
) -> None:
    sync = {"fragments": 2, "delay_steps": 2, "mixing": 0.5, "stagger": True}
    run = survive("overlap-damage", corpus, tmp_path, ["worker.payload:1=nan@3"], 1, **{**TABLES, "sync": sync})
    assert [event["worker"] for event in events(run, "reject")] == [1]
    layout = layout_of(build_model(job_of("x", corpus).model, 0), 2)
    whole, one = layout.bytes(), part_bytes("fp32", layout, (0,))
    assert run.of_kind("round")[2]["bytes_down"] == whole + one
