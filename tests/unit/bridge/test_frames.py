"""Frames on a byte stream: whole whatever the cuts, and never waited for without a limit."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest

from hypha_ray.bridge import access as f
from hypha_ray.errors import BridgeError
from tests.support.bridging import Script, frame, sockets


def read(*chunks: bytes, limit: int = f.MAX_MESSAGE, ends: bool = True) -> bytes:
    return bytes(f.Frames(Script(*chunks, ends=ends)).read(limit, 1.0))


def test_frame_is_length_and_crc_32_in_big_endian_before_the_body() -> None:
    stream = Script()
    f.Frames(stream).write(b"123456789", 1.0)
    assert bytes(stream.sent) == bytes.fromhex("00000009 cbf43926") + b"123456789"


@pytest.mark.parametrize("size", [1, 7, 8, 1024, f.MAX_MESSAGE, f.MAX_MESSAGE + 1, f.MAX_PART])
def test_what_was_written_is_read(size: int) -> None:
    body = random.Random(size).randbytes(size)
    with sockets() as (here, there):
        writing = threading.Thread(target=f.Frames(here).write, args=(body, 5.0))
        writing.start()
        assert bytes(f.Frames(there).read(f.MAX_PART, 5.0)) == body
        writing.join()


def test_two_frames_cut_at_any_two_bytes_are_the_same_frames() -> None:
    data = frame(b"one") + frame(b"another")
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            reader = f.Frames(Script(data[:first], data[first:second], data[second:]))
            assert [bytes(reader.read(100, 1.0)) for _ in range(2)] == [b"one", b"another"]


def test_read_into_puts_the_body_in_its_place_and_leaves_the_rest_alone() -> None:
    target = bytearray(b"." * 8)
    assert f.Frames(Script(frame(b"body"))).read_into(memoryview(target), 1.0) == 4
    assert target == b"body...."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "FRM008"),
        (frame(b"body")[:3], "FRM008.*half a frame"),
        (frame(b"body")[:-1], "FRM008.*half a frame"),
        (frame(b"body", length=0), "FRM002.*got 0"),
        (frame(b"body", length=65537), "FRM001"),
        (frame(b"body", length=2**32 - 1), "FRM001"),
        (frame(b"body", checksum=1), "FRM004.*CRC-32 00000001"),
        (b"GET / HTTP/1.1\r\n\r\n", "FRM001.*hypha-bridge 1.*HTTP"),
        (b"POST /run HTTP/1.1\r\n\r\n", "FRM001.*HTTP"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "FRM001.*SSH"),
        (bytes.fromhex("16030100c6010000"), "FRM001.*TLS"),
        (b"EHLO localhost\r\n", "FRM001.*EHLO"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(BridgeError, match=message):
        read(data)


@pytest.mark.parametrize("cut", range(8))
def test_silence_in_a_header_is_not_waited_for(cut: int) -> None:
    with pytest.raises(BridgeError, match=r"FRM003"):
        read(frame(b"body")[:cut], ends=False)


def test_length_above_the_limit_after_a_good_frame_is_refused_as_a_length() -> None:
    reader = f.Frames(Script(frame(b"one") + frame(b"x", length=10**9)))
    reader.read(100, 1.0)
    with pytest.raises(BridgeError, match=r"FRM002.*allowed 1 … 100"):
        reader.read(100, 1.0)


def test_every_flipped_bit_is_found() -> None:
    good = frame(b"a message")
    for bit in range(32, 8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BridgeError, match=r"FRM004"):
            read(bytes(bad))


@pytest.mark.timeout(20)
def test_silent_and_slow_peers_are_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f, "HEADER_S", 0.2)
    for data, limit_s in ((b"", 0.1), (frame(b"body")[:1], 0.2), (frame(b"body")[:9], 0.2)):
        with sockets() as (here, there):
            here.sendall(data)
            began = time.monotonic()
            with pytest.raises(BridgeError, match=r"FRM003"):
                f.Frames(there).read(100, 0.1)
            assert time.monotonic() - began >= limit_s


def test_trickle_is_given_up_although_something_always_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f, "HEADER_S", 0.3)
    ended = threading.Event()

    def trickle(stream: socket.socket) -> None:
        for byte in frame(b"x" * 1000):
            if not ended.wait(0.02):
                stream.sendall(bytes([byte]))

    with sockets() as (here, there):
        threading.Thread(target=trickle, args=(here,), daemon=True).start()
        with pytest.raises(BridgeError, match=r"FRM003"):
            f.Frames(there).read(2000, 1.0)
        ended.set()
        time.sleep(0.05)


def test_peer_that_takes_nothing_is_given_up_in_time() -> None:
    with sockets() as (here, _), pytest.raises(BridgeError, match=r"FRM003.*received no message for 0.2 s"):
        f.Frames(here).write(bytes(f.MAX_PART), 0.2)


def test_peer_that_is_gone_is_told_when_writing() -> None:
    with sockets() as (here, there):
        there.close()
        with pytest.raises(BridgeError, match=r"FRM008"):
            f.Frames(here).write(bytes(f.MAX_PART), 1.0)
