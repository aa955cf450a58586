"""Messages of a connection: checks of their fields and of their order, so that none was repeated, omitted or forged.

    trainer: hello ─► driver: challenge ─► trainer: authenticate ─► driver: welcome ─► both: work

This module does no I/O.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from typing import Any

from google.protobuf.internal import api_implementation
from google.protobuf.message import DecodeError

from hypha_ray.bridge.access import NONCE, SESSION, Side
from hypha_ray.bridge.bridge_pb2 import Envelope
from hypha_ray.bridge.paths import split_path
from hypha_ray.errors import BridgeError, HyphaError

MAX_METRICS = 256
MAX_SLICES = 256
LARGEST = 1e12
"""Largest magnitude of a loss, norm or other figure; sums and means of such figures are finite, too."""
MAX_TEXT = 1024
"""Most characters in a reason or an error's text."""
_METRIC = re.compile(r"[A-Za-z0-9_./@-]{1,128}")
_WORD = re.compile(r"[!-~]{1,32}")
VERSION = 1
"""Version of the protocol."""
OPENING = {"hello": "trainer", "challenge": "driver", "authenticate": "trainer", "welcome": "driver"}
"""Messages of the handshake, in order, each with its sender."""
_ALWAYS = frozenset({"file", "alive", "error"})
_WORK = {
    "driver": _ALWAYS | {"job", "parameters", "assignment", "leave", "done"},
    "trainer": _ALWAYS | {"ready", "merged", "metrics", "evaluation", "update", "left"},
}
"""Messages that each side may send once both are authenticated."""


def check(content: str, message: Any) -> None:
    """Check a message's fields.

    Args:
        content: name of the message in the envelope.
        message: message of that kind.

    Raises:
        BridgeError: MSG001 a number that isn't finite, MSG002 metrics, MSG003 a number out of range, MSG004 a field
            of the wrong length, PATH001 an invalid path.

    """
    _CHECKS[content](message)


def _hello(message: Any) -> None:
    _text("name", message.name, 128)
    _bytes("nonce", message.nonce, NONCE)


def _challenge(message: Any) -> None:
    _bytes("session", message.session, SESSION)
    _bytes("nonce", message.nonce, NONCE)


def _authenticate(message: Any) -> None:
    _bytes("proof", message.proof, 32)


def _welcome(message: Any) -> None:
    _bytes("proof", message.proof, 32)
    _number("silence_s", message.silence_s)
    _at_least("silence_s", message.silence_s, 0.1)


def _job(message: Any) -> None:
    _file_reference(message.path, message.content)


def _ready(message: Any) -> None:
    _text("device", message.device, 64)
    _at_most("parameters", message.parameters)


def _parameters(message: Any) -> None:
    _at_least("round", message.round, 0)
    _file_reference(message.update.model_path, message.content)


def _merged(message: Any) -> None:
    _at_least("round", message.round, 0)
    _not_negative("seconds", message.seconds)


def _metrics(message: Any) -> None:
    _metric_names("metrics", message.items)
    for name, value in message.items.items():
        _figure(f"metric {name}", value)
    _at_least("data_processed", message.data_processed, 0)
    _at_least("local_round", message.local_round, 0)


def _metric_names(kind: str, names: Collection[str]) -> None:
    if len(names) > MAX_METRICS:
        raise BridgeError("MSG002", f"too many {kind}", got=str(len(names)), allowed=f"at most {MAX_METRICS}")
    for name in names:
        if not _METRIC.fullmatch(name):
            raise BridgeError("MSG002", f"a name among {kind}", repr(name[:140]), "1 to 128 of A-Z a-z 0-9 _ . / - @")


def _assignment(message: Any) -> None:
    _at_least("round", message.round, 0)
    _at_least("batch_size", message.batch_size, 1)
    _not_negative("learning_rate", message.learning_rate)
    _not_negative("last_learning_rate", message.last_learning_rate)
    for name, slices in (("train", message.train), ("evaluate", message.evaluate)):
        if len(slices) > MAX_SLICES:
            raise BridgeError("MSG004", f"{name}: too many slices", str(len(slices)), f"at most {MAX_SLICES}")
        for slice_message in slices:
            _at_least("samples", slice_message.samples, 1)
            _file_reference(slice_message.path, slice_message.content)


def _evaluation(message: Any) -> None:
    _at_least("round", message.round, 0)
    _number("loss_sum", message.loss_sum)
    _at_most("loss_sum / count", abs(message.loss_sum) / max(1, message.count))
    _at_most("correct", message.correct, message.count)
    _metric_names("figures", message.figures)
    for name, figure in message.figures.items():
        _not_negative(f"weight of {name}", figure.weight)
        _figure(f"total of {name}", figure.total)


def _update(message: Any) -> None:
    _at_least("round", message.round, 0)
    _at_least("samples", message.samples, 1)
    _at_least("batches", message.batches, 1)
    _figure("loss", message.loss)
    _file_reference(message.update.model_path, message.content)


def _leave(message: Any) -> None:
    _text("reason", message.reason, MAX_TEXT)


def _file_header(message: Any) -> None:
    split_path(message.path)
    _at_least("size", message.size, 1)


def _error(message: Any) -> None:
    if not _WORD.fullmatch(message.code):
        raise BridgeError("MSG004", "code", got=repr(message.code[:40]), allowed="1 to 32 visible ASCII characters")
    _text("text", message.text, MAX_TEXT)


def _nothing(_: Any) -> None:
    pass


_CHECKS: dict[str, Callable[[Any], None]] = {
    "hello": _hello,
    "challenge": _challenge,
    "authenticate": _authenticate,
    "welcome": _welcome,
    "job": _job,
    "ready": _ready,
    "parameters": _parameters,
    "assignment": _assignment,
    "merged": _merged,
    "metrics": _metrics,
    "evaluation": _evaluation,
    "update": _update,
    "leave": _leave,
    "left": _nothing,
    "done": _nothing,
    "file": _file_header,
    "alive": _nothing,
    "error": _error,
}


def _number(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise BridgeError("MSG001", name, got=str(value), allowed="a finite number")


def _figure(name: str, value: float) -> None:
    _number(name, value)
    if abs(value) > LARGEST:
        raise BridgeError("MSG003", name, got=str(value), allowed=f"{-LARGEST:g} to {LARGEST:g}")


def _at_most(name: str, value: float, most: float = LARGEST) -> None:
    if value > most:
        raise BridgeError("MSG003", name, got=str(value), allowed=f"at most {most:g}")


def _not_negative(name: str, value: float) -> None:
    _figure(name, value)
    _at_least(name, value, 0)


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise BridgeError("MSG003", name, got=str(value), allowed=f"at least {least:g}")


def _bytes(name: str, value: bytes, length: int) -> None:
    if len(value) != length:
        raise BridgeError("MSG004", name, got=f"{len(value)} bytes", allowed=f"{length} bytes")


def _text(name: str, value: str, longest: int) -> None:
    if len(value) > longest or not value.isprintable():
        raise BridgeError("MSG004", name, got=repr(value[:80]), allowed=f"at most {longest} printable characters")


def _file_reference(path: str, content: Any) -> None:
    split_path(path)
    _at_least("size", content.size, 1)
    _bytes("sha256", content.sha256, 32)


if api_implementation.Type() == "python":  # Deeply nested messages exhaust its stack.
    raise ImportError("the bridge needs protobuf's compiled implementation; it is turned off")


class Conversation:
    """One side's view of a connection.

    Args:
        side: the side of this process.

    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self.other: Side = "trainer" if side == "driver" else "driver"
        self._opening = list(OPENING.items())
        self._sent = self._received = 0
        self.session = b""

    def wrap(self, content: str, message: Any) -> bytes:
        """The body of a frame with a message from this side."""
        if content != "error":
            self._check_turn(content, self._side, "MSG010")
        self._sent += 1
        envelope = Envelope(version=VERSION, sequence=self._sent, session=self.session, **{content: message})
        self._take_session(content, message)
        return bytes(envelope.SerializeToString())

    def unwrap(self, body: bytes | memoryview) -> tuple[str, Any]:
        """A message from the other side, and its name in the envelope.

        Raises:
            BridgeError: FRM005 not a message, FRM006 another version, FRM007 an unknown message, AUTH001 a message out
                of turn, AUTH003 an unexpected sequence number, AUTH004 another session; and the errors of
                `messages.check`.

        """
        envelope = _parsed(body)
        if envelope.version != VERSION:
            got = f"version {envelope.version}"
            allowed = f"version {VERSION}"
            raise BridgeError("FRM006", "the other side speaks another version of the protocol", got, allowed)
        content = envelope.WhichOneof("content")
        if content is None:
            raise BridgeError("FRM007", "an empty message, or one of a later version")
        if envelope.sequence != self._received + 1:
            got = str(envelope.sequence)
            allowed = str(self._received + 1)
            raise BridgeError("AUTH003", "a message was repeated or omitted: its sequence number", got, allowed)
        if envelope.session != self.session:
            raise BridgeError("AUTH004", "a message of another session")
        if content != "error":
            self._check_turn(content, self.other, "AUTH001")
        message = getattr(envelope, content)
        check(content, message)
        self._received += 1
        self._take_session(content, message)
        return content, message

    def _check_turn(self, content: str, side: Side, code: str) -> None:
        """Check that this message is allowed now."""
        if self._opening:
            expected_name, speaker = self._opening[0]
            if (content, side) != (expected_name, speaker):
                raise BridgeError(code, f"{content} from the {side} out of turn", allowed=f"{expected_name}, {speaker}")
            self._opening.pop(0)
        elif content not in _WORK[side]:
            raise BridgeError(code, f"a {side} doesn't send {content} now")

    def _take_session(self, content: str, message: Any) -> None:
        if content == "challenge":
            self.session = bytes(message.session)


def complaint(error: HyphaError) -> dict[str, str]:
    """The fields of an `Error` message for the other side."""
    text = str(error).partition(": ")[2]
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    return {"code": error.code, "text": printable[:1000]}


def _parsed(body: bytes | memoryview) -> Envelope:
    envelope = Envelope()
    try:
        length = envelope.ParseFromString(bytes(body))
    except DecodeError as error:
        raise BridgeError("FRM005", "a frame without a message", got=str(error)[:100]) from None
    # The encoding may be shorter than ours, since some libraries omit zeros in maps. A repeated field makes it longer.
    if length != len(body) or envelope.ByteSize() < len(body):
        raise BridgeError("FRM005", "a message that isn't encoded as protobuf requires, such as with a field twice")
    return envelope
