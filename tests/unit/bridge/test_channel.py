"""Connections of the bridge: whole frames whatever the cuts, both sides prove who they are, and files go both ways."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypha_ray.bridge import access as f
from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.access import MAX_PART, Frames
from hypha_ray.bridge.channel import Channel
from hypha_ray.bridge.conversation import Conversation
from hypha_ray.bridge.paths import WorkDirectory
from hypha_ray.errors import AuthenticationError, BridgeError
from tests.support.bridging import TOKEN, Script, channels, envelope, frame, sockets, together

CONTENT = pb.Content(size=10, sha256=b"5" * 32)


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


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    with channels() as both:
        yield both


def test_driver_learns_who_the_trainer_is_and_trainer_learns_the_limit() -> None:
    with channels(silence_s=2.5, shares_files=True) as (driver, trainer):
        assert (driver.peer, driver.shares_files) == ("test", True)
        assert (trainer.silence_s, trainer.shares_files) == (2.5, True)


def test_messages_go_both_ways_in_order(pair: tuple[Channel, Channel]) -> None:
    driver, trainer = pair
    for number in range(5):
        trainer.send("metrics", pb.MetricSet(items={"loss": 1 / (1 + number)}, data_processed=8, local_round=number))
        driver.send("parameters", pb.Parameters(round=number, update=pb.WeightUpdate(model_path="a"), content=CONTENT))
    for number in range(5):
        content, metrics = driver.receive()
        assert (content, metrics.local_round, dict(metrics.items)) == ("metrics", number, {"loss": 1 / (1 + number)})
        content, parameters = trainer.receive()
        assert (content, parameters.round, parameters.update.model_path) == ("parameters", number, "a")


def test_signs_of_life_are_passed_over_and_keep_a_connection_up() -> None:
    with channels(silence_s=0.4) as (driver, trainer):

        def live() -> None:
            for _ in range(10):
                time.sleep(0.1)
                trainer.send("alive")
            trainer.send("left")

        threading.Thread(target=live).start()
        assert driver.receive()[0] == "left"


def test_silent_trainer_is_given_up_in_time() -> None:
    with (
        channels(silence_s=0.3) as (driver, _),
        pytest.raises(BridgeError, match=r"FRM003.*sent nothing for 0.3 s"),
    ):
        driver.receive()


@pytest.mark.parametrize("size", [1, 1000, MAX_PART, 3 * MAX_PART + 17])
def test_files_go_both_ways_between_messages(size: int, pair: tuple[Channel, Channel], tmp_path: Path) -> None:
    content = random.Random(size).randbytes(size)
    for side, channel in zip(("driver", "trainer"), pair, strict=True):
        (tmp_path / side / "files").mkdir(parents=True)
        (tmp_path / side / "files" / f"of-{side}").write_bytes(content)
        channel.attach(WorkDirectory(tmp_path / side), lambda path, size: None)
    driver, trainer = pair

    def speak(channel: Channel, side: str, word: str) -> None:
        channel.send_file(f"files/of-{side}")
        channel.send(word)

    *_, of_driver, of_trainer = together(
        lambda: speak(driver, "driver", "done"),
        lambda: speak(trainer, "trainer", "left"),
        driver.receive,
        trainer.receive,
    )
    assert (of_driver[0], of_trainer[0]) == ("left", "done")
    assert (tmp_path / "trainer/files/of-driver").read_bytes() == content
    assert (tmp_path / "driver/files/of-trainer").read_bytes() == content


def test_file_that_is_not_welcome_is_refused_before_it_comes(pair: tuple[Channel, Channel], tmp_path: Path) -> None:
    def admit(path: str, size: int) -> None:
        raise BridgeError("PATH009", f"{path} is too large", got=str(size), allowed="1000")

    driver, trainer = pair
    for channel, folder in ((driver, tmp_path / "driver"), (trainer, tmp_path / "trainer")):
        folder.mkdir()
        channel.attach(WorkDirectory(folder), admit)
    (tmp_path / "trainer/big").write_bytes(bytes(100_000))
    heard, _ = together(driver.receive, lambda: trainer.send_file("big"))
    assert isinstance(heard, BridgeError) and heard.code == "PATH009"
    with pytest.raises(BridgeError, match=r"PATH009\]: the driver says: big is too large — got 100000, allowed 1000"):
        trainer.receive()
    assert list((tmp_path / "driver").iterdir()) == []


def test_file_that_ends_early_is_gone(pair: tuple[Channel, Channel], tmp_path: Path) -> None:
    driver, trainer = pair
    driver.attach(WorkDirectory(tmp_path), lambda path, size: None)
    trainer.send("file", pb.File(path="half", size=1000))
    trainer._frames.write(b"x" * 400, 1.0)
    trainer.close()
    with pytest.raises(BridgeError, match=r"FRM008"):
        driver.receive()
    assert list(tmp_path.iterdir()) == []


def test_many_threads_may_speak_at_once(pair: tuple[Channel, Channel], tmp_path: Path) -> None:
    driver, trainer = pair
    for channel, folder in ((driver, tmp_path / "driver"), (trainer, tmp_path / "trainer")):
        folder.mkdir()
        channel.attach(WorkDirectory(folder), lambda path, size: None)
    (tmp_path / "trainer/file").write_bytes(bytes(range(256)) * 10_000)

    def chatter() -> None:
        for number in range(200):
            trainer.send("metrics", pb.MetricSet(items={"loss": 1.0}, local_round=number))

    def listen() -> int:
        count = 0
        while driver.receive()[0] != "left":
            count += 1
        return count

    speaking = [threading.Thread(target=chatter) for _ in range(3)]
    listening = threading.Thread(target=lambda: counts.append(listen()))
    counts: list[int] = []
    for thread in [listening, *speaking]:
        thread.start()
    trainer.send_file("file")
    for thread in speaking:
        thread.join()
    trainer.send("left")
    listening.join()
    assert counts == [600]
    assert (tmp_path / "driver/file").read_bytes() == (tmp_path / "trainer/file").read_bytes()


@pytest.mark.parametrize("wrong", ["driver", "trainer"])
def test_another_token_is_refused_by_both_sides_and_said(wrong: str) -> None:
    tokens = {"driver": TOKEN, "trainer": TOKEN, wrong: b"6" * 64}
    with sockets() as (here, there):
        driver, trainer = Channel(here, "driver", tokens["driver"]), Channel(there, "trainer", tokens["trainer"])
        of_driver, of_trainer = together(driver.greet, lambda: trainer.greet("test"))
    for error in (of_driver, of_trainer):
        assert isinstance(error, AuthenticationError) and error.code == "AUTH002" and error.exit_code == 4
    assert "the driver says: the trainer has another token" in str(of_trainer)


def test_driver_that_lets_everybody_in_is_found_out() -> None:
    """It doesn't have the token, and isn't interested in whether the trainer has it."""

    def welcome() -> None:
        frames, conversation = Frames(here), Conversation("driver")
        conversation.unwrap(frames.read(1024, 5.0))
        frames.write(conversation.wrap("challenge", pb.Challenge(session=b"s" * 16, nonce=b"n" * 32)), 5.0)
        conversation.unwrap(frames.read(1024, 5.0))
        frames.write(conversation.wrap("welcome", pb.Welcome(proof=b"p" * 32, silence_s=5.0)), 5.0)

    with sockets() as (here, there):
        _, error = together(welcome, lambda: Channel(there, "trainer", TOKEN).greet("test"))
    assert isinstance(error, AuthenticationError) and "the driver has another token" in str(error)


def test_token_never_goes_over_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    said = bytearray()
    write = Frames.write
    monkeypatch.setattr(Frames, "write", lambda frames, body, limit: said.extend(body) or write(frames, body, limit))
    with channels():
        assert len(said) > 200 and TOKEN not in said and bytes.fromhex(TOKEN.decode()) not in said


def test_closing_wakes_a_thread_that_hears(pair: tuple[Channel, Channel]) -> None:
    driver, _ = pair
    threading.Timer(0.1, driver.close).start()
    with pytest.raises(BridgeError, match=r"FRM008"):
        driver.receive()
    driver.close()


def test_speaking_to_one_who_is_gone_says_so(pair: tuple[Channel, Channel]) -> None:
    driver, trainer = pair
    trainer.close()
    with pytest.raises(BridgeError, match=r"FRM008"):
        for _ in range(3):
            driver.send("alive")


def test_zero_in_a_map_may_be_left_out_as_some_libraries_do() -> None:
    driver = Conversation("driver")
    driver._opening.clear()
    driver.session = b"s" * 16
    entry = b"\x0a\x04loss"  # A key, and no value.
    metrics = b"\x0a" + bytes([len(entry)]) + entry + b"\x10\x08"
    content = b"\xba\x01" + bytes([len(metrics)]) + metrics
    word, message = driver.unwrap(envelope(1, driver.session) + content)
    assert (word, dict(message.items), message.data_processed) == ("metrics", {"loss": 0.0}, 8)
