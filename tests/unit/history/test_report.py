"""The page of one run: its numbers are those of the records, whatever is missing, long or hostile in them."""

from __future__ import annotations

import json
import math
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.errors import DataError
from hypha_ray.fleet_time import TIME_KINDS
from hypha_ray.history.report import notes_of_last_report, report_of, write_report
from hypha_ray.history.report_charts import cut, points_to_draw, spread
from hypha_ray.history.report_timeline import MARKS, USES, timeline
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.series import Series
from hypha_ray.telemetry.sinks.files import JsonLines
from tests.support.fleet import Fleet, job_of, slices_of
from tests.support.run_folders import charts_of_page, evaluation, make_run, round_record

METRICS = [round_record(0, 4.0), evaluation(0, 3.5), round_record(1, 3.0123456789012345), evaluation(1, 3.25)]
PROVENANCE = {
    "wall_time": "2026-11-28T04:00:00+00:00",
    "command": ["hypha-ray", "diloco", "--dataset.path", "/home/alice/texts"],
    "user": "alice",
    "host": "rack-1.example.org",
    "folder": "/home/alice",
    "versions": {"ray": "2.60.0"},
    "hosts": [{"host": "rack-1.example.org", "address": "10.1.2.3", "cpus": 4.0, "gpus": 0.0}],
    "earlier": [{"user": "bob", "host": "rack-9"}],
}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def page(folder: Path, **arguments: bool) -> str:
    return report_of(folder, **arguments).decode()


def own_part(text: str) -> str:
    """The page without the library that draws its charts, whose script is the longest."""
    library = max(re.findall(r"(?s)<script>.*?</script>", text), key=len)
    return text.replace(library, "")


def sections(text: str) -> list[str]:
    return re.findall(r'<section id="(\w+)">', text)


def rollout(number: int, response: str, reward: float = 0.0) -> dict[str, Any]:
    facts = {"kind": "rollout", "round": number, "worker": 0, "prompt": "1 + 1 =", "response": response}
    return {**facts, "reward": reward, "rewards": {"exact": reward}, "tokens": 3}


def add_rollouts(folder: Path, *rollouts: dict[str, Any]) -> None:
    lines = JsonLines(folder / "rollouts.jsonl")
    for record in rollouts:
        lines.write(record)
    lines.close()


def test_last_loss_of_the_page_is_that_of_the_metrics_to_the_last_digit(tmp_path: Path) -> None:
    folder = make_run(tmp_path, commits=2, metrics=METRICS)
    text = page(folder)
    tiles = dict(re.findall(r'<dt>([^<]*)</dt><dd data-value="([^"]*)"', text))
    assert float(tiles["loss"]) == 3.0123456789012345 and float(tiles["val_loss"]) == 3.25
    training, validation = charts_of_page(text)["Loss"]["data"]
    assert (training["x"], training["y"]) == ([1, 2], [4.0, 3.0123456789012345])
    assert (validation["x"], validation["y"]) == ([1, 2], [3.5, 3.25])
    up, down = charts_of_page(text)["Bytes so far"]["data"]
    assert (up["y"], down["y"]) == ([1000.0, 2000.0], [500.0, 1000.0])
    (batches,) = charts_of_page(text)["Batches of each worker"]["data"]
    assert charts_of_page(text)["Workers in the round"]["layout"]["yaxis"]["dtick"] == 1, "there is no half of a worker"
    assert (batches["zmin"], batches["zmax"]) == (0, max(map(max, batches["z"])))


def test_figures_and_charts_that_a_run_lacks_are_absent(tmp_path: Path) -> None:
    record = {"kind": "round", "round": 0, "loss": 2.0, "time_s": 1.0}
    text = page(make_run(tmp_path, "small", commits=1, metrics=[record]))
    assert list(charts_of_page(text)) == ["Loss"]
    assert sections(text) == ["figures", "curves", "settings"]
    for name in ("val_loss", "cost", "goodput", "tokens", "accuracy"):
        assert f"<dt>{name}</dt>" not in text


def test_run_without_a_round_has_its_state_settings_and_no_chart(tmp_path: Path) -> None:
    text = page(make_run(tmp_path, events=[{"kind": "attempt", "attempt": 1, "next_round": 0}]))
    assert 'class="state interrupted"' in text and "0 of 3 rounds<" in text
    assert sections(text) == ["events", "settings"] and "figure-data" not in text


def test_running_run_and_run_at_its_end_have_their_states(tmp_path: Path) -> None:
    folder = make_run(tmp_path, commits=3, metrics=METRICS)
    (folder / "model").mkdir()
    with RunDirectory(folder).lock():
        assert 'class="state running"' in page(folder)
        assert notes_of_last_report(folder) == []
    text = (folder / "report.html").read_text()
    assert 'class="state finished"' in text
    assert (folder / "report.html").stat().st_mode & 0o777 == 0o600


def test_page_that_cannot_be_written_is_a_note_at_the_end_and_an_error_otherwise(tmp_path: Path) -> None:
    folder = make_run(tmp_path, metrics=METRICS)
    (folder / ".report.html.part").mkdir()
    with pytest.raises(DataError, match=r"DATA044.*can't be written"):
        write_report(folder)
    (note,) = notes_of_last_report(folder)
    assert note == f"the report was not written: {folder}/report.html: Is a directory"


def test_page_that_fills_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = make_run(tmp_path, metrics=METRICS)
    before = sorted(folder.iterdir())
    usual, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))  # The page has megabytes.
    try:
        with pytest.raises(DataError, match=r"DATA044.*can't be written.*File too large"):
            write_report(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (usual, most))
    assert sorted(folder.iterdir()) == before


def test_broken_lines_are_passed_over_and_foreign_records_are_an_error(tmp_path: Path) -> None:
    folder = make_run(tmp_path, metrics=METRICS)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "round", "round": 7, "lo\n[1]\n')
    assert charts_of_page(page(folder))["Loss"]["data"][0]["x"] == [1, 2]
    foreign = make_run(tmp_path, "foreign", metrics=[round_record(0, 4.0, time_s="long")])
    with pytest.raises(DataError, match=r"DATA044.*can't be understood"):
        report_of(foreign)


def test_no_text_of_a_record_becomes_a_part_of_the_page(tmp_path: Path) -> None:
    events = [
        {"kind": "plan", "round": 0},
        {"kind": "loss", "worker": HOSTILE, "reason": HOSTILE},
        {"kind": HOSTILE, "text": HOSTILE},
        {"kind": "problem", "text": HOSTILE},
    ]
    metrics = [round_record(0, 1.0, batches={HOSTILE: 3}, **{f"reward/{HOSTILE}": 0.5})]
    folder = make_run(tmp_path, metrics=metrics, events=events, dataset={"path": HOSTILE})
    add_rollouts(folder, rollout(0, HOSTILE), rollout(0, "\ud800 lone"))
    text = own_part(page(folder))
    assert text.count("alert(1)") > 5
    assert text.count("<script") == text.count("</script>") == 2 and "<img" not in text
    traces = [trace for chart in charts_of_page(page(folder)).values() for trace in chart["data"]]
    assert not any("<script" in json.dumps(trace) for trace in traces)


def test_page_asks_no_server_for_anything(tmp_path: Path) -> None:
    text = page(make_run(tmp_path, commits=2, metrics=METRICS))
    assert not re.search(r"https?://|<link|@import|url\(", own_part(text))
    assert not re.search(r"<script[^>]+src=", text)
    assert "default-src 'none'" in text and len(text.encode()) < 6_000_000


@pytest.mark.parametrize("with_hosts", [False, True])
def test_users_machines_and_addresses_are_shown_only_if_asked_for(tmp_path: Path, with_hosts: bool) -> None:
    events = [
        {"kind": "lease", "worker": 0, "incarnation": 1, "node": "rack-5", "kept": False},
        {"kind": "loss", "worker": 0, "reason": "its process 7 on 10.9.8.7 ended; rack-5 and rack-1 are slow"},
        {"kind": "machine_loss", "machine": "rack-7 (fe80::12:34ab)", "workers": [0]},
        {"kind": "problem", "text": "no space in /Users/carol/runs at 12:30:41"},
    ]
    metrics = [round_record(0, 4.0, bytes_from={"rack-8": 10})]
    tables = {"dataset": {"path": "/home/alice/texts"}}
    folder = make_run(tmp_path, metrics=metrics, events=events, provenance=PROVENANCE, **tables)
    text = own_part(page(folder, with_hosts=with_hosts))
    secrets = ("alice", "rack-1", "rack-5", "rack-7", "rack-8", "10.9.8.7", "fe80::12:34ab", "carol")
    assert [secret in text for secret in secrets] == [with_hosts] * len(secrets)
    assert ("10.1.2.3" in text) == with_hosts and "bob" not in text
    assert "12:30:41" in text and "4 CPUs" in text


def test_run_of_reinforcement_learning_has_rewards_curves_and_responses(tmp_path: Path) -> None:
    fields = {"reward": 0.25, "entropy": 2.5, "equal_groups": 0.125, "reward/exact": 0.25}
    metrics = [round_record(0, -0.1, **fields), {"kind": "eval", "round": 0, "reward": 0.5, "pass@1": 0.5}]
    folder = make_run(tmp_path, commits=1, metrics=metrics)
    add_rollouts(folder, rollout(0, "two", 0.0), rollout(0, "2", 1.0), *(rollout(0, "3") for _ in range(9)))
    text = page(folder)
    found = charts_of_page(text)
    assert [trace["y"] for trace in found["Reward"]["data"]] == [[0.25], [0.5]]
    assert found["Loss"]["data"][0]["y"] == [-0.1] and found["Task"]["data"][0]["y"] == [0.5]
    assert found["Entropy of the policy"]["data"][0]["y"] == [2.5] and "reward/exact" in found
    assert "4 of 11 responses" in text
    assert text.count('<article class="rollout">') == 4 and "<span>reward 1</span>" in text


def test_large_file_of_responses_is_read_at_its_ends(tmp_path: Path) -> None:
    folder = make_run(tmp_path, metrics=METRICS)
    add_rollouts(folder, *(rollout(number, f"number {number} " + "x" * 5000) for number in range(1200)))
    text = page(folder)
    assert "number 0 x" in text and "number 1199 x" in text and len(text) < 6_000_000
    assert "responses, of the first and the last rounds" in text


def test_settings_are_those_that_differ_from_the_defaults(tmp_path: Path) -> None:
    text = page(make_run(tmp_path, inner_optimizer={"learning_rate": 0.25}))
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td></tr>', text)
    settings = {key: (value, default) for key, value, default in rows}
    assert settings["inner_optimizer.learning_rate"][0] == "0.25" and settings["rounds.update_rounds"] == ("3", "100")
    assert "outer_optimizer.momentum" not in settings


def test_events_of_each_kind_are_counted_and_the_first_and_last_are_listed(tmp_path: Path) -> None:
    events = [{"kind": "problem", "text": f"problem {number}."} for number in range(5000)]
    text = page(make_run(tmp_path, events=[*events, {"kind": "stop", "reason": "no better val_loss"}]))
    assert "problem <small>5000</small>" in text and "stop <small>1</small>" in text
    assert "problem 0." in text and "problem 4999." in text and "problem 2500." not in text
    assert text.count('<tr data-kind="problem">') < 200


def test_timeline_has_each_second_of_each_worker_and_its_loss() -> None:
    rounds = {"update_rounds": 4, "samples_between_updates": 240, "max_batch_size": 4}
    fleet = Fleet(job_of(rounds=rounds, sync={"dynamic_local_steps": False}), [0.1, 0.2], slices_of(6, 400))
    fleet.later(8.0, lambda: fleet.kill(1))
    fleet.run()
    figure = timeline(Series(fleet.records, {}), fleet.notes, hide=str)
    assert figure is not None and not figure.thinned
    bars = {trace["name"]: trace for trace in figure.data if trace["type"] == "bar"}
    second = next(record for record in fleet.of_kind("round") if record["round"] == 0)
    busiest_s = max(sum(time.values()) for time in second["time_by_worker"].values())
    training_s = second["time_by_worker"]["0"]["training"]
    places = [n for n, name in enumerate(bars["training"]["y"]) if name == "worker 0"]
    assert bars["training"]["x"][places[0]] == pytest.approx(training_s / busiest_s, abs=1e-3)
    assert bars["training"]["customdata"][places[0]].startswith("round 1: ")
    (lost,) = [trace for trace in figure.data if trace["name"] == "worker lost"]
    (loss,) = [note for note in fleet.notes if note["kind"] == "loss"]
    plans = [
        note["round"] for note in fleet.notes if note["kind"] == "plan" and note["monotonic_s"] < loss["monotonic_s"]
    ]
    assert (lost["x"], lost["y"]) == ([max(plans) + 1], ["worker 1"])


def test_uses_and_marks_are_those_of_the_records() -> None:
    assert set(USES) == set(TIME_KINDS) and set(MARKS) == {"join", "loss", "leave", "exclude"}


def test_thinned_curve_keeps_ends_extremes_and_gaps() -> None:
    values = [math.sin(number / 50) for number in range(10_000)]
    values[5003] = 9.0
    values[7001] = -9.0
    values[2000:4000] = [math.nan] * 2000
    points = points_to_draw(values, 200)
    assert points == sorted(set(points)) and {0, 9999, 5003, 7001} <= set(points) and len(points) <= 200
    assert any(2000 <= point < 4000 for point in points)
    assert points_to_draw(values[:150], 200) == list(range(150))


@pytest.mark.parametrize("length", [1, 7, 100, 101, 5000])
def test_spread_and_cut_lose_neither_end(length: int) -> None:
    elements = list(range(length))
    some = spread(elements, 100)
    assert len(some) == min(length, 100) and (some[0], some[-1]) == (0, length - 1) and some == sorted(set(some))
    pieces = list(cut(length, 100))
    assert len(pieces) <= 100 and [place for piece in pieces for place in piece] == elements
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@pytest.mark.slow
def test_page_of_a_hundred_thousand_rounds_is_thinned_and_small(tmp_path: Path) -> None:
    rounds = 100_000
    losses = [4.0 / (1 + number / 1000) + 0.01 * math.sin(number) for number in range(rounds)]
    losses[54_321] = 77.7777777
    losses[65_432] = -3.3333333
    folder = make_run(tmp_path, rounds={"update_rounds": rounds})
    times = {str(worker): {"training": 1.5, "barrier": 0.25} for worker in range(2)}
    shares = {"training": 0.75, "barrier": 0.25}
    fields = {"time_by_worker": times, "time_shares": shares, "fleet_s": 4.0, "learning_rate": 1e-3}
    pattern = json.dumps(round_record(0, 0.5, **fields))
    plan = '{"kind": "plan", "wall_time": "2026-11-28T04:00:00", "round": 0}'
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "events.jsonl").open("w") as events:
        for number, loss in enumerate(losses):
            record = pattern.replace('"round": 0', f'"round": {number}').replace('"loss": 0.5', f'"loss": {loss!r}')
            metrics.write(record + "\n")
            events.write(plan.replace('"round": 0', f'"round": {number}') + "\n")
    content = report_of(folder)
    assert len(content) <= 6_000_000
    text = content.decode()
    curve = charts_of_page(text)["Loss"]["data"][0]
    assert (curve["x"][0], curve["x"][-1], curve["y"][-1]) == (1, rounds, losses[-1])
    assert {77.7777777, -3.3333333} <= set(curve["y"]) and len(curve["x"]) <= 800
    assert "Thinned" in text and "plan <small>100000</small>" in text
