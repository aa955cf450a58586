"""The bridge's bytes against those of a bare socket: the same bytes over the same loopback interface, in turn."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from hypha_ray.bridge.access import MAX_PART, Frames, address_of, dial
from hypha_ray.bridge.channel import Channel, Listener
from hypha_ray.bridge.paths import WorkDirectory

TURNS = 20
MESSAGE = 16 << 20
"""Bytes that are received as a message."""
BULK = 128 << 20
"""Bytes that are sent as they come, and as a file of a file system in memory."""
WAIT_S = 30.0
_TOKEN = b"5" * 64
_NAME = "file"


class Recorder:
    """A stream that keeps what is written to it."""

    def __init__(self) -> None:
        self.data = bytearray()

    def recv_into(self, _: memoryview) -> int:
        """Nothing comes."""
        return 0

    def sendall(self, data: bytes | memoryview) -> None:
        """Keep it."""
        self.data += data

    def settimeout(self, _: float | None) -> None:
        """It never waits."""


def bridge() -> dict[str, dict[str, Any]]:
    """Time to receive 16 MiB in frames ÷ that of `recv_into`; rates of frames and of files ÷ that of a bare socket."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as scratch,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        folder = Path(scratch)
        listener = Listener("127.0.0.1:0", _TOKEN, WAIT_S)
        order, theirs = get_context("spawn").Pipe()
        arguments = theirs, address_of(listening), listener.address, str(folder / "theirs")
        sender = get_context("spawn").Process(target=_send, args=arguments)
        (folder / "theirs").mkdir()
        sender.start()
        stream, _ = listening.accept()
        channel = listener.admit(WAIT_S)
        assert channel is not None
        channel.attach(WorkDirectory(folder), lambda path, size: None)
        message = bytearray(MESSAGE)
        bulk = bytearray(BULK)
        received = _median(order, "message", lambda: _bare(stream, message), lambda: _framed(stream, message))
        framed = _median(order, "bulk", lambda: _bare(stream, bulk), lambda: _framed(stream, bulk))
        sent = _median(order, "file", lambda: _bare(stream, bulk), lambda: _file(channel, folder / _NAME))
        order.send("end")
        sender.join()
        listener.close()
    return {
        "bridge_receive": {"value": 1 / received, "target": "<= 1.5", "MiB": MESSAGE >> 20, "turns": TURNS},
        "bridge_throughput": {"value": framed, "target": ">= 0.6", "MiB": BULK >> 20, "turns": TURNS},
        "bridge_file": {"value": sent, "target": "", "MiB": BULK >> 20, "turns": TURNS},
    }


def _median(order: Connection, name: str, bare: Callable[[], None], ours: Callable[[], None]) -> float:
    """Median time of bare bytes ÷ that of ours, in turn; the first of each doesn't count."""
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(1 + TURNS):
        for side, receive in (("bare", bare), ("ours", ours)):
            began = time.perf_counter()
            order.send((name, side))
            receive()
            times[side].append(time.perf_counter() - began)
    return median(times["bare"][1:]) / median(times["ours"][1:])


def _bare(stream: socket.socket, memory: bytearray) -> None:
    """Receive in one call, into memory that is there: the fastest way."""
    assert stream.recv_into(memory, len(memory), socket.MSG_WAITALL) == len(memory)


def _framed(stream: socket.socket, memory: bytearray) -> None:
    frames = Frames(stream)
    body = memoryview(memory)
    while body:
        body = body[frames.read_into(body[:MAX_PART], WAIT_S) :]
    stream.settimeout(None)


def _file(channel: Channel, path: Path) -> None:
    channel.receive()
    path.unlink()


def _send(order: Connection, plain: str, address: str, folder: str) -> None:
    """Send what is ordered, from memory."""
    stream = dial(plain)
    channel = Channel(dial(address), "trainer", _TOKEN)
    stream.settimeout(None)
    channel.greet("bench")
    directory = Path(folder)
    channel.attach(WorkDirectory(directory), lambda path, size: None)
    bulk = bytes(range(256)) * (BULK // 256)
    recorder = Recorder()
    ready = {"message": bulk[:MESSAGE], "bulk": bulk, "file": bulk}
    (directory / _NAME).write_bytes(bulk)
    for start in range(0, MESSAGE, MAX_PART):
        Frames(recorder).write(bulk[start : start + MAX_PART], WAIT_S)
    while (request := order.recv()) != "end":
        match request:
            case (name, "bare"):
                stream.sendall(ready[name])
            case ("message", _):
                stream.sendall(recorder.data)
            case ("bulk", _):
                for start in range(0, BULK, MAX_PART):
                    Frames(stream).write(memoryview(bulk)[start : start + MAX_PART], WAIT_S)
                stream.settimeout(None)
            case _:
                channel.send_file(_NAME)
                channel.send("left")
