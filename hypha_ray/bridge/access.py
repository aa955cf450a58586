"""Access to a driver, by tokens, addresses and TLS, and the frames of messages and files on its connections.

An address is ``host:port``, ``[IPv6]:port`` or ``unix:PATH``. A token is never sent over the connection: each side
proves to have it.

A frame of the byte stream:

    length of the body (4 bytes, big-endian) · CRC-32 of the body (4 bytes, big-endian) · body

A reader never waits without a limit, and never allocates more than the allowed length.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import ssl
import stat
import struct
import time
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from hypha_ray.errors import AuthenticationError, BridgeError, ClusterError, ConfigError

try:
    from isal.isal_zlib import crc32  # Optional; ten times as fast.
except ImportError:
    from zlib import crc32

Side: TypeAlias = Literal["driver", "trainer"]

NONCE = 32
"""Size of a nonce in bytes."""
SESSION = 16
"""Size of a session id in bytes."""
_TOKEN_FORM = re.compile(rb"[0-9a-f]{64}\n?")
_TOKEN_FIX = "give the file that the run has written, readable by its owner alone: chmod 600"
UNIX = "unix:"
_BACKLOG = 64
_FORM = "host:port, [IPv6]:port or unix:PATH"
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


def make_token(path: Path) -> bytes:
    """Write a new token of 256 bits to a new file that only its owner can read; returns the token."""
    token = secrets.token_hex(32).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(token + b"\n")
    return token


def read_token(path: Path) -> bytes:
    """Read a token from a file.

    Raises:
        AuthenticationError: AUTH010 no such file, AUTH011 others may read it, AUTH012 not a token.

    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(128)
    except OSError as error:
        raise AuthenticationError("AUTH010", f"{path}: no token", error.strerror or "", fix=_TOKEN_FIX) from None
    if mode & 0o077:
        raise AuthenticationError("AUTH011", f"{path}: others may read this token", f"{mode:04o}", "0600", _TOKEN_FIX)
    if not _TOKEN_FORM.fullmatch(content):
        raise AuthenticationError("AUTH012", f"{path}: not a token", allowed="64 hexadecimal digits", fix=_TOKEN_FIX)
    return content.strip()


def prove(token: bytes, side: Side, session: bytes, driver_nonce: bytes, trainer_nonce: bytes) -> bytes:
    """Proof that a side has the token: HMAC-SHA256 of its name and both nonces (RFC 2104)."""
    signed = b"hypha-bridge 1 " + side.encode() + session + driver_nonce + trainer_nonce
    return hmac.new(token, signed, hashlib.sha256).digest()


def proves(proof: bytes, expected: bytes) -> bool:
    """Whether a proof is the expected one, compared in constant time."""
    return hmac.compare_digest(proof, expected)


def open_listener(address: str, encrypted: bool) -> socket.socket:
    """A socket that listens at an address; only its owner can use one in the file system.

    Args:
        address: address to listen at; port 0 means any free one, and the path of a Unix socket must not exist yet.
        encrypted: whether its connections are encrypted.

    Raises:
        ConfigError: CFG020 not an address, SEC001 it would listen to the network without TLS.
        ClusterError: NET001 the address isn't available.

    """
    try:
        if address.startswith(UNIX):
            path = address.removeprefix(UNIX)
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(path)
            Path(path).chmod(0o600)  # No process can connect before it listens.
            listening.listen(_BACKLOG)
            return listening
        host, port = split(address, encrypted)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        problem = f"the bridge can't listen on {address}"
        raise ClusterError("NET001", problem, error.strerror or str(error), fix="choose another address") from None


def remove_socket_file(address: str) -> None:
    """Remove the file of a closed Unix socket."""
    if address.startswith(UNIX):
        file = Path(address.removeprefix(UNIX))
        file.unlink(missing_ok=True)


def address_of(listening: socket.socket) -> str:
    """The address that a socket listens on."""
    name = listening.getsockname()
    if isinstance(name, str):
        return UNIX + name
    host, port = name[:2]
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}"


def dial(address: str, tls: ssl.SSLContext | None = None, timeout_s: float = 10.0) -> socket.socket:
    """Connect to a listener.

    Args:
        address: address of the listener.
        tls: trusted authorities; required except on this machine.
        timeout_s: longest wait in seconds.

    Raises:
        ConfigError: CFG020 not an address, SEC001 it would connect to another machine without TLS.
        BridgeError: NET010 no process listens there, NET011 it can't prove its identity.

    """
    stream: socket.socket | None = None
    try:
        if address.startswith(UNIX):
            stream = socket.socket(socket.AF_UNIX)
            stream.settimeout(timeout_s)
            stream.connect(address.removeprefix(UNIX))
            return stream
        host, port = split(address, tls is not None)
        stream = socket.create_connection((host, port), timeout_s)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            return stream
        return tls.wrap_socket(stream, server_hostname=host)
    except OSError as error:
        if stream is not None:
            stream.close()
        if isinstance(error, ssl.SSLError):
            problem = f"{address} can't prove its identity"
            fix = "give its certificate authority"
            raise BridgeError("NET011", problem, error.reason or str(error), fix=fix) from None
        problem = f"no process can be reached at {address}"
        raise BridgeError("NET010", problem, error.strerror or str(error), fix="is the run still active?") from None


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.3 of a listener.

    Args:
        certificate: certificate chain, PEM.
        key: private key of the certificate, PEM.

    Raises:
        ConfigError: SEC005 they can't be used.

    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise _tls_error(f"certificate {certificate} with key {key}", error) from None
    return context


def client_tls(authority: Path | None) -> ssl.SSLContext:
    """TLS 1.3 of the side that dials.

    Args:
        authority: trusted certificates, PEM; None: those of the system.

    Raises:
        ConfigError: SEC005 they can't be used.

    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        if authority is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise _tls_error(f"certificates {authority}", error) from None
    return context


def split(address: str, encrypted: bool) -> tuple[str, int]:
    """Host and port of an address, if it may be used.

    Raises:
        ConfigError: CFG020 not an address, SEC001 another machine's without encryption.

    """
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (separator and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError("CFG020", "not an address", address, _FORM)
    if not encrypted and not _is_loopback(host):
        fix = "give the run a certificate (bridge.certificate, bridge.key) and its trainers the authority"
        raise ConfigError(
            "SEC001", "the bridge connects to other machines only by TLS", address, "a loopback address", fix
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _tls_error(files: str, error: OSError) -> ConfigError:
    return ConfigError("SEC005", f"{files} can't be used", error.strerror or str(error), "PEM files")


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
        first_bytes = self._receive_some(
            self._header[:1], time.monotonic() + patience_s, f"it sent nothing for {patience_s:g} s"
        )
        if not first_bytes:
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

    def _receive_some(self, target: memoryview, deadline: float, problem: str) -> int:
        """Receive at least one byte; returns the number of bytes, 0 at the end of the stream."""
        try:
            timeout_s = deadline - time.monotonic()
            self._stream.settimeout(max(timeout_s, 1e-3))
            return self._stream.recv_into(target)
        except TimeoutError:
            raise BridgeError("FRM003", problem) from None
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


def _closed(reason: str | None = None) -> BridgeError:
    return BridgeError("FRM008", "the other side has closed the connection", got=reason or "")
