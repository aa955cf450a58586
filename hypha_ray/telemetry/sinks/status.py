"""The status bridge of the training guide: metrics are posted to a connector by HTTP, one number per request.

A connector receives requests like this one, and answers with 200:

POST /status HTTP/1.1
{"worker_id": "worker-3", "round": 12, "metric_name": "loss", "value": 2.75}
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import math
import socket
import threading
from collections.abc import Iterator
from typing import Any

from hypha_ray.telemetry.sinks.files import Record, plain
from hypha_ray.telemetry.sinks.inputs import TIME_SHARES

TIMEOUT_S = 5.0
"""Longest wait for a connector, and for its whole answer after that."""
_MOST_BYTES = 1 << 16
"""Most bytes of an answer that are read; the connection of a longer one isn't kept."""
ALL = "all"
"""`worker_id` of figures of all workers together."""
PATH = "/status"
_NO_METRICS = frozenset({"round", "rounds", "worker", "incarnation"})
_OF_A_REPORT = ("loss",)
"""Figures of a worker's reports that are sent: there is about one a second of each worker."""


class StatusBridge:
    """A sink that posts every number of rounds and evaluations, and the losses that workers report.

    The numbers are those of metrics.jsonl, under the same names. One connection is kept for all requests.

    Args:
        address: host:port of the connector; 0.0.0.0 and [::] mean this machine.

    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._connection = http.client.HTTPConnection(_reachable(host.strip("[]")), int(port), timeout=TIMEOUT_S)
        self._address = address

    def start(self, config: Record) -> None:
        """Nothing to do: the first number connects."""

    def record(self, record: Record) -> None:
        """Send the numbers of a record.

        Raises:
            ConnectionError: the connector can't be reached.
            Refused: it answered with another status than 2xx.

        """
        for worker, name, value in measurements(record):
            self._post({"worker_id": worker, "round": record["round"], "metric_name": name, "value": value})

    def event(self, event: Record) -> None:
        """Events stay in events.jsonl: the connector takes numbers."""

    def summary(self, figures: Record) -> None:
        """Figures of a whole run belong to no round."""

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _post(self, body: dict[str, Any]) -> None:
        was_connected = self._connection.sock is not None
        try:
            self._request(body)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if not was_connected or isinstance(error, TimeoutError):
                raise ConnectionError(f"no connector at {self._address}: {error or type(error).__name__}") from None
            self._post(body)  # The connector may have closed an idle connection.

    def _request(self, body: dict[str, Any]) -> None:
        content = json.dumps(body, allow_nan=False).encode()
        if self._connection.sock is None:
            self._connection.connect()
        with _time_limit(self._connection.sock):
            self._connection.request("POST", PATH, content, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            answer.read(_MOST_BYTES)
        if not answer.isclosed():  # The unread end of a long answer would be taken for the next answer.
            self._connection.close()
        if not 200 <= answer.status < 300:
            raise ConnectorRefused(f"the connector at {self._address} answers {answer.status} {answer.reason}")


@contextlib.contextmanager
def _time_limit(connected: socket.socket) -> Iterator[None]:
    """Context in which a connection is used, for `TIMEOUT_S` at most: the socket's own limit is one of silence.

    Raises:
        TimeoutError: the answer wasn't there in time.

    """
    timed_out = threading.Event()

    def cut_off() -> None:
        timed_out.set()
        with contextlib.suppress(OSError):  # The socket is closed.
            connected.shutdown(socket.SHUT_RDWR)

    watchdog = threading.Timer(TIMEOUT_S, cut_off)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not timed_out.is_set():
            raise
    finally:
        watchdog.cancel()
    if timed_out.is_set():
        raise TimeoutError(f"no whole answer in {TIMEOUT_S:g} s")


class ConnectorRefused(Exception):
    """Error: the connector answered with another status than 2xx."""


def measurements(record: Record) -> Iterator[tuple[str, str, float]]:
    """The finite numbers of a record: worker, name and value."""
    fields = plain(record)
    match record.get("kind"):
        case "step":
            for name in _OF_A_REPORT:
                if _is_number(fields.get(name)):
                    yield f"worker-{record['worker']}", name, fields[name]
        case "round" | "eval":
            for name, value in fields.items():
                if name == TIME_SHARES:
                    for use, share in (value or {}).items():
                        yield ALL, f"{name}/{use}", share
                elif isinstance(value, dict):
                    for worker, number in value.items():
                        if _is_number(number):
                            yield f"worker-{worker}", name, number
                elif _is_number(value) and name not in _NO_METRICS:
                    yield ALL, name, value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _reachable(host: str) -> str:
    """Host to connect to; an unspecified address such as 0.0.0.0 means this machine."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            return "127.0.0.1" if address.version == 4 else "::1"
    return host
