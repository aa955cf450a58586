"""What a trainer may send that is wrong, by name: each gets its one clear error, and the connection is closed."""

from __future__ import annotations

import math
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.access import MAX_MESSAGE, Frames, prove
from hypha_ray.bridge.channel import MAX_GREETING, Channel
from hypha_ray.bridge.paths import WorkDirectory
from hypha_ray.errors import BridgeError, HyphaError
from tests.support.bridging import TOKEN, channels, envelope, frame, sockets, together

GOOD = pb.Content(size=10, sha256=b"5" * 32)
NONCE, SESSION = b"n" * 32, b"s" * 16
HELLO = pb.Hello(name="test", nonce=NONCE)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, kind: int, body: bytes) -> bytes:
    """A field of a message, encoded by hand."""
    return varint(number << 3 | kind) + (varint(len(body)) if kind == 2 else b"") + body


def update(**fields: Any) -> pb.Update:
    good = {"round": 0, "update": pb.WeightUpdate(model_path="updates/x"), "content": GOOD, "samples": 8, "batches": 1}
    return pb.Update(**{**good, **fields})


def metrics(count: int) -> pb.MetricSet:
    return pb.MetricSet(items={f"m{n}": 1.0 for n in range(count)})


BEFORE: dict[str, tuple[bytes, str]] = {
    "nothing at all": (b"", "FRM008"),
    "three bytes": (b"\0\0\0", "FRM008"),
    "half a body": (frame(b"hello")[:-2], "FRM008"),
    "an HTTP request": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "FRM001"),
    "an HTTP upload": (b"PUT /model HTTP/1.1\r\n\r\n", "FRM001"),
    "an SSH banner": (b"SSH-2.0-OpenSSH_9.6\r\n", "FRM001"),
    "a TLS greeting": (bytes.fromhex("16030100c6010000c20303"), "FRM001"),
    "a pickle": (b"\x80\x04\x95\x1c\0\0\0\0\0\0\0\x8c\x02os", "FRM001"),
    "a Redis command": (b"*1\r\n$4\r\nPING\r\n", "FRM001"),
    "the seed's length and DONE": (struct.pack(">I", 4) + b"DONE" + b"\0\0\0\0", "FRM004"),
    "only 0xff": (b"\xff" * 64, "FRM001"),
    "only zeros": (b"\0" * 64, "FRM002"),
    "a length in little-endian": (struct.pack("<II", 16, 0) + b"\0" * 16, "FRM001"),
    "a length of 0": (frame(b"", length=0), "FRM002"),
    "a greeting that is too long": (frame(b"x" * (MAX_GREETING + 1)), "FRM002"),
    "a length of 4 GiB": (frame(b"", length=2**32 - 1), "FRM001"),
    "another checksum": (frame(b"hello", checksum=0), "FRM004"),
    "a checksum in little-endian": (frame(b"hello")[:4] + frame(b"hello")[7:3:-1] + b"hello", "FRM004"),
    "bytes that are no message": (frame(b"\xff" * 20), "FRM005"),
    "a group that never ends": (frame(b"\x0b" * 20), "FRM005"),
    "a message cut off": (frame(envelope(1, hello=HELLO)[:-1]), "FRM005"),
    "a message and a byte": (frame(envelope(1, hello=HELLO) + b"\0"), "FRM005"),
    "a name that is not UTF-8": (
        frame(b"\x08\x01\x10\x01" + field(10, 2, field(1, 2, b"\xff\xfe") + field(2, 2, NONCE))),
        "FRM005",
    ),
    "a field twice": (frame(b"\x08\x01" + envelope(1, hello=HELLO)), "FRM005"),
    "two contents": (frame(envelope(1, hello=HELLO) + field(31, 2, b"")), "FRM005"),
    "a sequence number of eleven bytes": (frame(b"\x08\x01\x10" + b"\x80" * 10 + b"\x01"), "FRM005"),
    "version 0": (frame(envelope(1, version=0, hello=HELLO)), "FRM006"),
    "version 2": (frame(envelope(1, version=2, hello=HELLO)), "FRM006"),
    "version 99": (frame(envelope(1, version=99, hello=HELLO)), "FRM006"),
    "an envelope with nothing in it": (frame(envelope(1)), "FRM007"),
    "an envelope with something of the future": (frame(envelope(1) + field(99, 2, b"new")), "FRM007"),
    "sequence number 0": (frame(envelope(0, hello=HELLO)), "AUTH003"),
    "sequence number 2 first": (frame(envelope(2, hello=HELLO)), "AUTH003"),
    "the largest sequence number": (frame(envelope(2**64 - 1, hello=HELLO)), "AUTH003"),
    "a session of one's own": (frame(envelope(1, session=SESSION, hello=HELLO)), "AUTH004"),
    "metrics before a greeting": (frame(envelope(1, metrics=pb.MetricSet())), "AUTH001"),
    "a weight update before a greeting": (frame(envelope(1, update=update())), "AUTH001"),
    "a file before a greeting": (frame(envelope(1, file=pb.File(path="x", size=1))), "AUTH001"),
    "a sign of life before a greeting": (frame(envelope(1, alive=pb.Alive())), "AUTH001"),
    "a proof before a challenge": (frame(envelope(1, authenticate=pb.Authenticate(proof=b"x" * 32))), "AUTH001"),
    "the driver's own challenge": (
        frame(envelope(1, challenge=pb.Challenge(session=SESSION, nonce=NONCE))),
        "AUTH001",
    ),
    "the driver's own welcome": (frame(envelope(1, welcome=pb.Welcome(proof=NONCE))), "AUTH001"),
    "a nonce of no bytes": (frame(envelope(1, hello=pb.Hello(name="test"))), "MSG004"),
    "a nonce of 31 bytes": (frame(envelope(1, hello=pb.Hello(nonce=b"n" * 31))), "MSG004"),
    "a nonce of 33 bytes": (frame(envelope(1, hello=pb.Hello(nonce=b"n" * 33))), "MSG004"),
    "a name of 129 characters": (frame(envelope(1, hello=pb.Hello(name="x" * 129, nonce=NONCE))), "MSG004"),
    "a name that colours the terminal": (frame(envelope(1, hello=pb.Hello(name="\x1b[31m", nonce=NONCE))), "MSG004"),
    "a name of two lines": (frame(envelope(1, hello=pb.Hello(name="a\nb", nonce=NONCE))), "MSG004"),
    "greetings twice": (frame(envelope(1, hello=HELLO)) + frame(envelope(2, hello=HELLO)), "AUTH004"),
    "no proof, but work": (frame(envelope(1, hello=HELLO)) + frame(envelope(2, update=update())), "AUTH004"),
}
"""What comes instead of a greeting, and the code of its error."""

INSTEAD_OF_PROOF: dict[str, tuple[dict[str, Any], str]] = {
    "a proof with another token": ({"token": b"6" * 64}, "AUTH002"),
    "a proof of no bytes": ({"proof": b""}, "MSG004"),
    "a proof of 31 bytes": ({"proof": b"p" * 31}, "MSG004"),
    "the token itself": ({"proof": TOKEN[:32]}, "AUTH002"),
    "the proof of a driver": ({"side": "driver"}, "AUTH002"),
    "a proof for another session": ({"session": SESSION}, "AUTH002"),
    "a proof for another nonce": ({"driver_nonce": NONCE}, "AUTH002"),
    "a proof for another hello": ({"trainer_nonce": b"m" * 32}, "AUTH002"),
}

WORK: dict[str, tuple[Any, str]] = {
    "hello again": ({"hello": HELLO}, "AUTH001"),
    "a proof again": ({"authenticate": pb.Authenticate(proof=NONCE)}, "AUTH001"),
    "a job of its own": ({"job": pb.JobDefinition(path="job.json", content=GOOD)}, "AUTH001"),
    "parameters for the driver": ({"parameters": pb.Parameters()}, "AUTH001"),
    "an assignment for the driver": ({"assignment": pb.Assignment(batch_size=1)}, "AUTH001"),
    "the end of the training": ({"done": pb.Done()}, "AUTH001"),
    "an order to leave": ({"leave": pb.Leave()}, "AUTH001"),
    "257 metrics": ({"metrics": metrics(257)}, "MSG002"),
    "a metric without a name": ({"metrics": pb.MetricSet(items={"": 1.0})}, "MSG002"),
    "a metric whose name has a space": ({"metrics": pb.MetricSet(items={"a b": 1.0})}, "MSG002"),
    "a metric whose name is code": ({"metrics": pb.MetricSet(items={"${HOME}": 1.0})}, "MSG002"),
    "a metric whose name has 129 characters": ({"metrics": pb.MetricSet(items={"x" * 129: 1.0})}, "MSG002"),
    "a metric whose name is two lines": ({"metrics": pb.MetricSet(items={"loss\nx": 1.0})}, "MSG002"),
    "a metric in Greek": ({"metrics": pb.MetricSet(items={"λ": 1.0})}, "MSG002"),
    "a loss that is NaN": ({"metrics": pb.MetricSet(items={"loss": math.nan})}, "MSG001"),
    "a loss that is infinite": ({"metrics": pb.MetricSet(items={"loss": math.inf})}, "MSG001"),
    "a loss that is minus infinite": ({"metrics": pb.MetricSet(items={"loss": -math.inf})}, "MSG001"),
    "minus five data points": ({"metrics": pb.MetricSet(data_processed=-5)}, "MSG003"),
    "the fewest data points": ({"metrics": pb.MetricSet(data_processed=-(2**63))}, "MSG003"),
    "metrics of round -1": ({"metrics": pb.MetricSet(local_round=-1)}, "MSG003"),
    "an update of round -1": ({"update": update(round=-1)}, "MSG003"),
    "an update of no samples": ({"update": update(samples=0)}, "MSG003"),
    "an update of no batches": ({"update": update(batches=0)}, "MSG003"),
    "an update whose loss is NaN": ({"update": update(loss=math.nan)}, "MSG001"),
    "an update without a file": ({"update": update(update=None)}, "PATH001"),
    "an update without a hash": ({"update": update(content=pb.Content(size=10))}, "MSG004"),
    "an update without a size": ({"update": update(content=pb.Content(sha256=NONCE))}, "MSG003"),
    "an update with a sha1": ({"update": update(content=pb.Content(size=10, sha256=b"1" * 20))}, "MSG004"),
    "an update at an absolute path": ({"update": update(update=pb.WeightUpdate(model_path="/etc/passwd"))}, "PATH001"),
    "an update above the directory": ({"update": update(update=pb.WeightUpdate(model_path="../../x"))}, "PATH001"),
    "an update at a path with NUL": ({"update": update(update=pb.WeightUpdate(model_path="a\0b"))}, "PATH001"),
    "an update on drive C": ({"update": update(update=pb.WeightUpdate(model_path="C:\\x"))}, "PATH001"),
    "an update at a path of 5,000": ({"update": update(update=pb.WeightUpdate(model_path="x" * 5000))}, "PATH001"),
    "an update that is a folder": ({"update": update(update=pb.WeightUpdate(model_path="updates/"))}, "PATH001"),
    "merged before the first round": ({"merged": pb.Merged(round=-1)}, "MSG003"),
    "merged in minus a second": ({"merged": pb.Merged(seconds=-1)}, "MSG003"),
    "merged in NaN seconds": ({"merged": pb.Merged(seconds=math.nan)}, "MSG001"),
    "an evaluation that is NaN": ({"evaluation": pb.Evaluation(loss_sum=math.nan, count=1)}, "MSG001"),
    "more correct than there were": ({"evaluation": pb.Evaluation(count=1, correct=2)}, "MSG003"),
    "an evaluation of round -1": ({"evaluation": pb.Evaluation(round=-1)}, "MSG003"),
    "a device of two lines": ({"ready": pb.Ready(device="cpu\ngpu")}, "MSG004"),
    "a device of 65 characters": ({"ready": pb.Ready(device="x" * 65)}, "MSG004"),
    "a file of no bytes": ({"file": pb.File(path="updates/x", size=0)}, "MSG003"),
    "a file above the directory": ({"file": pb.File(path="../x", size=1)}, "PATH001"),
    "a file in a folder that isn't there": ({"file": pb.File(path="absent/x", size=1)}, "PATH006"),
    "a file over another": ({"file": pb.File(path="updates/old", size=1)}, "PATH007"),
    "a file over a link": ({"file": pb.File(path="updates/link", size=1)}, "PATH007"),
    "a file through a link": ({"file": pb.File(path="folder/x", size=1)}, "PATH002"),
    "a file that is too large": ({"file": pb.File(path="updates/x", size=10**15)}, "PATH009"),
    "an error without a code": ({"error": pb.Error(text="oh")}, "MSG004"),
    "an error of 1,025 characters": ({"error": pb.Error(code="X1", text="x" * 1025)}, "MSG004"),
    "an error that colours the terminal": ({"error": pb.Error(code="X1", text="\x1b[31m")}, "MSG004"),
    "a message again": (lambda session: envelope(2, session, alive=pb.Alive()), "AUTH003"),
    "a message left out": (lambda session: envelope(4, session, alive=pb.Alive()), "AUTH003"),
    "a message of another session": (lambda _: envelope(3, SESSION, alive=pb.Alive()), "AUTH004"),
    "a message of no session": (lambda _: envelope(3, b"", alive=pb.Alive()), "AUTH004"),
    "a message of another version": (lambda session: envelope(3, session, version=2, alive=pb.Alive()), "FRM006"),
    "a message without content": (lambda session: envelope(3, session), "FRM007"),
    "a message of more than 64 KiB": (lambda _: b"x" * (MAX_MESSAGE + 1), "FRM002"),
    "a map of 300,000 keys": (lambda s: envelope(3, s, metrics=metrics(300_000)), "FRM002"),
    "the same metric twice": (
        lambda s: envelope(3, s) + field(23, 2, 2 * field(1, 2, field(1, 2, b"a") + field(2, 1, bytes(8)))),
        "FRM005",
    ),
    "a path twice": (
        lambda s: envelope(3, s) + field(25, 2, field(2, 2, field(1, 2, b"good") + field(1, 2, b"bad"))),
        "FRM005",
    ),
    "a path that is not UTF-8": (
        lambda s: envelope(3, s) + field(25, 2, field(2, 2, field(1, 2, b"\xff\xfe"))),
        "FRM005",
    ),
}
"""What an authenticated trainer sends; either the content of a message, or bytes that are made with the session."""


def of_driver(driver: Channel, then: Any = None) -> HyphaError:
    with pytest.raises(HyphaError) as caught:
        driver.greet()
        if then is not None:
            then()
    return caught.value


def last_word(stream: socket.socket) -> str:
    """Code of the error that the driver has sent before it closed."""
    stream.settimeout(5.0)
    reader, code = Frames(stream), ""
    while True:
        try:
            message = pb.Envelope.FromString(bytes(reader.read(MAX_MESSAGE, 5.0)))
        except BridgeError as closed:
            assert closed.code == "FRM008"
            return code
        code = message.error.code


@pytest.mark.timeout(4)  # No silence is that short.
@pytest.mark.parametrize("name", BEFORE)
def test_stranger_is_told_what_is_wrong(name: str) -> None:
    data, code = BEFORE[name]
    with sockets() as (here, there):
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        assert of_driver(Channel(here, "driver", TOKEN)).code == code
        assert last_word(there) in (code, "")


@pytest.mark.parametrize("name", INSTEAD_OF_PROOF)
def test_proof_that_proves_nothing_is_refused(name: str) -> None:
    forged, code = INSTEAD_OF_PROOF[name]

    def forge() -> str:
        frames = Frames(there)
        frames.write(envelope(1, hello=HELLO), 5.0)
        challenge = pb.Envelope.FromString(bytes(frames.read(MAX_MESSAGE, 5.0))).challenge
        real = {"session": challenge.session, "driver_nonce": challenge.nonce, "trainer_nonce": NONCE}
        made = {"token": TOKEN, "side": "trainer", **real, **forged}
        proof = made.pop("proof") if "proof" in made else prove(**made)
        frames.write(envelope(2, challenge.session, authenticate=pb.Authenticate(proof=proof)), 5.0)
        return last_word(there)

    with sockets() as (here, there):
        error, told = together(lambda: of_driver(Channel(here, "driver", TOKEN)), forge)
        assert (error.code, told) == (code, code)


@pytest.mark.parametrize("name", WORK)
def test_trainer_that_breaks_the_protocol_is_told_what_is_wrong(name: str, tmp_path: Path) -> None:
    content, code = WORK[name]
    (tmp_path / "updates").mkdir()
    (tmp_path / "updates/old").write_bytes(b"old")
    (tmp_path / "updates/link").symlink_to("old")
    (tmp_path / "folder").symlink_to("updates")

    def admit(path: str, size: int) -> None:
        if size > 1000:
            raise BridgeError("PATH009", f"{path} is too large", str(size), "1000")

    with channels() as (driver, trainer):
        driver.attach(WorkDirectory(tmp_path), admit)
        session, stream = trainer._conversation.session, trainer._stream
        body = envelope(3, session, **content) if isinstance(content, dict) else content(session)
        began = time.process_time()
        error, told, _ = together(
            lambda: heard(driver), lambda: last_word(stream), lambda: stream.sendall(frame(body) + frame(b"rest"))
        )
        assert time.process_time() - began < 1.0
        assert (error.code, told) == (code, code)
    assert sorted(path.name for path in (tmp_path / "updates").iterdir()) == ["link", "old"]


def heard(driver: Channel) -> HyphaError:
    with pytest.raises(HyphaError) as caught:
        while True:
            driver.receive()
    return caught.value


def test_there_are_a_hundred_of_them() -> None:
    assert len(BEFORE) + len(INSTEAD_OF_PROOF) + len(WORK) >= 100
