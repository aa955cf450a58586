"""Sinks that fail, hang or are gone: training notices nothing, and what is lost is counted."""

import hashlib
import logging
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.errors import AuthenticationError
from hypha_ray.telemetry.sinks.base import Composite, Files, Isolated, Tally, build
from hypha_ray.telemetry.sinks.files import METRICS, Record, read_jsonl
from hypha_ray.telemetry.sinks.inputs import Curves, Measurement, Measures

RECORDS: list[dict[str, Any]] = [
    {"kind": "round", "round": number, "loss": 3.0 / (number + 1), "batches": {"0": 3}} for number in range(20)
]
PATIENCE_S = 60.0


class Collecting:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[object] = []

    def start(self, config: Record) -> None:
        self.got.append(("start", config))

    def record(self, record: Record) -> None:
        self.got.append(record)

    def event(self, event: Record) -> None:
        self.got.append(event)

    def summary(self, figures: Record) -> None:
        self.got.append(figures)

    def close(self) -> None:
        self.got.append("close")


class Raising(Collecting):
    """A sink whose every record fails."""

    def record(self, record: Record) -> None:
        raise ConnectionError("nobody there")


class Unstartable(Collecting):
    """A sink whose library isn't there."""

    def start(self, config: Record) -> None:
        raise ImportError("no module named aim")


class Late(Collecting):
    """A sink whose server isn't there at first."""

    def __init__(self, failures: int = 1) -> None:
        super().__init__()
        self.failures = failures
        self.failed, self.comes = threading.Event(), threading.Event()

    def start(self, config: Record) -> None:
        if self.failures:
            self.failures -= 1
            self.failed.set()
            raise ConnectionError("not yet")
        self.comes.wait(60)
        super().start(config)


class Hanging(Collecting):
    """A sink that keeps its first record until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.released = threading.Event(), threading.Event()

    def record(self, record: Record) -> None:
        self.reached.set()
        self.released.wait()


def finish(sink: Isolated) -> None:
    sink.close()
    sink.join(PATIENCE_S)


def test_isolated_healthy_sink_gets_everything_in_order() -> None:
    inner = Collecting()
    sink = Isolated(inner, Tally("inner"))
    sink.start({"seed": 1})
    for record in RECORDS:
        sink.record(record)
    sink.event({"kind": "join"})
    sink.summary({"rounds": 20})
    finish(sink)
    assert inner.got == [("start", {"seed": 1}), *RECORDS, {"kind": "join"}, {"rounds": 20}, "close"]
    assert sink.tally.counts() == {"failed": 0, "dropped": 0}


def test_isolated_failing_sink_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = Isolated(Raising(), Tally("dead"))
    with caplog.at_level(logging.WARNING):
        sink.start({})
        for record in RECORDS:
            sink.record(record)
        finish(sink)
    assert sink.tally.counts() == {"failed": len(RECORDS), "dropped": 0}
    assert [record.getMessage() for record in caplog.records] == [
        "telemetry sink dead failed (ConnectionError: nobody there); training goes on, further losses are only counted"
    ]


def test_tally_shows_no_secret_of_a_url() -> None:
    tally = Tally("tracker")
    tally.fail("no answer from https://me:s3cr3t@host/graphql")
    problem = tally.next_problem()
    assert problem is not None and "(no answer from https://me:***@host/graphql)" in problem


def test_isolated_sink_that_cannot_start_gets_nothing() -> None:
    inner = Unstartable()
    sink = Isolated(inner, Tally("aim"))
    sink.start({})
    for record in RECORDS:
        sink.record(record)
    finish(sink)
    assert inner.got == []
    assert sink.tally.counts() == {"failed": 1, "dropped": len(RECORDS)}


def test_isolated_sink_that_ends_its_thread_is_counted_and_goes_on() -> None:
    class Exiting(Collecting):
        def event(self, event: Record) -> None:
            raise SystemExit(3)

    sink, tally = Exiting(), Tally("exiting")
    isolated = Isolated(sink, tally)
    isolated.start({})
    isolated.event({"kind": "join"})
    isolated.record(RECORDS[0])
    isolated.close()
    isolated.join(PATIENCE_S)
    assert sink.got == [("start", {}), RECORDS[0], "close"]
    assert tally.counts() == {"failed": 1, "dropped": 0}
    assert (
        tally.next_problem()
        == "telemetry sink exiting failed (SystemExit: 3); training goes on, further losses are only counted"
    )


def test_isolated_sink_may_change_what_it_gets() -> None:
    class Changing(Collecting):
        def record(self, record: Record) -> None:
            record.pop("kind")
            record["batches"].clear()

    isolated = Isolated(Changing(), Tally("changing"))
    record = {"kind": "round", "batches": {"0": 3}}
    isolated.start({})
    isolated.record(record)
    isolated.close()
    isolated.join(PATIENCE_S)
    assert record == {"kind": "round", "batches": {"0": 3}}


def test_isolated_sink_that_comes_late_gets_everything() -> None:
    inner = Late()
    sink = Isolated(inner, Tally("mlflow"))
    sink.start({"seed": 1})
    assert inner.failed.wait(PATIENCE_S)
    for record in RECORDS:
        sink.record(record)
    inner.comes.set()
    finish(sink)
    assert inner.got == [("start", {"seed": 1}), *RECORDS, "close"]
    assert sink.tally.counts() == {"failed": 0, "dropped": 0}
    assert [sink.tally.next_problem() for _ in range(3)] == [
        "telemetry sink mlflow can't be started yet (ConnectionError: not yet); it is tried again, and up to 4096 "
        "records wait",
        "telemetry sink mlflow is started now; no record is missing there",
        None,
    ]


def test_isolated_sink_that_comes_very_late_lacks_what_could_not_wait_and_says_so() -> None:
    inner = Late()
    sink = Isolated(inner, Tally("mlflow"), capacity=5)
    sink.start({})
    assert inner.failed.wait(PATIENCE_S)
    for record in RECORDS:
        sink.record(record)
    inner.comes.set()
    finish(sink)
    assert inner.got == [("start", {}), *RECORDS[:5], "close"]
    assert sink.tally.counts() == {"failed": 0, "dropped": len(RECORDS) - 5}
    told = [sink.tally.next_problem() for _ in range(3)]
    assert told[-1] == f"telemetry sink mlflow is started now; {len(RECORDS) - 5} records are missing there"


def test_isolated_hanging_sink_drops_what_the_queue_cannot_hold() -> None:
    inner = Hanging()
    sink = Isolated(inner, Tally("slow"), capacity=2)
    sink.start({})
    sink.record(RECORDS[0])
    assert inner.reached.wait(PATIENCE_S)
    for record in RECORDS[1:]:
        sink.record(record)
    assert sink.tally.counts() == {"failed": 0, "dropped": len(RECORDS) - 3}
    sink.close()
    sink.join(0.01)
    assert sink.tally.counts() == {"failed": 1, "dropped": len(RECORDS) - 1}
    inner.released.set()


def test_composite_with_a_hanging_sink_serves_the_others(tmp_path: Path) -> None:
    inner, healthy = Hanging(), Collecting()
    others = [Isolated(inner, Tally("slow")), Isolated(healthy, Tally("healthy"))]
    sinks = Composite(Files(tmp_path), others, patience_s=0.5)
    sinks.start({})
    for record in RECORDS:
        sinks.record(record)
    sinks.close()
    assert read_jsonl(tmp_path / METRICS) == RECORDS
    assert healthy.got[1:-1] == RECORDS
    assert sinks.losses()["slow"]["failed"] == 1
    assert sinks.losses()["healthy"] == {"failed": 0, "dropped": 0}
    inner.released.set()


def test_files_on_a_full_disk_are_counted_and_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / METRICS).symlink_to("/dev/full")
    healthy = Collecting()
    sinks = Composite(Files(tmp_path), [Isolated(healthy, Tally("healthy"))])
    sinks.start({})
    for record in RECORDS:
        sinks.record(record)
    sinks.event({"kind": "join"})
    sinks.close()
    assert sinks.losses()["files"] == {"failed": len(RECORDS), "dropped": 0}
    assert read_jsonl(tmp_path / "events.jsonl") == [{"kind": "join"}]
    assert healthy.got[1:-2] == RECORDS


def test_files_have_responses_apart_from_events(tmp_path: Path) -> None:
    files = Files(tmp_path)
    assert not (tmp_path / "rollouts.jsonl").exists()
    for event in ({"kind": "join"}, {"kind": "rollout", "response": "38"}, {"kind": "loss"}):
        files.event(event)
    files.close()
    assert read_jsonl(tmp_path / "events.jsonl") == [{"kind": "join"}, {"kind": "loss"}]
    assert read_jsonl(tmp_path / "rollouts.jsonl") == [{"kind": "rollout", "response": "38"}]


def test_a_response_is_in_its_file_once_whatever_is_done_again(tmp_path: Path) -> None:
    key = {"epoch": 0, "slice": 0, "sample": 7}
    responses = [{"kind": "rollout", "round": 3, **key, "number": number, "reward": number / 2} for number in range(2)]
    for _ in range(2):  # A run, and what goes on after it was killed.
        files = Files(tmp_path)
        for response in (*responses, *responses):
            files.event({**response, "worker": 0})
        files.close()
    later = {**responses[0], "round": 4}
    files = Files(tmp_path)
    files.event(later)
    files.close()

    assert [record["number"] for record in read_jsonl(tmp_path / "rollouts.jsonl")] == [0, 1, 0]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("port", ["closed_port", "silent_port"])
def test_dead_collector_leaves_the_metrics_as_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, port: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{request.getfixturevalue(port)}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    digests, losses = [], []
    for folder, names in (("off", ["jsonl"]), ("dead", ["jsonl", "otel"])):
        sinks = build(tmp_path / folder, "run", names)
        sinks.start({})
        for record in RECORDS:
            sinks.record(record)
        sinks.close()
        digests.append(hashlib.sha256((tmp_path / folder / METRICS).read_bytes()).hexdigest())
        losses.append(sinks.losses())
    assert digests[0] == digests[1]
    assert losses[0] == {"files": {"failed": 0, "dropped": 0}}
    assert losses[1] == {"files": {"failed": 0, "dropped": 0}, "otel": {"failed": 1, "dropped": 0}}


def test_build_without_names_writes_the_files(tmp_path: Path) -> None:
    sinks = build(tmp_path, "run", [])
    sinks.start({})
    sinks.record(RECORDS[0])
    sinks.event({"kind": "commit", "round": 0})
    sinks.summary({"rounds": 1})
    sinks.close()
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "events.jsonl", "summary.json"}


@pytest.mark.parametrize("repository", ["aim://tracker:53800", "ssh://host/repo", "AIM://HOST"])
def test_build_remote_aim_server_is_refused(tmp_path: Path, repository: str) -> None:
    with pytest.raises(AuthenticationError, match=r"SEC002.*got " + repository) as caught:
        build(tmp_path, "run", ["aim"], repository)
    assert caught.value.exit_code == 4


def test_measures_of_a_round_have_every_finite_value() -> None:
    record = {
        "kind": "round",
        "round": 3,
        "loss": math.nan,
        "sync_s": 0.5,
        "idle_fraction": None,
        "workers": 2,
        "batches": {"0": 6, "10": 4},
        "time_shares": {"training": 0.75, "loss": 0.25},
    }
    assert set(Measures().measure(record)) == {
        Measurement("hypha_round", 3.0),
        Measurement("hypha_sync_seconds", 0.5),
        Measurement("hypha_workers", 2.0),
        Measurement("hypha_worker_batches", 6.0, "0"),
        Measurement("hypha_worker_batches", 4.0, "10"),
        Measurement("hypha_time_share", 0.75, "training"),
        Measurement("hypha_time_share", 0.25, "loss"),
    }


def test_tags_of_a_measurement_say_whose_it_is() -> None:
    assert Measurement("hypha_loss", 1.0).tags("r") == {"run": "r"}
    assert Measurement("hypha_worker_batches", 6.0, "0").tags("r") == {"run": "r", "worker": "0"}
    assert Measurement("hypha_time_share", 0.5, "loss").tags("r") == {"run": "r", "kind": "loss"}


def test_curves_of_a_round_have_one_for_each_use_of_time() -> None:
    points = Curves().points({"kind": "round", "round": 2, "time_shares": {"training": 0.75, "loss": 0.25}})
    assert points is not None
    assert points.values == {"round/time_shares/training": 0.75, "round/time_shares/loss": 0.25}


def test_measures_worker_that_left_has_no_batches() -> None:
    measures = Measures()
    measures.measure({"kind": "round", "batches": {0: 6, 1: 4}})
    assert Measurement("hypha_worker_batches", 0.0, "1") in measures.measure({"kind": "round", "batches": {0: 9}})


def test_measures_worker_that_left_has_no_other_figures() -> None:
    measures = Measures()
    measures.measure({"kind": "round", "loss": 2.0, "batch_s": {0: 0.25, 1: 0.5}})
    measures.measure({"kind": "eval", "val_loss": 1.0})
    (loss, rest, gone) = measures.measure({"kind": "round", "loss": 1.5, "batch_s": {0: 0.25}})
    assert (loss.value, rest.value) == (1.5, 0.25)
    assert (gone.metric, gone.label, math.isnan(gone.value)) == ("hypha_worker_batch_seconds", "1", True)
    assert len(measures.measure({"kind": "round", "loss": 1.5, "batch_s": {0: 0.25}})) == 2


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_measures_figure_that_a_round_lacks_is_no_longer_that_of_the_round_before(loss: float | None) -> None:
    measures = Measures()
    measures.measure({"kind": "round", "loss": 2.0})
    (gone,) = measures.measure({"kind": "round", "loss": loss})
    assert gone.metric == "hypha_loss" and math.isnan(gone.value)
    assert measures.measure({"kind": "round", "loss": 1.0}) == [Measurement("hypha_loss", 1.0)]


def step(worker: int, norm: float | None) -> dict[str, Any]:
    return {"kind": "step", "round": 0, "worker": worker, "gradient_norm": norm, "loss": 9.0}


def test_measures_of_a_report_are_those_of_its_worker_until_that_is_gone() -> None:
    measures = Measures()
    name = "hypha_worker_gradient_norm"
    assert measures.measure(step(0, 0.5)) == [Measurement(name, 0.5, "0")]
    assert measures.measure(step(1, 0.75)) == [Measurement(name, 0.75, "1")]
    assert measures.measure({"kind": "round", "round": 0, "learning_rate": 0.1, "eta_s": 8.0, "reward": 0.25}) == [
        Measurement("hypha_reward", 0.25),
        Measurement("hypha_learning_rate", 0.1),
        Measurement("hypha_round", 0.0),
        Measurement("hypha_eta_seconds", 8.0),
    ]
    (ended,) = measures.measure(step(0, None))
    assert (ended.metric, ended.label) == (name, "0") and math.isnan(ended.value)
    assert measures.departure({"kind": "leaving", "worker": 1}) == []
    (gone,) = measures.departure({"kind": "loss", "worker": 1})
    assert (gone.metric, gone.label) == (name, "1") and math.isnan(gone.value)
    assert measures.departure({"kind": "leave", "worker": 1}) == []
