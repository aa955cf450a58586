"""Order of messages: each side's turns, and a check that none was repeated, left out or sent by another process.

    trainer: hello ─► driver: challenge ─► trainer: authenticate ─► driver: welcome ─► both: work

No I/O in here.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.internal import api_implementation
from google.protobuf.message import DecodeError

from hypha_ray.bridge.bridge_pb2 import Envelope
from hypha_ray.bridge.messages import check
from hypha_ray.bridge.transport.tokens import Side
from hypha_ray.errors import BridgeError, HyphaError

VERSION = 1
"""Version of the protocol."""
OPENING = {"hello": "trainer", "challenge": "driver", "authenticate": "trainer", "welcome": "driver"}
"""Messages of the beginning, in order, each with its sender."""
_ALWAYS = frozenset({"file", "alive", "error"})
_WORK = {
    "driver": _ALWAYS | {"job", "parameters", "assignment", "leave", "done"},
    "trainer": _ALWAYS | {"ready", "merged", "metrics", "evaluation", "update", "left"},
}
"""Messages that each side may send once both are authenticated."""

if api_implementation.Type() == "python":  # Deeply nested messages exhaust the stack there.
    raise ImportError("the bridge needs protobuf's compiled implementation; it has been turned off")


class Conversation:
    """One side's view of a connection.

    Args:
        side: whose.

    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self.other: Side = "trainer" if side == "driver" else "driver"
        self._opening = list(OPENING.items())
        self._sent = self._heard = 0
        self.session = b""

    def wrap(self, content: str, message: Any) -> bytes:
        """A frame's body with a message of this side."""
        if content != "error":
            self._step(content, self._side, "MSG010")
        self._sent += 1
        envelope = Envelope(version=VERSION, sequence=self._sent, session=self.session, **{content: message})
        self._join(content, message)
        return bytes(envelope.SerializeToString())

    def unwrap(self, body: bytes | memoryview) -> tuple[str, Any]:
        """A message of the other side, and its name in the envelope.

        Raises:
            BridgeError: FRM005 not a message, FRM006 another version, FRM007 nothing that this side understands;
                AUTH001 it isn't the other side's turn to say this, AUTH003 a sequence number that isn't the next one,
                AUTH004 of another session; and all of `messages.check`.

        """
        envelope = _parsed(body)
        if envelope.version != VERSION:
            got, allowed = f"version {envelope.version}", f"version {VERSION}"
            raise BridgeError("FRM006", "the other side speaks another version of the protocol", got, allowed)
        content = envelope.WhichOneof("content")
        if content is None:
            raise BridgeError("FRM007", "a message that says nothing, or something of a later version")
        if envelope.sequence != self._heard + 1:
            got, allowed = str(envelope.sequence), str(self._heard + 1)
            raise BridgeError("AUTH003", "a message was repeated or left out: its sequence number", got, allowed)
        if envelope.session != self.session:
            raise BridgeError("AUTH004", "a message of another session")
        if content != "error":
            self._step(content, self.other, "AUTH001")
        message = getattr(envelope, content)
        check(content, message)
        self._heard += 1
        self._join(content, message)
        return content, message

    def _step(self, content: str, side: Side, code: str) -> None:
        """See that it is the time for this."""
        if self._opening:
            expected, speaker = self._opening[0]
            if (content, side) != (expected, speaker):
                raise BridgeError(code, f"{content} from the {side} before its time", allowed=f"{expected}, {speaker}")
            self._opening.pop(0)
        elif content not in _WORK[side]:
            raise BridgeError(code, f"{content} is nothing that a {side} says now")

    def _join(self, content: str, message: Any) -> None:
        if content == "challenge":
            self.session = bytes(message.session)


def complaint(error: HyphaError) -> dict[str, str]:
    """The fields of an `Error` message that tells the other side what was wrong."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(error).partition(": ")[2])
    return {"code": error.code, "text": text[:1000]}


def _parsed(body: bytes | memoryview) -> Envelope:
    envelope = Envelope()
    try:
        length = envelope.ParseFromString(bytes(body))
    except DecodeError as error:
        raise BridgeError("FRM005", "a frame without a message", got=str(error)[:100]) from None
    # Shorter than ours it may be: some libraries leave zeros in maps out. Whatever is there twice makes it longer.
    if length != len(body) or envelope.ByteSize() < len(body):
        raise BridgeError("FRM005", "a message that isn't encoded as protobuf asks for; a field twice?")
    return envelope
