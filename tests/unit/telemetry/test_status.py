"""The status bridge: what a connector at the other end of a socket receives, and what happens without one."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config.load import load
from hypha_ray.errors import ConfigError
from hypha_ray.telemetry.sinks import status
from hypha_ray.telemetry.sinks.base import build
from hypha_ray.telemetry.sinks.files import METRICS, read_jsonl
from tests.support.fleet import fleet_records
from tests.support.http_servers import QuietHandler

ROOT = Path(__file__).parents[3]
ROUND = {
    "kind": "round",
    "round": 7,
    "rounds": 20,
    "loss": 2.5,
    "samples_per_s": 480.0,
    "idle_fraction": float("nan"),
    "predicted_s": None,
    "batches": {0: 6, 1: 4},
    "batch_s": {0: 0.25, 1: None},
}
EVALUATION = {"kind": "eval", "round": 7, "val_loss": 2.75, "perplexity": 15.6}
STEP = {"kind": "step", "worker": 1, "incarnation": 10001, "round": 8, "loss": 2.25, "samples": 32}
SENT = [
    ("worker-1", 8, "loss", 2.25),
    ("all", 7, "val_loss", 2.75),
    ("all", 7, "perplexity", 15.6),
    ("all", 7, "loss", 2.5),
    ("all", 7, "samples_per_s", 480.0),
    ("worker-0", 7, "batches", 6),
    ("worker-1", 7, "batches", 4),
    ("worker-0", 7, "batch_s", 0.25),
]


class Connector(ThreadingHTTPServer):
    """A connector that keeps what it gets, and answers as it is told."""

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", status: int = 200, keep: bool = True) -> None:
        self.got: list[tuple[str, str | None, dict[str, Any]]] = []
        self.connections = 0
        connector = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.body()
                connector.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
                self.answer(status, b"{}")
                self.close_connection = not keep  # Without a word of it in the answer.

        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), Handler)
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        self.thread.join()
        super().__exit__(*args)

    @property
    def measurements(self) -> list[tuple[Any, ...]]:
        assert {(path, kind) for path, kind, _ in self.got} <= {("/status", "application/json")}
        fields = ["worker_id", "round", "metric_name", "value"]
        assert all(list(body) == fields for _, _, body in self.got)
        return [tuple(body.values()) for _, _, body in self.got]


def report(directory: Path, address: str) -> tuple[dict[str, int], list[str]]:
    """Send three records to a connector; returns what was lost, and what the user is told."""
    sinks = build(directory, "run-1", [], status_bridge=address, patience_s=60.0)
    sinks.start({"run": {"seed": 1}})
    for record in (STEP, EVALUATION, ROUND):
        sinks.record(record)
    sinks.event({"kind": "loss", "worker": 1})
    sinks.summary({"rounds": 1})
    sinks.close()
    return sinks.losses()["status_bridge"], sinks.problems()


@pytest.mark.parametrize("keep", [True, False])
def test_connector_gets_every_number_of_the_records_in_one_request_each(tmp_path: Path, keep: bool) -> None:
    with Connector(keep=keep) as connector:
        told = report(tmp_path, f"127.0.0.1:{connector.server_port}")
    assert told == ({"failed": 0, "dropped": 0}, [])
    assert connector.measurements == SENT
    assert connector.connections == (1 if keep else len(SENT))


@pytest.mark.slow
def test_connector_gets_the_numbers_of_the_metrics_file(tmp_path: Path) -> None:
    with Connector() as connector:
        address = f"127.0.0.1:{connector.server_port}"
        sinks = build(tmp_path, "run-1", [], status_bridge=address, patience_s=60.0)
        sinks.start({})
        for record in fleet_records():
            sinks.record(record)
        sinks.close()
    got = {(name, number, worker): value for worker, number, name, value in connector.measurements}
    records = {record["kind"]: record for record in read_jsonl(tmp_path / METRICS)}
    round_, evaluation = records["round"], records["eval"]
    for name in ("loss", "samples_per_s", "tokens_per_s", "idle_fraction", "bytes_up", "workers"):
        assert got[name, round_["round"], "all"] == round_[name]
    assert got["val_loss", evaluation["round"], "all"] == evaluation["val_loss"]
    assert got["batches", round_["round"], "worker-1"] == round_["batches"]["1"]
    assert got["time_shares/training", round_["round"], "all"] == round_["time_shares"]["training"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_address_of_all_of_a_machine_means_this_machine(tmp_path: Path, host: str) -> None:
    with Connector(host) as connector:
        everywhere = {"127.0.0.1": "0.0.0.0", "::1": "[::]"}[host]
        losses, _ = report(tmp_path, f"{everywhere}:{connector.server_port}")
    assert losses == {"failed": 0, "dropped": 0}
    assert connector.measurements == SENT


def test_connector_that_refuses_is_told_once_and_counted(tmp_path: Path) -> None:
    with Connector(status=503) as connector:
        address = f"127.0.0.1:{connector.server_port}"
        losses, problems = report(tmp_path, address)
    assert losses == {"failed": 3, "dropped": 0}
    (problem,) = problems
    assert f"telemetry sink status_bridge failed (ConnectorRefused: the connector at {address} answers 503" in problem
    assert "training goes on" in problem


def test_connector_that_is_not_there_is_told_once_and_the_files_have_all(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    losses, problems = report(tmp_path, f"127.0.0.1:{port}")
    assert losses == {"failed": 3, "dropped": 0}
    assert len(problems) == 1 and f"no connector at 127.0.0.1:{port}" in problems[0]
    assert [record["kind"] for record in read_jsonl(tmp_path / METRICS)] == ["step", "eval", "round"]


@pytest.mark.slow
def test_connector_that_never_answers_holds_nobody_back(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sinks = build(tmp_path, "run-1", [], status_bridge=f"127.0.0.1:{silent.getsockname()[1]}")
        sinks.start({})
        for number in range(5000):
            sinks.record({**STEP, "round": number})
        assert len(read_jsonl(tmp_path / METRICS)) == 5000
        sinks.close()
    lost = sinks.losses()["status_bridge"]
    assert lost["failed"] + lost["dropped"] >= 5000
    assert len(sinks.problems()) == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("begins", [b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_connector_that_answers_without_end_is_given_up(begins: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "TIMEOUT_S", 0.5)
    gone = threading.Event()

    def trickle(listening: socket.socket) -> None:
        connected, _ = listening.accept()
        with connected:
            try:
                connected.sendall(begins)
                while not gone.wait(0.02):
                    connected.sendall(b" ")
            except OSError:
                gone.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=trickle, args=(listening,), daemon=True).start()
        sink = status.StatusBridge(f"127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(ConnectionError, match=r"no whole answer in 0\.5 s"):
            sink.record(EVALUATION)
        assert gone.wait(30)


@pytest.mark.parametrize("address", ["host:0", "host:65536", "host:99999", "user@host:80", "host", "http://host:80"])
def test_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"CFG003.*telemetry.status_bridge is out of range"):
        load(["--telemetry.status_bridge", address])


@pytest.fixture
def example(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The example connector as a process of its own: its port and the file that it writes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "examples" / "status_connector.py"), str(port), str(tmp_path / "status.csv")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"listening on 127.0.0.1:{port}\n"
        yield port, tmp_path / "status.csv"
        process.terminate()


def test_example_connector_writes_what_it_gets(tmp_path: Path, example: tuple[int, Path]) -> None:
    port, file = example
    assert report(tmp_path, f"127.0.0.1:{port}")[0] == {"failed": 0, "dropped": 0}
    rows = ["worker_id,round,metric_name,value", *(",".join(map(str, one)) for one in SENT)]
    assert file.read_text(encoding="utf-8").splitlines() == rows
