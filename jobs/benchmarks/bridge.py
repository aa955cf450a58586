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

from hypha_ray.bridge.addresses import dial, name_of
from hypha_ray.bridge.channel import Channel
from hypha_ray.bridge.frames import MAX_PART, Frames
from hypha_ray.bridge.listener import Listener
from hypha_ray.bridge.paths import WorkDirectory

TURNS = 20
MESSAGE = 16 << 20
"""Bytes that are received as a message."""
FILE = 128 << 20
"""Bytes that go over the bridge as a file, from memory to memory."""
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
    """Time to receive 16 MiB in frames ÷ that of `recv_into`; rate of a file ÷ that of bytes on a bare socket."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as scratch,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        folder = Path(scratch)
        listener = Listener("127.0.0.1:0", _TOKEN, WAIT_S)
        order, theirs = get_context("spawn").Pipe()
        arguments = theirs, name_of(listening), listener.address, str(folder / "theirs")
        sender = get_context("spawn").Process(target=_send, args=arguments)
        (folder / "theirs").mkdir()
        sender.start()
        stream, _ = listening.accept()
        channel = listener.admit(WAIT_S)
        assert channel is not None
        channel.attach(WorkDirectory(folder), lambda path, size: None)
        received = _median(order, "message", lambda: _bare(stream, MESSAGE), lambda: _framed(stream))
        sent = _median(order, "file", lambda: _bare(stream, FILE), lambda: _file(channel, folder / _NAME))
        order.send("end")
        sender.join()
        listener.close()
    return {
        "bridge_receive": {"value": 1 / received, "target": "<= 1.5", "MiB": MESSAGE >> 20, "turns": TURNS},
        "bridge_throughput": {"value": sent, "target": ">= 0.6", "MiB": FILE >> 20, "turns": TURNS},
    }


def _median(order: Connection, what: str, bare: Callable[[], None], ours: Callable[[], None]) -> float:
    """Median time of bare bytes ÷ that of ours, in turn; the first of each doesn't count."""
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(1 + TURNS):
        for way, receive in (("bare", bare), ("ours", ours)):
            began = time.perf_counter()
            order.send((what, way))
            receive()
            times[way].append(time.perf_counter() - began)
    return median(times["bare"][1:]) / median(times["ours"][1:])


def _bare(stream: socket.socket, size: int) -> None:
    body = memoryview(bytearray(size))
    while body:
        body = body[stream.recv_into(body) :]


def _framed(stream: socket.socket) -> None:
    frames, body = Frames(stream), memoryview(bytearray(MESSAGE))
    while body:
        body = body[frames.read_into(body[:MAX_PART], WAIT_S) :]
    stream.settimeout(None)


def _file(channel: Channel, path: Path) -> None:
    channel.hear()
    path.unlink()


def _send(order: Connection, plain: str, address: str, folder: str) -> None:
    """Send what is ordered, from memory."""
    stream, channel = dial(plain), Channel(dial(address), "trainer", _TOKEN)
    stream.settimeout(None)
    channel.greet("bench")
    directory = Path(folder)
    channel.attach(WorkDirectory(directory), lambda path, size: None)
    (directory / _NAME).write_bytes(bytes(range(256)) * (FILE // 256))
    recorder = Recorder()
    for _ in range(0, MESSAGE, MAX_PART):
        Frames(recorder).write(bytes(range(256)) * (MAX_PART // 256), WAIT_S)
    bare = {"message": bytes(MESSAGE), "file": (directory / _NAME).read_bytes()}
    while (what := order.recv()) != "end":
        match what:
            case (name, "bare"):
                stream.sendall(bare[name])
            case ("message", _):
                stream.sendall(recorder.data)
            case _:
                channel.send_file(_NAME)
                channel.say("left")
