"""The throttled link: as narrow and as long as asked for, a job's bytes go over it, and nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.wide_area.links import Link, Network, missing, remove_leftovers
from benchmarks.wide_area.nodes import SERVER_ON_HEAD, nodes

from hypha_ray.config.load import resolved_toml
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import layout_of
from tests.support.jobs import MODEL, job_of

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

ROOT = Path(__file__).parents[2]
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    stream, _ = server.accept()
    size = len(stream.recv(1 << 20))
    began = time.monotonic()
    while part := stream.recv(1 << 20):
        size += len(part)
    print(size / (time.monotonic() - began), flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as stream:
    stream.sendall(bytes(int(sys.argv[2])))
"""
ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 5001)) as server:
    print("ready", flush=True)
    stream, _ = server.accept()
    while word := stream.recv(1):
        stream.sendall(word)
"""
ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5001)) as stream:
    def turn():
        began = time.monotonic()
        stream.sendall(b"x")
        stream.recv(1)
        return time.monotonic() - began
    print(min(turn() for _ in range(20)))
"""
KILLED = """
import os, signal, subprocess
from benchmarks.wide_area.links import Link, Network
with Network([Link(100), Link(100, 0.01)]) as network:
    network.sites[0].start(["sleep", "1000"], output=subprocess.DEVNULL)
    print(" ".join(site.namespace for site in network.sites), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def talk(network: Network, first: str, then: str, *arguments: str) -> list[str]:
    """Run one program at site 0, and when it is ready another one at site 1; the last line that each prints."""
    target = network.sites[0].address
    with network.sites[0].start([sys.executable, "-c", first, target], output=subprocess.PIPE) as one:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
        command = [sys.executable, "-c", then, target, *arguments]
        with network.sites[1].start(command, output=subprocess.PIPE) as other:
            said = other.communicate(timeout=60)[0]
        return [one.communicate(timeout=60)[0].strip(), said.strip()]


def namespaces() -> set[str]:
    return set(subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("mbit_s", [20.0, 100.0])
def test_bytes_arrive_at_the_rate_that_was_asked_for(mbit_s: float) -> None:
    """Never faster; and as fast once in three times, for on a busy machine the process that carries packets is late."""
    size = round(mbit_s * 1e6 / 8)
    rates: list[float] = []
    while len(rates) < 3 and max(rates, default=0) < 0.85 * mbit_s:
        with Network([Link(mbit_s), Link(mbit_s)]) as network:
            rates.append(8e-6 * float(talk(network, RECEIVE, SEND, str(size))[0]))
            sent, received = network.sites[1].bytes()
        assert size < sent < 1.15 * size and received < 0.15 * size
    assert 0.85 * mbit_s <= max(rates) <= 1.15 * mbit_s


def test_narrower_end_of_two_limits_what_goes_between_them() -> None:
    with Network([Link(200.0), Link(40.0)]) as network:
        rate, _ = talk(network, RECEIVE, SEND, "5000000")
    assert 34 <= float(rate) * 8e-6 <= 46


def test_answer_over_long_links_takes_both_lengths_twice_and_their_width_still_limits() -> None:
    with Network([Link(50.0, 0.008), Link(50.0, 0.002)]) as network:
        _, turn_s = talk(network, ECHO, ASK)
        assert 0.02 <= float(turn_s) <= 0.03
        rate, _ = talk(network, RECEIVE, SEND, "12500000")
    assert float(rate) * 8e-6 <= 57.5  # On a busy machine it is less: a process carries the packets.


def test_closed_network_leaves_neither_namespaces_nor_processes() -> None:
    before = namespaces()
    with pytest.raises(ZeroDivisionError), Network([Link(100.0), Link(100.0, 0.01)]) as network:
        process = network.sites[1].start(["sleep", "1000"])
        assert len(namespaces() - before) >= 3
        raise ZeroDivisionError
    assert process.wait(10) == -signal.SIGKILL
    assert namespaces() <= before


def test_killed_run_is_cleaned_up_after_by_the_next_one() -> None:
    command = [sys.executable, "-c", KILLED]
    path = os.pathsep.join([str(ROOT / "tools"), str(ROOT)])
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        names = killed.stdout.readline().split()
    assert killed.returncode == -signal.SIGKILL
    assert len(names) == 2 and set(names) <= namespaces()
    assert set(names) <= set(remove_leftovers())
    assert not set(names) & namespaces()


@pytest.mark.long
def test_job_trains_over_the_link_and_all_its_weights_cross_it(corpus: Path, tmp_path: Path) -> None:
    model = {**MODEL, "hidden_size": 256, "intermediate_size": 512}  # 5.6 MB, against which what else goes is little.
    job = job_of("far", corpus, model={"config": model}, resources={"num_workers": 1})
    file = tmp_path / "job.toml"
    file.write_text(resolved_toml(job))
    with Network([Link(100.0)] * 2) as network, nodes(network) as cluster:
        before = [site.bytes() for site in network.sites]
        command = [sys.executable, ROOT / "jobs" / "diloco.py", "@", file, "--run.dir", tmp_path, *SERVER_ON_HEAD]
        output = cluster.run(command, timeout_s=180, env={"PYTHONPATH": str(ROOT)})
        after = [site.bytes() for site in network.sites]
    assert output.splitlines()[-1] == f"run: {tmp_path / 'far'}"
    records = [json.loads(line) for line in (tmp_path / "far" / "metrics.jsonl").read_text().splitlines()]
    rounds = [record for record in records if record["kind"] == "round"]
    head, node = ((sent - s, received - r) for (sent, received), (s, r) in zip(after, before, strict=True))
    up, down = (sum(record[key] for record in rounds) for key in ("bytes_up", "bytes_down"))
    assert up == down == 3 * layout_of(build_model(job.model, 0)).bytes()
    for sent, received in (node, reversed(head)):
        assert up < sent < 1.2 * up
        assert down * 4 / 3 < received < 1.2 * down * 4 / 3  # The first weights went down, too.
