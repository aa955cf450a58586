"""Checks of the cluster: its nodes, their versions and clocks, Ray's ports, and the links to this machine.

Each node has a probe, an actor that reserves nothing. Times and bandwidths are measured by calls and objects of Ray, on
the way that weights and deltas take.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.children import ListedActor
from hypha_ray.driver.doctor import SHOWN_VERSIONS, CheckReport, CheckState, fail, machine_reports, note, ok
from hypha_ray.driver.ray_cluster import connected
from hypha_ray.driver.run_provenance import versions
from hypha_ray.errors import ClusterError, HyphaError, first_line
from hypha_ray.market.cluster import own_node
from hypha_ray.telemetry.sinks.table import si
from hypha_ray.texts import counted

ALONE = "auto"
"""Ray's address of the cluster that this machine is a node of."""
START_S = 20.0
"""Longest wait for the first answers of the probes of all nodes, in seconds."""
LATE_S = 1.0
"""Longest further wait for that of one node, in seconds."""
CALL_S = 20.0
"""Longest wait for an answer of a probe, in seconds."""
ROUND_TRIPS = 5
"""Number of calls by which the difference of two clocks is measured; the fastest one counts."""
TRANSFER_BYTES = 16 << 20
"""Size of the object that is sent each way; Ray sends it in several chunks."""
MOST_NODES = 32
"""Most nodes that are measured; of a larger cluster, those are."""
_OFF_S = 1.0
"""Difference of clocks that is worth a note, in seconds."""
_REFUSED_S = 300.0
"""Difference of clocks that fails, in seconds: object stores refuse requests that are a quarter of an hour off."""
_SLOW_BITS_PER_S = 10e6
_CONNECT_S = 2.0
"""Longest wait for a port, in seconds."""
_EXACT = ("python", "ray", "hypha_ray")
"""Versions that have to be the same everywhere; others may differ, at the cost of bit-exact repetition."""

Answers = dict[str, Any]


class ProbeActor(ListedActor):
    """Answers questions about the node that it is on."""

    def reports(self) -> list[CheckReport]:
        """Check the machine."""
        return machine_reports()

    def versions(self) -> dict[str, str]:
        """Versions of libraries."""
        return versions()

    def clock_s(self) -> float:
        """Time of the node's clock, in seconds since 1970."""
        return time.time()

    def send(self, size: int) -> npt.NDArray[np.uint8]:
        """Return an array of that many bytes, which can't be compressed."""
        return np.random.default_rng(0).integers(0, 256, size, np.uint8)

    def receive(self, array: npt.NDArray[np.uint8]) -> int:
        """Size of an array that has arrived."""
        return int(array.nbytes)


def cluster_reports() -> Iterator[CheckReport]:
    """Check the cluster that RAY_ADDRESS names, or that this machine is a node of; without one, say so."""
    try:
        with connected("doctor", alone=ALONE):
            yield from _connected_reports()
    except HyphaError as error:
        if isinstance(error, ClusterError) and not os.environ.get("RAY_ADDRESS"):
            yield ok("cluster", "none: this machine alone, on which a job starts a Ray of its own")
            return
        got = f" ({error.got})" if error.got else ""
        yield fail("cluster", f"{error.what}{got}", error.fix, type(error))


def _connected_reports() -> Iterator[CheckReport]:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    yield size_report(nodes, ray.get_runtime_context().gcs_address)
    home = own_node()
    other_nodes = [node for node in nodes if node["NodeID"] != home][:MOST_NODES]
    own_versions = versions()
    probes = [_start_probe(node["NodeID"]) for node in other_nodes]
    first_answers = [probe.versions.remote() for probe in probes]
    if first_answers:
        ray.wait(first_answers, num_returns=len(first_answers), timeout=START_S, fetch_local=False)
    for node, probe, first_answer in zip(other_nodes, probes, first_answers, strict=True):
        address = node["NodeManagerAddress"]
        for report in _node_reports(node, probe, first_answer, own_versions):
            yield replace(report, node=address)


def size_report(nodes: list[dict[str, Any]], address: str) -> CheckReport:
    """Tell nodes, resources and address of the cluster; a machine may run several."""
    totals: dict[str, float] = {}
    for node in nodes:
        for name in ("CPU", "GPU", "memory", "object_store_memory"):
            totals[name] = totals.get(name, 0.0) + node["Resources"].get(name, 0.0)
    parts = [counted(len(nodes), "node"), _amount(totals["CPU"], "CPU"), _amount(totals["GPU"], "GPU")]
    parts.append(f"{si(totals['memory'])}B of memory")
    parts.append(f"{si(totals['object_store_memory'])}B of object stores")
    parts.append(f"at {address}")
    text = ", ".join(parts)
    if len(nodes) - 1 > MOST_NODES:
        return note("cluster", f"{text}; the first {MOST_NODES} others are measured", "see to the others on themselves")
    return ok("cluster", text)


def _amount(number: float, noun: str) -> str:
    """A number of logical devices, of which nodes may have parts."""
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"


def _start_probe(node_id: str) -> Any:
    """Start the probe of a node; its first answer tells whether that worked."""
    on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=on_node, max_restarts=0)(ProbeActor).remote()


def _node_reports(
    node: Mapping[str, Any], probe: Any, first_answer: Any, own_versions: Mapping[str, str]
) -> Iterator[CheckReport]:
    """Check a node; without the first answer of its probe, its versions, only its ports."""
    yield ports_report(node["NodeManagerAddress"], _ports(node))
    try:
        node_versions = ray.get(first_answer, timeout=LATE_S)
        yield compared_versions(own_versions, node_versions)
        for report in ray.get(probe.reports.remote(), timeout=CALL_S):
            if report.check != "versions" or report.state is CheckState.FAIL:
                yield report
        yield _clock_report(probe)
        yield _link_report(probe)
    except GetTimeoutError:
        yield fail("node", f"no answer in {START_S:g} s", "look at the node by `ray list nodes`", ClusterError)
    except RayError as error:
        remedy = "install this hypha_ray on the node, with the same Python, and start Ray there again"
        yield fail("node", f"hypha_ray can't run there: {first_line(error)}", remedy, ClusterError)
    finally:
        ray.kill(probe)


def _ports(node: Mapping[str, Any]) -> dict[str, int]:
    """Ports of a node that others need, by their names."""
    return {"node manager": node["NodeManagerPort"], "object manager": node["ObjectManagerPort"]}


def ports_report(address: str, ports: Mapping[str, int]) -> CheckReport:
    """Check that Ray's ports of a node can be reached from here."""
    with ThreadPoolExecutor(len(ports)) as pool:
        answers = dict(zip(ports, pool.map(lambda port: _answers(address, port), ports.values()), strict=True))
    listed = ", ".join(f"{name} {port}" for name, port in ports.items())
    closed = [f"{name} {ports[name]}" for name, is_open in answers.items() if not is_open]
    if closed:
        remedy = "let the nodes of the cluster reach each other on all of Ray's ports, and nothing else reach them"
        return fail("ports", f"no answer of {', '.join(closed)}", remedy, ClusterError)
    return ok("ports", listed)


def _answers(address: str, port: int) -> bool:
    """Whether a port can be connected to."""
    try:
        socket.create_connection((address, port), _CONNECT_S).close()
    except OSError:
        return False
    return True


def compared_versions(here: Mapping[str, str], there: Mapping[str, str]) -> CheckReport:
    """Compare the versions of a node with those of this machine."""
    texts: list[str] = []
    differing = [name for name in SHOWN_VERSIONS if here.get(name) != there.get(name)]
    for name in differing:
        texts.append(f"{name} {there.get(name, 'missing')} there and {here.get(name, 'missing')} here")
    if not differing:
        return ok("versions", "as here")
    remedy = "install the same versions on all nodes"
    if set(differing) & set(_EXACT):
        return fail("versions", ", ".join(texts), remedy)
    return note("versions", ", ".join(texts), remedy)


def _clock_report(probe: Any) -> CheckReport:
    """Measure the difference of a node's clock to this machine's, by the fastest of some round trips."""
    fastest_s = CALL_S
    offset_s = 0.0
    for _ in range(ROUND_TRIPS):
        wall_s = time.time()
        start_s = time.monotonic()
        there_s = ray.get(probe.clock_s.remote(), timeout=CALL_S)
        round_trip_s = time.monotonic() - start_s
        if round_trip_s < fastest_s:
            fastest_s = round_trip_s
            offset_s = there_s - (wall_s + round_trip_s / 2)
    return clock_report(offset_s, fastest_s / 2)


def clock_report(offset_s: float, uncertainty_s: float) -> CheckReport:
    """Judge the difference of a node's clock to this machine's, both in seconds."""
    text = f"{offset_s:+.3f} s, ± {uncertainty_s:.3f} s"
    remedy = "set the clocks by NTP"
    size_s = abs(offset_s) - uncertainty_s
    if size_s > _REFUSED_S:
        return fail("clock", text, remedy, ClusterError)
    if size_s > _OFF_S:
        return note("clock", text, f"{remedy}: times of events would mislead")
    return ok("clock", text)


def _link_report(probe: Any) -> CheckReport:
    """Measure the time of an object from a node to this machine, and of one back."""
    start_s = time.monotonic()
    ray.get(probe.clock_s.remote(), timeout=CALL_S)
    delay_s = time.monotonic() - start_s
    reference = probe.send.remote(TRANSFER_BYTES)
    ray.wait([reference], timeout=CALL_S, fetch_local=False)
    start_s = time.monotonic()
    array = ray.get(reference, timeout=CALL_S)
    from_s = time.monotonic() - start_s
    own_reference = ray.put(np.array(array))
    start_s = time.monotonic()
    ray.get(probe.receive.remote(own_reference), timeout=CALL_S)
    to_s = max(1e-6, time.monotonic() - start_s - delay_s)
    return link_report(8 * TRANSFER_BYTES / from_s, 8 * TRANSFER_BYTES / to_s, delay_s)


def link_report(from_bits_per_s: float, to_bits_per_s: float, delay_s: float) -> CheckReport:
    """Judge the bandwidths from a node and to it, in bits per second, and the time of a call, in seconds."""
    text = f"{si(from_bits_per_s)}bit/s from it, {si(to_bits_per_s)}bit/s to it, {1000 * delay_s:.1f} ms a call"
    if min(from_bits_per_s, to_bits_per_s) < _SLOW_BITS_PER_S:
        remedy = "have fewer bytes on it: see docs/choosing.md, or simulate.py --advise with this link"
        return note("link", text, remedy)
    return ok("link", text)
