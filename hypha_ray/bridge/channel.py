"""One connection of the bridge, for messages and files in both directions, and the driver's listener for trainers.

A channel is the same on both sides. The listener admits connections that prove to have the token.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.access import (
    HEADER_S,
    MAX_MESSAGE,
    MAX_PART,
    MIN_RATE,
    NONCE,
    SESSION,
    Frames,
    Side,
    address_of,
    open_listener,
    prove,
    proves,
    remove_socket_file,
)
from hypha_ray.bridge.conversation import Conversation, complaint
from hypha_ray.bridge.paths import WorkDirectory
from hypha_ray.errors import AuthenticationError, BridgeError, HyphaError

MAX_GREETING = 1024
"""Largest message in bytes before the other side is authenticated."""
GREETING_S = 10.0
"""Longest wait in seconds for the other side's next message before it is authenticated."""
log = logging.getLogger(__name__)
MAX_STRANGERS = 8
"""Most connections that aren't authenticated yet; one more closes the oldest."""
PACE_S = 0.005
"""Shortest time in seconds between two accepted connections; others wait in the system's queue, or are refused."""


def _message_classes() -> dict[str, Any]:
    """Classes of messages by the names of their fields in the envelope."""
    classes: dict[str, Any] = {}
    for name, field in pb.Envelope.DESCRIPTOR.fields_by_name.items():
        if field.message_type is not None:
            classes[name] = getattr(pb, field.message_type.name)
    return classes


_MESSAGES = _message_classes()


class Channel:
    """A connection, mutually authenticated once `greet` has returned.

    One thread may receive while others send. If the other side breaks the protocol, it is sent the reason, the
    connection is closed, and the same error is raised here.

    Args:
        stream: a connected socket.
        side: side of the connection that this process is.
        token: token that both sides have.

    """

    def __init__(self, stream: socket.socket, side: Side, token: bytes) -> None:
        self._stream = stream
        self._side = side
        self._token = token
        self._frames = Frames(stream)
        self._conversation = Conversation(side)
        self._send_lock = threading.Lock()
        self._closed = threading.Event()
        self.peer = ""
        """Name given by the trainer."""
        self.shares_files = False
        """Whether the trainer shares the work directory."""
        self.silence_s = GREETING_S
        """Seconds of silence after which the other side counts as dead."""
        self._directory: WorkDirectory | None = None
        self._admit: Callable[[str, int], None] = _nothing

    def greet(self, name: str = "", shares_files: bool = False, silence_s: float = GREETING_S) -> None:
        """Authenticate both sides.

        Args:
            name: name of this program, if it is a trainer.
            shares_files: whether this trainer shares the work directory.
            silence_s: longest silence in seconds, set by the driver.

        Raises:
            AuthenticationError: AUTH002 the other side doesn't have the token.
            BridgeError: the other side breaks the protocol, or is gone.

        """
        with self._closing():
            if self._side == "driver":
                self._authenticate_trainer(silence_s)
            else:
                self._authenticate_driver(name, shares_files)

    def attach(self, directory: WorkDirectory, admit: Callable[[str, int], None]) -> None:
        """Accept files from the other side.

        Args:
            directory: directory that the files are written to.
            admit: called with the path and size of each file before it arrives; raises `BridgeError` to refuse it.

        """
        self._directory = directory
        self._admit = admit

    def send_signs_of_life(self) -> None:
        """Send signs of life, on a thread that ends with the connection."""

        def repeat() -> None:
            with contextlib.suppress(HyphaError):
                while not self._closed.wait(self.silence_s / 5):
                    self.send("alive")

        threading.Thread(target=repeat, name="bridge-life", daemon=True).start()

    def refuse(self, error: HyphaError) -> None:
        """Send the other side the error in one of its messages, and close the connection."""
        with contextlib.suppress(HyphaError), self._closing():
            raise error

    def send(self, content: str, message: Any = None) -> None:
        """Send a message; None: an empty message of that kind.

        Raises:
            BridgeError: the other side is gone, or doesn't receive.

        """
        with self._closing(receiving=False), self._send_lock:
            self._write(content, message)

    def send_file(self, path: str) -> None:
        """Send a file of the attached work directory to the same path in the other side's.

        Raises:
            BridgeError: as `send`; or it is no longer a regular file.

        """
        assert self._directory is not None
        with self._closing(receiving=False), self._send_lock, self._directory.open(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            self._write("file", pb.File(path=path, size=size_bytes))
            buffer = memoryview(bytearray(min(MAX_PART, size_bytes)))
            while size_bytes:
                length = file.readinto(buffer[:size_bytes])
                if not length:
                    raise BridgeError("PATH004", f"{path} has become shorter")
                self._frames.write(buffer[:length], HEADER_S + length / MIN_RATE)
                size_bytes -= length

    def receive(self) -> tuple[str, Any]:
        """Receive the other side's next message and its name. Signs of life are skipped; files are stored.

        Raises:
            AuthenticationError, BridgeError: the other side reports an error, is gone or silent, or breaks the
            protocol.

        """
        with self._closing():
            while True:
                content, message = self._read(self.silence_s, MAX_MESSAGE)
                match content:
                    case "alive":
                        pass
                    case "file":
                        self._receive_file(message.path, message.size)
                    case _:
                        return content, message

    def close(self) -> None:
        """Close the connection, also for a thread that is receiving; may be called twice."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    # ── the beginning ─────────────────────────────────────────────────────────────────────────────────────────────

    def _authenticate_trainer(self, silence_s: float) -> None:
        _, hello = self._read(GREETING_S, MAX_GREETING)
        session = secrets.token_bytes(SESSION)
        nonce = secrets.token_bytes(NONCE)
        self._write("challenge", pb.Challenge(session=session, nonce=nonce))
        _, answer = self._read(GREETING_S, MAX_GREETING)
        if not proves(answer.proof, prove(self._token, "trainer", session, nonce, hello.nonce)):
            raise _token_error("trainer")
        proof = prove(self._token, "driver", session, nonce, hello.nonce)
        self._write("welcome", pb.Welcome(proof=proof, silence_s=silence_s))
        self.peer = hello.name
        self.shares_files = hello.shares_files
        self.silence_s = silence_s

    def _authenticate_driver(self, name: str, shares_files: bool) -> None:
        nonce = secrets.token_bytes(NONCE)
        self._write("hello", pb.Hello(name=name, nonce=nonce, shares_files=shares_files))
        _, challenge = self._read(GREETING_S, MAX_GREETING)
        proof = prove(self._token, "trainer", challenge.session, challenge.nonce, nonce)
        self._write("authenticate", pb.Authenticate(proof=proof))
        _, welcome = self._read(GREETING_S, MAX_GREETING)
        if not proves(welcome.proof, prove(self._token, "driver", challenge.session, challenge.nonce, nonce)):
            raise _token_error("driver")
        self.shares_files = shares_files
        self.silence_s = welcome.silence_s

    # ── frames ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _write(self, content: str, message: Any) -> None:
        if message is None:
            message = _MESSAGES[content]()
        body = self._conversation.wrap(content, message)
        self._frames.write(body, self.silence_s)

    def _read(self, patience_s: float, limit: int) -> tuple[str, Any]:
        content, message = self._conversation.unwrap(self._frames.read(limit, patience_s))
        if content == "error":
            error_class = AuthenticationError if message.code.startswith("AUTH") else BridgeError
            other_side = self._conversation.other
            raise error_class(message.code, f"the {other_side} says: {message.text}")
        return content, message

    def _receive_file(self, path: str, size_bytes: int) -> None:
        """Receive an announced file."""
        if self._directory is None:
            raise BridgeError("PATH008", f"no files are accepted here, such as {path}")
        self._admit(path, size_bytes)
        with self._directory.create(path) as file:
            buffer = memoryview(bytearray(min(MAX_PART, size_bytes)))
            while size_bytes:
                length = self._frames.read_into(buffer[:size_bytes], self.silence_s)
                file.write(buffer[:length])
                size_bytes -= length

    @contextlib.contextmanager
    def _closing(self, receiving: bool = True) -> Iterator[None]:
        """Close the connection on any error, and send the other side the reason.

        If the other side has closed the connection during a send, its last message with the reason is still read.
        """
        try:
            yield
        except HyphaError as error:
            if error.code not in ("FRM003", "FRM008") and self._send_lock.acquire(timeout=1.0):
                with contextlib.suppress(HyphaError):
                    self._write("error", pb.Error(**complaint(error)))
                self._send_lock.release()
            if receiving or error.code != "FRM008":
                self.close()
            raise
        except BaseException:
            self.close()
            raise


def _token_error(side: str) -> AuthenticationError:
    return AuthenticationError("AUTH002", f"the {side} has another token", fix="give both sides the same one")


def _nothing(path: str, size_bytes: int) -> None:
    pass


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
        self._lock = threading.Lock()
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
        with self._lock:
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
                time.sleep(PACE_S)  # The connection ended before it was accepted, or no descriptors are left.
                continue
            with self._lock:
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
        with self._lock:
            if self._closed:
                channel.close()
            else:
                self._admitted.put(channel)

    @contextlib.contextmanager
    def _counted_as_stranger(self, stream: socket.socket) -> Iterator[None]:
        """Count a connection as unauthenticated meanwhile."""
        with self._lock:
            self._strangers.append(stream)
            if self._closed:
                _hang_up(stream)
        try:
            yield
        finally:
            with self._lock:
                self._strangers.remove(stream)


def _hang_up(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
