"""Listener for trainers: a TCP or Unix socket that admits connections which prove to have the token."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator

from hypha_ray.bridge.access import address_of, open_listener, remove_socket_file
from hypha_ray.bridge.channel import GREETING_S, Channel
from hypha_ray.errors import HyphaError

log = logging.getLogger(__name__)

MAX_STRANGERS = 8
"""Most connections that aren't authenticated yet; one more closes the oldest."""
PACE_S = 0.005
"""Shortest time in seconds between two accepted connections; others wait in the system's queue, or are refused."""


class Listener:
    """Listens until it is closed; authenticated trainers wait in a queue.

    Args:
        address: ``host:port``, where port 0 means any free one, or ``unix:PATH`` with a path that doesn't exist yet.
        token: token that a connection has to prove to have.
        silence_s: longest silence on its connections in seconds.
        tls: certificate and key; required except on the loopback interface.

    Raises:
        ConfigError: SEC001 it would listen to the network without TLS.
        ClusterError: NET001 the address can't be had.

    """

    def __init__(self, address: str, token: bytes, silence_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._token = token
        self._silence_s = silence_s
        self._tls = tls
        self._admitted: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._strangers: list[socket.socket] = []
        """Unauthenticated connections, oldest first."""
        self._changing = threading.Lock()
        self._closed = False
        self._socket = open_listener(address, tls is not None)
        self.address = address_of(self._socket)
        """Address that trainers connect to, with the actual port."""
        threading.Thread(target=self._accept, name="bridge-listener", daemon=True).start()

    def admit(self, timeout_s: float) -> Channel | None:
        """The next authenticated trainer; None if none arrives in time."""
        try:
            return self._admitted.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stop listening, and close the connections still in the queue; may be called twice."""
        with self._changing:
            self._closed = True
            for stranger in self._strangers:
                _hang_up(stranger)
        _hang_up(self._socket)
        self._socket.close()
        remove_socket_file(self.address)
        while not self._admitted.empty():
            self._admitted.get().close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream, _ = self._socket.accept()
            except OSError:
                time.sleep(PACE_S)  # It was gone before it was accepted, or there are no descriptors left.
                continue
            with self._changing:
                if len(self._strangers) >= MAX_STRANGERS:
                    _hang_up(self._strangers[0])
            threading.Thread(target=self._authenticate, args=(stream,), name="bridge-stranger", daemon=True).start()
            time.sleep(PACE_S)

    def _authenticate(self, stream: socket.socket) -> None:
        """Authenticate a connection, or close it."""
        try:
            if self._tls is not None:
                stream = self._tls.wrap_socket(stream, server_side=True, do_handshake_on_connect=False)
            with self._counted_as_stranger(stream):
                channel = self._greet(stream)
        except OSError as error:  # TLS, mostly.
            log.info("a connection to the bridge was refused: %s", error)
            stream.close()
            return
        if channel is not None:
            self._admit(channel)

    def _greet(self, stream: socket.socket) -> Channel | None:
        """The connection of an authenticated trainer; None if authentication failed."""
        stream.settimeout(GREETING_S)
        if isinstance(stream, ssl.SSLSocket):
            stream.do_handshake()
        channel = Channel(stream, "driver", self._token)
        try:
            channel.greet(silence_s=self._silence_s)
        except HyphaError as error:
            log.info("a connection to the bridge was refused: %s", error)
            return None
        return channel

    def _admit(self, channel: Channel) -> None:
        """Put a trainer into the queue, where neither further connections nor `_counted_as_stranger` close it."""
        with self._changing:
            if self._closed:
                channel.close()
            else:
                self._admitted.put(channel)

    @contextlib.contextmanager
    def _counted_as_stranger(self, stream: socket.socket) -> Iterator[None]:
        """Count a connection as unauthenticated meanwhile."""
        with self._changing:
            self._strangers.append(stream)
            if self._closed:
                _hang_up(stream)
        try:
            yield
        finally:
            with self._changing:
                self._strangers.remove(stream)


def _hang_up(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
