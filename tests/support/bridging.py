"""What tests of the bridge share: connections without a network, and bytes from hand."""

from __future__ import annotations

import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypha_ray.bridge.bridge_pb2 import Envelope
from hypha_ray.bridge.channel import Channel

TOKEN = b"5" * 64


def frame(body: bytes, length: int | None = None, checksum: int | None = None) -> bytes:
    """A frame, whose header may lie."""
    return (
        struct.pack(">II", len(body) if length is None else length, zlib.crc32(body) if checksum is None else checksum)
        + body
    )


class Script:
    """A stream without a network: it gives these chunks one after the other, then it ends or is silent."""

    def __init__(self, *chunks: bytes, ends: bool = True) -> None:
        self._chunks, self._ends = [chunk for chunk in chunks if chunk], ends
        self.sent = bytearray()

    def recv_into(self, buffer: memoryview) -> int:
        if not self._chunks:
            if self._ends:
                return 0
            raise TimeoutError
        chunk = self._chunks[0]
        size = min(len(chunk), len(buffer))
        buffer[:size] = chunk[:size]
        self._chunks[:1] = [chunk[size:]] if chunk[size:] else []
        return size

    def sendall(self, data: bytes | memoryview) -> None:
        self.sent += data

    def settimeout(self, seconds: float | None) -> None:
        assert seconds is not None and seconds > 0


def envelope(sequence: int, session: bytes = b"", version: int = 1, **content: Any) -> bytes:
    return Envelope(version=version, sequence=sequence, session=session, **content).SerializeToString()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at the same time; returns what each of them gave or raised."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return results


@contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@contextmanager
def channels(silence_s: float = 5.0, shares_files: bool = False) -> Iterator[tuple[Channel, Channel]]:
    """A driver and a trainer that have greeted each other."""
    with sockets() as (here, there):
        driver, trainer = Channel(here, "driver", TOKEN), Channel(there, "trainer", TOKEN)
        greetings = together(
            lambda: driver.greet(silence_s=silence_s), lambda: trainer.greet("test", shares_files=shares_files)
        )
        assert greetings == [None, None]
        yield driver, trainer
