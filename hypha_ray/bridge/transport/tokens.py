"""Tokens that admit to a job. A token is never sent over the connection: each side proves to have it."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Literal, TypeAlias

from hypha_ray.errors import AuthenticationError

Side: TypeAlias = Literal["driver", "trainer"]

NONCE = 32
"""Size of a nonce in bytes."""
SESSION = 16
"""Size of a session id in bytes."""
_FORM = re.compile(rb"[0-9a-f]{64}\n?")
_FIX = "give the file that the run has written, readable by its owner alone: chmod 600"


def make_token(path: Path) -> bytes:
    """Write a new token of 256 bits to a new file that only its owner can read; returns the token."""
    token = secrets.token_hex(32).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(token + b"\n")
    return token


def read_token(path: Path) -> bytes:
    """Read a token from a file.

    Raises:
        AuthenticationError: AUTH010 no such file, AUTH011 others may read it, AUTH012 not a token.

    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(128)
    except OSError as error:
        raise AuthenticationError("AUTH010", f"{path}: no token", error.strerror or "", fix=_FIX) from None
    if mode & 0o077:
        raise AuthenticationError("AUTH011", f"{path}: others may read this token", f"{mode:04o}", "0600", _FIX)
    if not _FORM.fullmatch(content):
        raise AuthenticationError("AUTH012", f"{path}: not a token", allowed="64 hexadecimal digits", fix=_FIX)
    return content.strip()


def prove(token: bytes, side: Side, session: bytes, driver_nonce: bytes, trainer_nonce: bytes) -> bytes:
    """Proof that a side has the token: HMAC-SHA256 of its name and both nonces (RFC 2104)."""
    said = b"hypha-bridge 1 " + side.encode() + session + driver_nonce + trainer_nonce
    return hmac.new(token, said, hashlib.sha256).digest()


def proves(proof: bytes, expected: bytes) -> bool:
    """Whether a proof is the expected one, compared in constant time."""
    return hmac.compare_digest(proof, expected)
