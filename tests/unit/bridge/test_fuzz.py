"""Two hundred thousand damaged frames and connections: each ends in an error that is ours, soon, and takes no memory.

A failing one prints its seed: ``walk(SEED)`` repeats it.
"""

from __future__ import annotations

import contextlib
import math
import random
import resource
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.access import MAX_MESSAGE, Frames, dial
from hypha_ray.bridge.channel import Channel, Listener
from hypha_ray.bridge.conversation import Conversation
from hypha_ray.bridge.paths import WorkDirectory
from hypha_ray.errors import HyphaError
from tests.support.bridging import TOKEN, Script, envelope, frame, sockets, together

WALKS = 200_000
CONNECTIONS = 600
LONGEST_S = 1.0
"""CPU time for a message to be refused."""
SERVED_S = 4.0
"""For a good trainer to be let in: less than a stranger that says nothing may take, and than any silence."""
MAX_GROWTH = 64 << 20
"""Bytes of memory."""
SESSION = b"s" * 16
CONTENT = pb.Content(size=10, sha256=b"5" * 32)
OF_TRAINER = [
    {"ready": pb.Ready(device="cpu", parameters=1000)},
    {"merged": pb.Merged(round=3, seconds=0.1)},
    {"metrics": pb.MetricSet(items={"loss": 2.3, "learning_rate": 1e-3}, data_processed=64, local_round=3)},
    {"evaluation": pb.Evaluation(round=3, loss_sum=12.5, count=100, correct=17)},
    {"update": pb.Update(round=3, update=pb.WeightUpdate(model_path="a/b"), content=CONTENT, samples=8, batches=1)},
    {"file": pb.File(path="updates/x", size=1000)},
    {"alive": pb.Alive()},
    {"error": pb.Error(code="X1", text="oh")},
    {"left": pb.Left()},
]
GREETING = {"hello": pb.Hello(name="test", nonce=b"n" * 32)}
Mutation = Callable[[random.Random, bytearray], None]


def flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 1, 3, 20))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 1, 127, 128, 255))


def cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def drop(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.randrange(1, 9)]


def insert(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = rng.randbytes(rng.randrange(1, 40))


def repeat(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data))
    part = data[start : start + rng.randrange(1, 40)]
    data[start:start] = part * rng.choice((1, 2, 50))


def extreme(rng: random.Random, data: bytearray) -> None:
    """A number at the end of its range: infinite, not a number, or the least integer."""
    start = rng.randrange(len(data))
    least = b"\x80" * 9 + b"\x01"
    value = rng.choice((struct.pack("<d", math.inf), struct.pack("<d", math.nan), least))
    data[start : start + len(value)] = value


def noise(rng: random.Random, data: bytearray) -> None:
    data[:] = rng.randbytes(rng.randrange(1, 200))


MUTATIONS: list[Mutation] = [flip, overwrite, cut, drop, insert, repeat, extreme, noise]
BODIES = [envelope(1, SESSION, **content) for content in OF_TRAINER]
HELLO = envelope(1, **GREETING)


def walk(seed: int) -> str:
    """Let a driver read a good message and a damaged one; returns the code of the error that came of it."""
    rng = random.Random(seed)
    driver = Conversation("driver")
    if rng.random() < 0.8:  # Both have proved who they are.
        driver._opening.clear()
        driver.session = SESSION
        body = bytearray(BODIES[rng.randrange(len(BODIES))])
    else:
        body = bytearray(HELLO)
    if rng.random() < 0.7:  # The frame is good, its content isn't.
        rng.choice(MUTATIONS)(rng, body)
        data = bytearray(frame(bytes(body)))
    else:
        data = bytearray(frame(bytes(body)))
        rng.choice(MUTATIONS)(rng, data)
    data += frame(envelope(rng.choice((1, 2, 3)), SESSION, alive=pb.Alive()))
    edge = rng.randrange(len(data))
    frames = Frames(Script(bytes(data[:edge]), bytes(data[edge:]), ends=rng.random() < 0.5))
    try:
        while True:
            driver.unwrap(frames.read(MAX_MESSAGE, 1.0))
    except HyphaError as error:
        str(error)
        return error.code


@pytest.mark.slow
def test_damaged_frames_end_in_errors_of_ours_soon_and_take_no_memory() -> None:
    codes: dict[str, int] = {}
    before, slowest = _memory(), 0.0
    for seed in range(WALKS):
        began = time.process_time()
        try:
            code = walk(seed)
        except BaseException as error:
            raise AssertionError(f"walk({seed}): {type(error).__name__}: {error}") from error
        codes[code] = codes.get(code, 0) + 1
        slowest = max(slowest, time.process_time() - began)
    assert slowest < LONGEST_S and _memory() - before < MAX_GROWTH
    assert set(codes) >= {f"FRM00{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8)} | {"AUTH001", "AUTH003", "AUTH004"}
    assert set(codes) >= {"MSG001", "MSG002", "MSG003", "MSG004", "PATH001"}


class Split:
    """A socket from which nothing is received across a place in the stream; or one byte at a time."""

    def __init__(self, stream: socket.socket, place: int | None) -> None:
        self._stream, self._place, self.received = stream, place, 0

    def recv_into(self, buffer: memoryview) -> int:
        size = len(buffer)
        if self._place is None:
            size = 1
        elif self.received < self._place:
            size = min(size, self._place - self.received)
        got = self._stream.recv_into(buffer[:size])
        self.received += got
        return got

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def converse(place: int | None, folder: Path) -> tuple[int, int]:
    """A whole conversation, split there on both sides; returns how many bytes each of them has received."""
    with sockets() as ends:
        here, there = (Split(end, place) for end in ends)
        driver, trainer = Channel(here, "driver", TOKEN), Channel(there, "trainer", TOKEN)  # type: ignore[arg-type]

        def drive() -> list[str]:
            driver.greet(silence_s=5.0)
            directory = WorkDirectory(folder / "driver")
            driver.attach(directory, lambda path, size: None)
            driver.send("parameters", pb.Parameters(update=pb.WeightUpdate(model_path="a"), content=CONTENT))
            heard = [driver.receive()[0] for _ in range(3)]
            file = directory.path / "updates" / "x"
            assert file.read_bytes() == b"weights"
            file.unlink()
            directory.close()
            return heard

        def train() -> str:
            trainer.greet("test")
            directory = WorkDirectory(folder / "trainer")
            trainer.attach(directory, lambda path, size: None)
            word, _ = trainer.receive()
            trainer.send("metrics", OF_TRAINER[2]["metrics"])
            trainer.send_file("updates/x")
            trainer.send("update", OF_TRAINER[4]["update"])
            trainer.send("left")
            directory.close()
            return word

        assert together(drive, train) == [["metrics", "update", "left"], "parameters"]
        return here.received, there.received


@pytest.mark.slow
def test_whole_conversation_may_be_split_at_every_byte(tmp_path: Path) -> None:
    for side in ("driver", "trainer"):
        (tmp_path / side / "updates").mkdir(parents=True)
    (tmp_path / "trainer" / "updates" / "x").write_bytes(b"weights")
    longest = max(converse(None, tmp_path))
    for place in range(1, longest):
        assert max(converse(place, tmp_path)) == longest


@pytest.mark.slow
def test_damaged_connections_keep_nobody_from_being_served() -> None:
    """Random bytes, silence, half greetings, hanging up: and every now and then a trainer that has the token."""
    listener = Listener("127.0.0.1:0", TOKEN, silence_s=5.0)
    rng, held = random.Random(7), []
    before, descriptors = _memory(), _descriptors()
    try:
        for number in range(CONNECTIONS):
            stream = dial(listener.address)
            data = bytearray(frame(HELLO))
            rng.choice(MUTATIONS)(rng, data)
            with contextlib.suppress(OSError):
                stream.sendall(data)
            if rng.random() < 0.5:
                held.append(stream)  # It says no more, and stays.
            else:
                stream.close()
            if number % 50 == 49:
                serve_one(listener)
            if len(held) > 100:
                held.pop(0).close()
    finally:
        for stream in held:
            stream.close()
        listener.close()
    deadline = time.monotonic() + 5
    while _descriptors() > descriptors and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _descriptors() <= descriptors
    assert _memory() - before < MAX_GROWTH


def serve_one(listener: Listener) -> None:
    trainer = Channel(dial(listener.address), "trainer", TOKEN)
    trainer.greet("good")
    driver = listener.admit(SERVED_S)
    assert driver is not None and driver.peer == "good"
    for channel in (trainer, driver):
        channel.close()


def test_a_hundred_connections_that_hang_do_not_stop_a_good_one() -> None:
    listener = Listener("127.0.0.1:0", TOKEN, silence_s=5.0)
    loris: list[socket.socket] = []
    try:
        for _ in range(100):
            stream = dial(listener.address)
            stream.sendall(b"\0\0\0")
            loris.append(stream)
        serve_one(listener)
    finally:
        for stream in loris:
            stream.close()
        listener.close()


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
