"""Frames, which delimit messages and files in a byte stream.

    length of the body (4 bytes, big-endian) · CRC-32 of the body (4 bytes, big-endian) · body

A reader never waits without a limit, and never allocates more than the allowed length.
"""

from __future__ import annotations

import struct
import time
from typing import Protocol

from hypha_ray.errors import BridgeError

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
