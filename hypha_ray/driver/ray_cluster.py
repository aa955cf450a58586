"""Connection of a driver to a Ray cluster, with the reason if it fails; and checks of the cluster.

The checks are of its nodes, their versions and clocks, Ray's ports, and the links to this machine. Each node has a
probe, an actor that reserves nothing. Times and bandwidths are measured by calls and objects of Ray, on the way that
weights and deltas take.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import ray
from ray._private import services, worker
from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
from ray.exceptions import AuthenticationError as RayAuthenticationError
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.children import ListedActor
from hypha_ray.driver.preflight.doctor import SHOWN_VERSIONS, CheckReport, CheckState, fail, machine_reports, note, ok
from hypha_ray.driver.run_provenance import versions
from hypha_ray.driver.start import signals_held, sigterm_restored
from hypha_ray.errors import AuthenticationError, ClusterError, HyphaError, first_line
from hypha_ray.market.cluster import own_node
from hypha_ray.telemetry.sinks.table import si
from hypha_ray.texts import counted

if TYPE_CHECKING:
    from hypha_ray.driver.start import RayService

log = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Longest wait for a cluster's port to answer."""
KNOCK_S = 2.0
"""Seconds between two checks of the cluster, and the longest wait for its answer."""
GONE_S = 30.0
"""Seconds without an answer after which the cluster counts as gone; after 60 Ray would end the process silently."""
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
"""Number of nodes that are measured in a larger cluster."""
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


@contextmanager
def connected(namespace: str, address_alone: str = "local", service: RayService | None = None) -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS, or start a Ray of our own on this machine.

    Nothing happens if this process is connected already.

    Args:
        namespace: namespace of this process.
        address_alone: Ray's address without RAY_ADDRESS; "auto": the cluster that this machine is a node of.
        service: a Ray of our own that is starting already; it begins to end with the connection.

    """
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS") or address_alone
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # Ray would warn that tokens are on.
    # In another thread than the main one, Ray would warn that it can't handle SIGTERM.
    logging.getLogger("ray._private.worker").addFilter(_is_not_about_signals)
    options: dict[str, Any] = {"address": address}
    if address == "local" and service is None:
        options["include_dashboard"] = False
    answers = _knock(address)
    _log_messages_of_ray()
    with sigterm_restored() as restore_sigterm:
        try:
            if service is not None:
                options["address"] = service.address()
                enable_token_auth_by_default()  # As for a Ray that ray.init starts.
            ray.init(namespace=namespace, log_to_driver=False, logging_level="warning", **options)
        except Exception as error:  # Ray raises a plain exception for a node that doesn't start in time.
            raise _no_cluster(address, error, answers) from None
        restore_sigterm()  # Ray has just installed its own.
        try:
            yield
        finally:
            with signals_held():  # Half disconnected, Ray's client would end this process with a code of its own.
                ray.shutdown()
                if service is not None:
                    service.end()


def _is_not_about_signals(record: logging.LogRecord) -> bool:
    """Whether a message of Ray is about anything else than its handler of SIGTERM."""
    return "SIGTERM handler" not in str(record.msg)


def _log_messages_of_ray() -> None:
    """Let Ray's messages about its own processes go to the log of the run.

    Ray prints them on standard output even with `log_to_driver=False`: for a machine that has died some twenty lines of
    its log, and a paragraph for each worker. The run reports their consequences by its own lines.
    """

    def log_lines(message: dict[str, Any], *_: object, **__: object) -> None:
        for text in message.get("lines", ()):
            log.info("Ray: %s", text)

    worker.print_to_stdstream = log_lines


def connecting(address_alone: str = "local") -> str:
    """Return the verb for the next call of `connected`."""
    address = os.environ.get("RAY_ADDRESS") or address_alone
    return "starting" if address == "local" else "connecting to"


class ControlService:
    """Ray's control service (GCS) on the head node, without which nothing is started or replaced.

    Args:
        address: ``HOST:PORT``.
        on_check: called with each check; None: nothing.

    """

    def __init__(self, address: str, on_check: Callable[[], None] | None = None) -> None:
        self._on_check = on_check
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._knocked_at = time.monotonic()
        self._silent_since: float | None = None

    def check(self) -> bool:
        """Check the service, at most once in `KNOCK_S` seconds; return whether it answered the last check.

        Raises:
            ClusterError: it hasn't answered for `GONE_S` seconds.

        """
        if self._on_check is not None:
            self._on_check()
        now = time.monotonic()
        if now - self._knocked_at >= KNOCK_S:
            self._knocked_at = now
            if self.answers():
                self._silent_since = None
            elif self._silent_since is None:
                self._silent_since = now
        if self._silent_since is not None and now - self._silent_since >= GONE_S:
            host, port = self._address
            problem = f"Ray's control service is gone from {host}:{port}"
            fix = "start a cluster, then give the same command again: the run goes on"
            raise ClusterError("NET009", problem, fix=fix)
        return self._silent_since is None

    def answers(self) -> bool:
        """Whether the service answers now."""
        try:
            socket.create_connection(self._address, KNOCK_S).close()
        except OSError:
            return False
        return True

    def wait(self) -> None:
        """Return once the service answers.

        Raises:
            ClusterError: it hasn't answered for `GONE_S` seconds.

        """
        self._knocked_at -= KNOCK_S
        while not self.check():
            time.sleep(KNOCK_S)


def _knock(address: str) -> bool:
    """Check that a process listens at ``HOST:PORT``: Ray itself would try for a quarter of an hour.

    After that, one attempt of Ray's is enough. Returns False for an address without a port. A Ray that was killed
    leaves its address in a file, which Ray takes for "auto" if no node runs here.
    """
    listener = address
    if address == "auto" and not services.find_gcs_addresses():
        listener = services.find_bootstrap_address(None) or ""
    host, _, port = listener.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return False
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")  # Despite its name, it counts attempts.
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from None
    return True


def _no_cluster(address: str, error: Exception, answers: bool) -> HyphaError:
    """Error of a failed connection: if the port answers, a wrong token, which Ray reports in the same way."""
    if isinstance(error, RayAuthenticationError) or (answers and isinstance(error, ConnectionError)):
        fix = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token to the cluster's token"
        return AuthenticationError("AUTH001", f"Ray at {address!r} did not let us in", got=first_line(error), fix=fix)
    return _unreachable(address, error)


def _unreachable(address: str, error: Exception) -> ClusterError:
    if address == "local":
        fix = "try again when this machine has less to do"
        return ClusterError("NET002", "Ray did not start on this machine", got=first_line(error), fix=fix)
    if address == "auto":
        fix = "set RAY_ADDRESS to the cluster's address, or make this machine a node of it by `ray start`"
        return ClusterError("NET002", "this machine is no node of a running Ray cluster", first_line(error), fix=fix)
    fix = "start one, or unset RAY_ADDRESS"
    return ClusterError("NET002", f"no Ray cluster at {address!r}", got=first_line(error), fix=fix)


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

    def send(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return an array of that many bytes, which can't be compressed."""
        return np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)

    def receive(self, array: npt.NDArray[np.uint8]) -> int:
        """Size of an array that has arrived."""
        return int(array.nbytes)


def cluster_reports() -> Iterator[CheckReport]:
    """Check the cluster that RAY_ADDRESS names, or that this machine is a node of; report it if there is none."""
    try:
        with connected("doctor", address_alone=ALONE):
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
    listed_ports = ", ".join(f"{name} {port}" for name, port in ports.items())
    closed = [f"{name} {ports[name]}" for name, is_open in answers.items() if not is_open]
    if closed:
        remedy = "let the nodes of the cluster reach each other on all of Ray's ports, and nothing else reach them"
        return fail("ports", f"no answer of {', '.join(closed)}", remedy, ClusterError)
    return ok("ports", listed_ports)


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
