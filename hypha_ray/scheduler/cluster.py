"""How a driver comes to a Ray cluster, or says why it can't."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import AuthenticationError as RayAuthenticationError

from hypha_ray.errors import AuthenticationError, ClusterError, HyphaError

CONNECT_S = 10.0
"""Longest wait for a cluster's port to answer."""


@contextmanager
def connected(namespace: str) -> Iterator[None]:
    """A Ray cluster: the one that RAY_ADDRESS names, or one of our own on this machine."""
    address = os.environ.get("RAY_ADDRESS") or "local"
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # It warns that the token is on.
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    answers = _knock(address)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="warning", **options)
    except (ConnectionError, RuntimeError, ValueError, RayAuthenticationError) as error:
        raise _no_cluster(address, error, answers) from None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ray has just set its own.
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> bool:
    """Make sure that something listens at ``HOST:PORT``: Ray itself would try for a quarter of an hour.

    Once that is known one attempt of Ray's is enough. Returns False for an address that has no port.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return False
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")  # In spite of its name it counts attempts.
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from None
    return True


def _no_cluster(address: str, error: Exception, answers: bool) -> HyphaError:
    """Ray gives a wrong token out as a failed connection; where somebody answers, that is what it means."""
    if isinstance(error, RayAuthenticationError) or (answers and isinstance(error, ConnectionError)):
        fix = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token to the cluster's token"
        return AuthenticationError("AUTH001", f"Ray at {address!r} did not let us in", got=first_line(error), fix=fix)
    return _unreachable(address, error)


def _unreachable(address: str, error: Exception) -> ClusterError:
    fix = "start one, or unset RAY_ADDRESS"
    return ClusterError("NET002", f"no Ray cluster at {address!r}", got=first_line(error), fix=fix)


def first_line(error: Exception) -> str:
    """What of an error fits into one line."""
    return str(error).partition("\n")[0]
