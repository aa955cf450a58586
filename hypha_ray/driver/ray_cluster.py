"""Connection of a driver to a Ray cluster, with the reason if it fails."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
from ray._private import services, worker
from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
from ray.exceptions import AuthenticationError as RayAuthenticationError

from hypha_ray.errors import AuthenticationError, ClusterError, HyphaError, first_line

if TYPE_CHECKING:
    from hypha_ray.driver.local_ray.service import RayService

log = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Longest wait for a cluster's port to answer."""
KNOCK_S = 2.0
"""Seconds between two checks of the cluster, and the longest wait for its answer."""
GONE_S = 30.0
"""Seconds without an answer after which the cluster counts as gone; after 60 Ray would end the process silently."""


@contextmanager
def connected(namespace: str, alone: str = "local", service: RayService | None = None) -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS, or start a Ray of our own on this machine.

    Nothing happens if this process is connected already.

    Args:
        namespace: namespace of this process.
        alone: Ray's address without RAY_ADDRESS; "auto": the cluster that this machine is a node of.
        service: a Ray of our own that is starting already; it begins to end with the connection.

    """
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS") or alone
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # It would warn that the token is on.
    # In another thread than the main one, Ray would warn that it can't handle SIGTERM.
    logging.getLogger("ray._private.worker").addFilter(_is_not_about_signals)
    options: dict[str, Any] = {"address": address}
    if address == "local" and service is None:
        options["include_dashboard"] = False
    answers = _knock(address)
    _log_messages_of_ray()
    try:
        if service is not None:
            options["address"] = service.address()
            enable_token_auth_by_default()  # As for a Ray that ray.init starts.
        ray.init(namespace=namespace, log_to_driver=False, logging_level="warning", **options)
    except Exception as error:  # Ray raises a plain exception for a node that doesn't start in time.
        raise _no_cluster(address, error, answers) from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ray has just installed its own.
    try:
        yield
    finally:
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


def connecting(alone: str = "local") -> str:
    """Return the verb for the next call of `connected`."""
    address = os.environ.get("RAY_ADDRESS") or alone
    return "starting" if address == "local" else "connecting to"


class ControlService:
    """Ray's control service (GCS) on the head node, without which nothing is started or replaced.

    Args:
        address: ``HOST:PORT``.
        also: called with each check; None: nothing.

    """

    def __init__(self, address: str, also: Callable[[], None] | None = None) -> None:
        self._also = also
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._knocked_at = time.monotonic()
        self._silent_since: float | None = None

    def check(self) -> bool:
        """Check the service, at most once in `KNOCK_S` seconds; return whether it answered the last check.

        Raises:
            ClusterError: it hasn't answered for `GONE_S` seconds.

        """
        if self._also is not None:
            self._also()
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
