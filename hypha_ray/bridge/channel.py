"""One connection of the bridge, for messages and files in both directions; the same on both sides.

Frames, which delimit messages and files in a byte stream.

    length of the body (4 bytes, big-endian) · CRC-32 of the body (4 bytes, big-endian) · body

A reader never waits without a limit, and never allocates more than the allowed length.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.access import NONCE, SESSION, Side, prove, proves
from hypha_ray.bridge.conversation import Conversation, complaint
from hypha_ray.bridge.paths import WorkDirectory
from hypha_ray.errors import AuthenticationError, BridgeError, HyphaError

try:
    from isal.isal_zlib import crc32  # Optional; ten times as fast.
except ImportError:
    from zlib import crc32

MAX_GREETING = 1024
"""Largest message in bytes before the other side is authenticated."""
MAX_MESSAGE = 1 << 16
MAX_PART = 1 << 20
"""Largest part of a file in bytes."""
HEADER_S = 5.0
"""Seconds for the rest of a header, after its first byte."""
MIN_RATE = 1 << 16
"""Lowest allowed rate of a body in bytes per second."""
_HEADER = struct.Struct(">II")
_CHECKED_BYTES = 1 << 18
"""Bytes that are checked at once, while they are still in the processor's cache."""
_OTHER_PROTOCOLS = {
    b"GET ": "HTTP",
    b"POST": "HTTP",
    b"HEAD": "HTTP",
    b"PUT ": "HTTP",
    b"SSH-": "SSH",
    b"\x16\x03": "TLS",
}
GREETING_S = 10.0
"""Longest wait in seconds for the other side's next message before it is authenticated."""


class Stream(Protocol):
    """Methods of a socket that frames use."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receive available bytes into a buffer; returns their number, 0 at the end."""

    def sendall(self, data: bytes | memoryview, /) -> None:
        """Send all bytes."""

    def settimeout(self, seconds: float | None, /) -> None:
        """Set the longest wait of the following calls; None: unlimited."""


class Frames:
    """Reads and writes the frames of one connection. One thread may read while another one writes.

    Args:
        stream: a connected socket.

    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._header = memoryview(bytearray(_HEADER.size))
        self._is_first_frame = True

    def read(self, limit: int, patience_s: float) -> memoryview:
        """Read the body of the next frame into new memory.

        Args:
            limit: longest accepted body in bytes.
            patience_s: longest wait for the first byte in seconds.

        Raises:
            BridgeError: FRM001 another protocol, FRM002 a forbidden length, FRM003 too slow, FRM004 damaged, FRM008 the
                other side has closed the connection.

        """
        length, checksum = self._read_header(limit, patience_s)
        body = memoryview(bytearray(length))
        self._read_body(body, checksum)
        return body

    def read_into(self, target: memoryview, patience_s: float) -> int:
        """Read the next frame's body into the beginning of `target`, whose size is the limit; returns its length.

        Raises:
            BridgeError: as `read`.

        """
        length, checksum = self._read_header(len(target), patience_s)
        self._read_body(target[:length], checksum)
        return length

    def write(self, body: bytes | memoryview, deadline_s: float) -> None:
        """Send a frame within `deadline_s` seconds.

        Raises:
            BridgeError: FRM003 the other side doesn't receive it, FRM008 it has closed the connection.

        """
        header = _HEADER.pack(len(body), crc32(body))
        try:
            self._stream.settimeout(deadline_s)
            if len(body) <= MAX_MESSAGE:
                self._stream.sendall(header + bytes(body))
            else:
                self._stream.sendall(header)
                self._stream.sendall(body)
        except TimeoutError:
            raise BridgeError("FRM003", f"the other side received no message for {deadline_s:g} s") from None
        except OSError as error:
            raise _closed(error.strerror) from None

    def _read_header(self, limit: int, patience_s: float) -> tuple[int, int]:
        """Length and checksum of the next body."""
        first = self._receive_some(
            self._header[:1], time.monotonic() + patience_s, f"it sent nothing for {patience_s:g} s"
        )
        if not first:
            raise _closed()
        self._fill(self._header[1:], time.monotonic() + HEADER_S)
        length, checksum = _HEADER.unpack(self._header)
        if not 0 < length <= limit:
            raise self._wrong_length(length, limit)
        self._is_first_frame = False
        return length, checksum

    def _read_body(self, target: memoryview, checksum: int) -> None:
        deadline = time.monotonic() + HEADER_S + len(target) / MIN_RATE
        crc = 0
        for start in range(0, len(target), _CHECKED_BYTES):
            part = target[start : start + _CHECKED_BYTES]
            self._fill(part, deadline)
            crc = crc32(part, crc)
        if crc != checksum:
            raise BridgeError("FRM004", "a frame is damaged", got=f"{crc:08x}", allowed=f"CRC-32 {checksum:08x}")

    def _fill(self, target: memoryview, deadline: float) -> None:
        """Fill `target`."""
        while target:
            count = self._receive_some(target, deadline, "a frame arrives too slowly")
            if not count:
                raise _closed("half a frame")
            target = target[count:]

    def _receive_some(self, target: memoryview, deadline: float, complaint: str) -> int:
        """Receive at least one byte; returns the number of bytes, 0 at the end of the stream."""
        try:
            timeout_s = deadline - time.monotonic()
            self._stream.settimeout(max(timeout_s, 1e-3))
            return self._stream.recv_into(target)
        except TimeoutError:
            raise BridgeError("FRM003", complaint) from None
        except OSError as error:
            raise _closed(error.strerror) from None

    def _wrong_length(self, length: int, limit: int) -> BridgeError:
        start = bytes(self._header)
        if self._is_first_frame and length > MAX_MESSAGE:
            protocol = repr(start)
            for first_bytes, name in _OTHER_PROTOCOLS.items():
                if start.startswith(first_bytes):
                    protocol = name
            fix = "connect with a client of the bridge, see docs/bridge.md"
            return BridgeError("FRM001", "this port speaks hypha-bridge 1", got=protocol, fix=fix)
        return BridgeError("FRM002", "the length of a frame", got=str(length), allowed=f"1 … {limit}")


def _closed(why: str | None = None) -> BridgeError:
    return BridgeError("FRM008", "the other side has closed the connection", got=why or "")


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
        self._sending = threading.Lock()
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
        with self._closing(receiving=False), self._sending:
            self._write(content, message)

    def send_file(self, path: str) -> None:
        """Send a file of the attached work directory to the same path in the other side's.

        Raises:
            BridgeError: as `send`; or it is no longer a regular file.

        """
        assert self._directory is not None
        with self._closing(receiving=False), self._sending, self._directory.open(path) as file:
            size = os.fstat(file.fileno()).st_size
            self._write("file", pb.File(path=path, size=size))
            buffer = memoryview(bytearray(min(MAX_PART, size)))
            while size:
                length = file.readinto(buffer[:size])
                if not length:
                    raise BridgeError("PATH004", f"{path} has become shorter")
                self._frames.write(buffer[:length], HEADER_S + length / MIN_RATE)
                size -= length

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

    def _receive_file(self, path: str, size: int) -> None:
        """Receive an announced file."""
        if self._directory is None:
            raise BridgeError("PATH008", f"no files are accepted here, such as {path}")
        self._admit(path, size)
        with self._directory.create(path) as file:
            buffer = memoryview(bytearray(min(MAX_PART, size)))
            while size:
                length = self._frames.read_into(buffer[:size], self.silence_s)
                file.write(buffer[:length])
                size -= length

    @contextlib.contextmanager
    def _closing(self, receiving: bool = True) -> Iterator[None]:
        """Close the connection on any error, and send the other side the reason.

        If the other side has closed the connection during a send, its last message with the reason is still read.
        """
        try:
            yield
        except HyphaError as error:
            if error.code not in ("FRM003", "FRM008") and self._sending.acquire(timeout=1.0):
                with contextlib.suppress(HyphaError):
                    self._write("error", pb.Error(**complaint(error)))
                self._sending.release()
            if receiving or error.code != "FRM008":
                self.close()
            raise
        except BaseException:
            self.close()
            raise


def _token_error(side: str) -> AuthenticationError:
    return AuthenticationError("AUTH002", f"the {side} has another token", fix="give both sides the same one")


def _nothing(path: str, size: int) -> None:
    pass
