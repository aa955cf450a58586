"""Order of messages: each side's turns, and a check that no message was repeated, omitted or forged.

    trainer: hello ─► driver: challenge ─► trainer: authenticate ─► driver: welcome ─► both: work

This module does no I/O.
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
"""Messages of the handshake, in order, each with its sender."""
_ALWAYS = frozenset({"file", "alive", "error"})
_WORK = {
    "driver": _ALWAYS | {"job", "parameters", "assignment", "leave", "done"},
    "trainer": _ALWAYS | {"ready", "merged", "metrics", "evaluation", "update", "left"},
}
"""Messages that each side may send once both are authenticated."""

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
        self._sent = self._heard = 0
        self.session = b""

    def wrap(self, content: str, message: Any) -> bytes:
        """The body of a frame with a message from this side."""
        if content != "error":
            self._step(content, self._side, "MSG010")
        self._sent += 1
        envelope = Envelope(version=VERSION, sequence=self._sent, session=self.session, **{content: message})
        self._join(content, message)
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
        if envelope.sequence != self._heard + 1:
            got = str(envelope.sequence)
            allowed = str(self._heard + 1)
            raise BridgeError("AUTH003", "a message was repeated or omitted: its sequence number", got, allowed)
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
        """Check that this message is allowed now."""
        if self._opening:
            expected, speaker = self._opening[0]
            if (content, side) != (expected, speaker):
                raise BridgeError(code, f"{content} from the {side} out of turn", allowed=f"{expected}, {speaker}")
            self._opening.pop(0)
        elif content not in _WORK[side]:
            raise BridgeError(code, f"a {side} doesn't send {content} now")

    def _join(self, content: str, message: Any) -> None:
        if content == "challenge":
            self.session = bytes(message.session)


def complaint(error: HyphaError) -> dict[str, str]:
    """The fields of an `Error` message for the other side."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(error).partition(": ")[2])
    return {"code": error.code, "text": text[:1000]}


def _parsed(body: bytes | memoryview) -> Envelope:
    envelope = Envelope()
    try:
        length = envelope.ParseFromString(bytes(body))
    except DecodeError as error:
        raise BridgeError("FRM005", "a frame without a message", got=str(error)[:100]) from None
    # It may be shorter than ours, since some libraries omit zeros in maps. A repeated field makes it longer.
    if length != len(body) or envelope.ByteSize() < len(body):
        raise BridgeError("FRM005", "a message that isn't encoded as protobuf requires, such as with a field twice")
    return envelope
