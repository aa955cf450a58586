"""Checks of received messages before they are used."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from typing import Any

from hypha_ray.bridge.paths import parts
from hypha_ray.bridge.transport.tokens import NONCE, SESSION
from hypha_ray.errors import BridgeError

MAX_METRICS = 256
MAX_SLICES = 256
LARGEST = 1e12
"""Largest magnitude of a loss, norm or other figure; sums and means of such figures are finite, too."""
MAX_TEXT = 1024
"""Most characters in a reason or an error's text."""
_METRIC = re.compile(r"[A-Za-z0-9_./@-]{1,128}")
_WORD = re.compile(r"[!-~]{1,32}")


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
    _file(message.path, message.content)


def _ready(message: Any) -> None:
    _text("device", message.device, 64)
    _at_most("parameters", message.parameters)


def _parameters(message: Any) -> None:
    _at_least("round", message.round, 0)
    _file(message.update.model_path, message.content)


def _merged(message: Any) -> None:
    _at_least("round", message.round, 0)
    _not_negative("seconds", message.seconds)


def _metrics(message: Any) -> None:
    _names("metrics", message.items)
    for name, value in message.items.items():
        _figure(f"metric {name}", value)
    _at_least("data_processed", message.data_processed, 0)
    _at_least("local_round", message.local_round, 0)


def _names(what: str, named: Collection[str]) -> None:
    if len(named) > MAX_METRICS:
        raise BridgeError("MSG002", f"too many {what}", got=str(len(named)), allowed=f"at most {MAX_METRICS}")
    for name in named:
        if not _METRIC.fullmatch(name):
            raise BridgeError("MSG002", f"a name among {what}", repr(name[:140]), "1 to 128 of A-Z a-z 0-9 _ . / - @")


def _assignment(message: Any) -> None:
    _at_least("round", message.round, 0)
    _at_least("batch_size", message.batch_size, 1)
    _not_negative("learning_rate", message.learning_rate)
    _not_negative("last_learning_rate", message.last_learning_rate)
    for name, slices in (("train", message.train), ("evaluate", message.evaluate)):
        if len(slices) > MAX_SLICES:
            raise BridgeError("MSG004", f"{name}: too many slices", str(len(slices)), f"at most {MAX_SLICES}")
        for one in slices:
            _at_least("samples", one.samples, 1)
            _file(one.path, one.content)


def _evaluation(message: Any) -> None:
    _at_least("round", message.round, 0)
    _number("loss_sum", message.loss_sum)
    _at_most("loss_sum / count", abs(message.loss_sum) / max(1, message.count))
    _at_most("correct", message.correct, message.count)
    _names("figures", message.figures)
    for name, figure in message.figures.items():
        _not_negative(f"weight of {name}", figure.weight)
        _figure(f"total of {name}", figure.total)


def _update(message: Any) -> None:
    _at_least("round", message.round, 0)
    _at_least("samples", message.samples, 1)
    _at_least("batches", message.batches, 1)
    _figure("loss", message.loss)
    _file(message.update.model_path, message.content)


def _leave(message: Any) -> None:
    _text("reason", message.reason, MAX_TEXT)


def _transfer(message: Any) -> None:
    parts(message.path)
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
    "file": _transfer,
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


def _file(path: str, content: Any) -> None:
    parts(path)
    _at_least("size", content.size, 1)
    _bytes("sha256", content.sha256, 32)
