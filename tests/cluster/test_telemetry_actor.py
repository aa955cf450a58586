"""The telemetry actor in a real Ray cluster: files, gauges on the metrics port, and a dead sink beside them."""

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

import hypha_ray
from hypha_ray.config.training import Telemetry as TelemetrySettings
from hypha_ray.telemetry.actor import Telemetry
from hypha_ray.telemetry.sinks.files import read_jsonl, stamped
from tests.support.boards import FOLDER, expressions
from tests.support.head_node import free_port
from tests.support.http_servers import LocalServer, QuietHandler
from tests.support.jobs import job_of

DEADLINE_S = 60.0
CPUS = 3
HOOK = "TEAM_HOOK"
OF_OTHER_JOBS = ("reward", "accuracy", "mfu", "peak_memory")
"""Parts of names of gauges that a small language model on CPUs doesn't have."""


def a_round(number: int) -> dict[str, Any]:
    return {
        "kind": "round",
        "round": number,
        "time_s": 2.0,
        "elapsed_s": 2.0 * (number + 1),
        "loss": 4.0 - number,
        "samples_total": 100 * (number + 1),
        "tokens_total": 1000 * (number + 1),
        "tokens_per_s": 500.0,
        "workers": 2,
        "batches": {"0": 6, "1": 4},
        "batch_s": {"0": 0.25, "1": 0.5},
        "bytes_up": 4096,
        "bytes_down": 2048,
        "sync_s": 0.125,
        "idle_fraction": 0.0625,
    }


RECORDS = [*(a_round(number) for number in range(3)), {"kind": "eval", "round": 2, "val_loss": 2.5, "perplexity": 12.2}]
REPORT = {"kind": "step", "round": 2, "worker": 1, "gradient_norm": 0.75, "loss": 2.0}
EVENTS = [{"kind": "join", "worker": 1, "monotonic_s": 1.0}, {"kind": "loss", "worker": 1, "monotonic_s": 2.0}]


def start(directory: Path, sinks: list[str], run: str = "run", name: str = "telemetry") -> Any:
    options = {"name": name, "num_cpus": 0}
    return (
        ray.remote(concurrency_groups={"pulse": 1})(Telemetry)
        .options(**options)
        .remote(str(directory), TelemetrySettings(sinks=sinks), run, {"run": {"seed": 1}})
    )


@pytest.fixture(scope="module")
def posts() -> Iterator[list[dict[str, Any]]]:
    """Alerts that a webhook has got; processes of the cluster know its address by a variable."""
    received: list[dict[str, Any]] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.body()))
            self.answer(200)

    with LocalServer(Handler) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOOK, f"{server.url}/alerts")
        yield received


@pytest.fixture(scope="module")
def metrics_port(posts: list[dict[str, Any]]) -> Iterator[int]:
    """A Ray cluster of one node, and the port on which it exports metrics twice a second."""
    port = free_port()
    ray.init(
        address="local",
        num_cpus=CPUS,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        namespace="telemetry-test",
        _metrics_export_port=port,
        _system_config={"metrics_report_interval_ms": 500},
    )
    yield port
    ray.shutdown()


@pytest.fixture
def actor(metrics_port: int, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    sinks, run = getattr(request, "param", (["jsonl"], "run"))
    handle = start(tmp_path, sinks, run)
    yield handle
    ray.kill(handle)


def gauges(port: int, run: str) -> dict[tuple[str, str | None], float]:
    """Scrape the values of a run, by name and worker."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    values = {}
    for line in lines:
        if match := re.fullmatch(r"ray_(hypha_\w+)\{(.*)\} (\S+)", line):
            tags = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            if tags["run"] == run:
                values[match[1], tags.get("worker")] = float(match[3])
    return values


def scrape(port: int, run: str, count: int) -> dict[tuple[str, str | None], float]:
    """Scrape until a run has that many values."""
    deadline = time.monotonic() + DEADLINE_S
    while len(values := gauges(port, run)) < count and time.monotonic() < deadline:
        threading.Event().wait(0.1)
    return values


@pytest.mark.parametrize("actor", [(["console", "prometheus"], "gauges")], indirect=True)
def test_telemetry_gauges_appear_on_the_metrics_port(actor: Any, metrics_port: int) -> None:
    ray.get(actor.write.remote([*RECORDS, REPORT], [stamped({"kind": "commit", "round": 2})]))
    values = scrape(metrics_port, "gauges", 15)
    assert 0 <= values.pop(("hypha_commit_age_seconds", None)) < DEADLINE_S
    assert values == {
        ("hypha_worker_gradient_norm", "1"): 0.75,
        ("hypha_loss", None): 2.0,
        ("hypha_val_loss", None): 2.5,
        ("hypha_tokens_per_second", None): 500.0,
        ("hypha_round", None): 2.0,
        ("hypha_idle_fraction", None): 0.0625,
        ("hypha_bytes_up", None): 4096.0,
        ("hypha_bytes_down", None): 2048.0,
        ("hypha_sync_seconds", None): 0.125,
        ("hypha_workers", None): 2.0,
        ("hypha_worker_batches", "0"): 6.0,
        ("hypha_worker_batches", "1"): 4.0,
        ("hypha_worker_batch_seconds", "0"): 0.25,
        ("hypha_worker_batch_seconds", "1"): 0.5,
    }


@pytest.fixture
def prometheus(metrics_port: int, tmp_path: Path) -> Iterator[str]:
    """Address of a real Prometheus that scrapes the cluster every second, as Ray's own configuration does."""
    scraped = {
        "job_name": "ray",
        "scrape_interval": "1s",
        "static_configs": [{"targets": [f"127.0.0.1:{metrics_port}"]}],
    }
    settings = {"rule_files": [str(FOLDER / "alerts.yml")], "scrape_configs": [scraped]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    files = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/prometheus"]
    command = ["prometheus", *files, f"--web.listen-address={address}", "--log.level=error"]
    process = subprocess.Popen(command)
    yield f"http://{address}"
    process.kill()
    process.wait()


def asked(prometheus: str, query: str) -> list[dict[str, Any]]:
    """Series that Prometheus has for a query now; none while it doesn't answer."""
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            answer = json.loads(response.read())
    except urllib.error.URLError:
        return []
    assert answer["status"] == "success", answer
    return list(answer["data"]["result"])


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus isn't installed")
def test_running_job_is_on_every_panel_of_a_real_prometheus_and_its_alert_is_told_once(
    prometheus: str, posts: list[dict[str, Any]], corpus: Path, tmp_path: Path
) -> None:
    alert = {"metric": "loss", "op": ">", "value": 0.5, "for_rounds": 2, "url_env": HOOK}
    job = job_of(
        "boards",
        corpus,
        run={"dir": str(tmp_path)},
        rounds={"update_rounds": 200},
        resources={"num_workers": 1, "worker": {"cpu": 1}},
        telemetry={"sinks": ["prometheus"], "plots": False, "report": False, "alerts": [alert]},
        testing={"slowdown": [20.0]},
    )
    queries = (query.replace("$run", "boards") for _, query in expressions())
    waiting = [query for query in queries if not any(name in query for name in OF_OTHER_JOBS)]
    assert len(waiting) >= 19
    training = hypha_ray.train(job, wait=False)
    deadline = time.monotonic() + 2 * DEADLINE_S
    while (waiting or not posts) and time.monotonic() < deadline:
        threading.Event().wait(0.5)
        waiting = [query for query in waiting if not asked(prometheus, query)]
    (series,) = asked(prometheus, 'ray_hypha_loss{run="boards"}')
    training.stop()
    losses = [record["loss"] for record in read_jsonl(tmp_path / "boards" / "metrics.jsonl", ["round"])]
    assert waiting == [] and training.progress.state == "stopped"
    assert float(series["value"][1]) in losses
    assert [(post["run"], post["round"], post["value"]) for post in posts] == [("boards", 1, losses[1])]


@pytest.mark.parametrize("actor", [(["prometheus"], "leaving")], indirect=True)
def test_telemetry_gauges_of_a_worker_that_left_vanish(actor: Any, metrics_port: int) -> None:
    ray.get(actor.write.remote([a_round(0)]))
    assert scrape(metrics_port, "leaving", 12)["hypha_worker_batch_seconds", "1"] == 0.5
    ray.get(actor.write.remote([{**a_round(1), "loss": None, "batches": {"0": 9}, "batch_s": {"0": 0.25}}]))
    deadline = time.monotonic() + DEADLINE_S
    while len(values := gauges(metrics_port, "leaving")) != 10 and time.monotonic() < deadline:
        threading.Event().wait(0.1)
    assert not {("hypha_loss", None), ("hypha_worker_batch_seconds", "1")} & set(values)
    assert values["hypha_round", None] == 1.0 and values["hypha_worker_batches", "1"] == 0.0
    assert values["hypha_worker_batch_seconds", "0"] == 0.25 and values["hypha_worker_batches", "0"] == 9.0


def test_telemetry_is_found_by_name_and_takes_no_cpu(actor: Any) -> None:
    ray.get(actor.write.remote([]))
    assert ray.get_actor("telemetry") == actor
    assert ray.available_resources()["CPU"] == CPUS


def test_telemetry_finish_writes_summary_beside_metrics_and_events(actor: Any, tmp_path: Path) -> None:
    actor.write.remote(RECORDS, EVENTS)
    figures = ray.get(actor.finish.remote({"parameter_bytes": 40_960, "commits": 3}))
    assert read_jsonl(tmp_path / "metrics.jsonl") == RECORDS
    assert read_jsonl(tmp_path / "events.jsonl") == EVENTS
    assert json.loads((tmp_path / "summary.json").read_text()) == figures
    expected = {"rounds": 3, "samples": 300, "workers_lost": 1, "traffic_ratio": 100.0, "commits": 3, "val_loss": 2.5}
    assert {name: figures[name] for name in expected} == expected
    assert figures["sinks"] == {"files": {"failed": 0, "dropped": 0}}


def test_telemetry_after_a_crash_goes_on_in_the_same_files(actor: Any, tmp_path: Path) -> None:
    ray.get(actor.write.remote(RECORDS[:2]))
    ray.kill(actor)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "rou')
    successor = start(tmp_path, ["jsonl"], name="successor")
    ray.get(successor.write.remote(RECORDS[2:]))
    assert read_jsonl(tmp_path / "metrics.jsonl") == RECORDS


def test_telemetry_dead_collector_neither_delays_nor_loses_records(metrics_port: int, tmp_path: Path) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
    actor = (
        ray.remote(concurrency_groups={"pulse": 1})(Telemetry)
        .options(**options)
        .remote(str(tmp_path), TelemetrySettings(sinks=["otel"]), "dead", {})
    )
    ray.get(actor.write.remote(RECORDS))
    figures = ray.get(actor.finish.remote({}))
    assert read_jsonl(tmp_path / "metrics.jsonl") == RECORDS
    assert figures["sinks"] == {"files": {"failed": 0, "dropped": 0}, "otel": {"failed": 1, "dropped": 0}}
