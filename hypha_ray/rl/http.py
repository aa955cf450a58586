"""Calls of other programs by HTTP, JSON in and out, and the pauses between attempts.

Each limit holds for the whole call. There is one time for address, connection, redirects and answer, and one size for
the answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import threading
import urllib.request
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, TypeVar

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientPayloadError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    InvalidURL,
    TCPConnector,
)
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from hypha_ray.errors import first_line, line_of
from hypha_ray.texts import redacted

T = TypeVar("T")
MOST_BYTES = 4 << 20
"""Most bytes of an answer whose length doesn't grow with the request."""
_MOST_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_LATER = frozenset({408, 425, 429})
"""Statuses below 500 of a request that may be answered if it is made again."""
_PIECE_BYTES = 1 << 16
_SHOWN_BYTES = 2000
"""Most bytes that are read of an answer with an error's status."""
MOST_REQUESTED_S = 60.0
"""Longest time in seconds of all pauses of one request that the other side asks for."""
_FIRST_S = 0.5
_LONGEST_S = 30.0


class _Background:
    """Loop that begins with the first coroutine, and runs as long as the process."""

    def __init__(self) -> None:
        self._begin_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop."""
        with self._begin_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True).start()
            return self._loop


_background = _Background()


def _forget_loop() -> None:
    """Forget the parent's loop in a forked process, which hasn't its thread."""
    global _background  # noqa: PLW0603
    _background = _Background()


os.register_at_fork(after_in_child=_forget_loop)


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, or raise its error. Threads may wait for many at a time.

    Unlike `asyncio.run`, this doesn't wait for threads in which names of hosts are still looked up.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _background.loop())
    try:
        return future.result()
    finally:
        future.cancel()


class Unreachable(Exception):
    """There was no answer, or one that asks to try again later."""

    retry_after_s: float | None = None
    """Time in seconds until the next attempt that the other side asks for; None if it asks for none."""


class TooLate(Exception):
    """There was no whole answer in time."""


class Refused(Exception):
    """The answer is that the request is wrong, or the answer can't be taken: a redirect, too long, or not JSON."""

    status: int | None = None
    """Status of the answer; None if the request succeeded, but the answer is too long or not JSON."""


@dataclass(frozen=True, slots=True)
class _Request:
    """Request that may be redirected."""

    url: URL
    body: bytes | None
    """Body to post; None: a page is read."""
    headers: Mapping[str, str]


def call(
    url: str,
    payload: Mapping[str, Any] | None,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    most_bytes: int = MOST_BYTES,
) -> Any:
    """Post a payload, or get a page without one; return the answer, and None if it is empty.

    Proxies are those of the environment, with none for this machine itself. A post isn't redirected. A page is looked
    for at up to five further addresses, never at one without encryption after one with it. Headers are for the origin
    of the first address alone.

    Args:
        url: address.
        payload: value to post as JSON; None: nothing is posted.
        timeout_s: longest time until the whole answer is there.
        headers: headers beside those that JSON needs.
        most_bytes: most bytes of the answer.

    Raises:
        Unreachable: no answer, or a status that means an error of the server.
        TooLate: no whole answer in time.
        Refused: a status that means a wrong request, or an answer that is too long, elsewhere, or not JSON.

    """
    body: bytes | None = None
    if payload is not None:
        body = json.dumps(payload).encode()
    all_headers = {"Content-Type": "application/json", **(headers or {})}
    try:
        request = _Request(URL(url, encoded=url.isascii()), body, all_headers)
        text = wait_for(_answer(request, timeout_s, most_bytes))
    except TimeoutError:
        raise TooLate(f"no answer in {timeout_s:g} s") from None
    except InvalidURL as error:
        raise Refused(line_of(error, url)) from None
    except ClientConnectorError as error:
        raise Unreachable(_connection_problem(error)) from None
    except (ClientError, OSError) as error:
        raise Unreachable(line_of(error, url)) from None
    except ValueError as error:  # An address or a proxy that is none.
        raise Refused(line_of(error, url)) from None
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        raise Refused("an answer that isn't JSON") from None


def _connection_problem(error: ClientConnectorError) -> str:
    """Return the reason why there is no connection, which asyncio's own text lacks."""
    error_number = error.os_error.errno or 0
    reason = os.strerror(error_number) if error_number > 0 else first_line(error.os_error)
    return f"{error.host}:{error.port} can't be reached: {reason}"


async def _answer(request: _Request, timeout_s: float, most_bytes: int) -> bytes:
    """Return the body of the answer, after any redirects."""
    # Other limits of aiohttp are off: they are of single parts, and the whole may take longer than each of them.
    no_limit = ClientTimeout(total=None, sock_connect=None)
    connector = TCPConnector(resolver=ThreadedResolver(), force_close=True)
    async with (
        asyncio.timeout(timeout_s),
        ClientSession(connector=connector, cookie_jar=DummyCookieJar(), timeout=no_limit) as session,
    ):
        for _ in range(_MOST_REDIRECTS + 1):
            method = "GET" if request.body is None else "POST"
            async with session.request(
                method,
                request.url,
                data=request.body,
                headers=request.headers,
                allow_redirects=False,
                proxy=_proxy(request.url),
            ) as answer:
                if answer.status not in _REDIRECTS:
                    return await _body(answer, request, most_bytes)
                request = _redirect(request, answer)
    raise Refused(f"more than {_MOST_REDIRECTS} redirects")


def _redirect(request: _Request, answer: ClientResponse) -> _Request:
    """Return the request for the address of a redirect; credentials aren't sent to another origin.

    Raises:
        Refused: the request isn't to be redirected, or not to there.

    """
    location = answer.headers.get("Location", "")
    target = request.url.join(URL(location))
    shown_target = redacted(str(target))[:300]
    refused = Refused(f"status {answer.status}: a redirect to {shown_target}")
    refused.status = answer.status
    insecure = request.url.scheme == "https" and target.scheme != "https"
    if request.body is not None or insecure or target.scheme not in ("http", "https"):
        raise refused
    if target.origin() == request.url.origin():
        return replace(request, url=target)
    return replace(request, url=target.with_user(None), headers={})


async def _body(answer: ClientResponse, request: _Request, most_bytes: int) -> bytes:
    """Return the body of an answer that is no redirect."""
    if not 200 <= answer.status < 300:
        raise _error_of(answer, await _error_body(answer))
    text = await _read(answer, most_bytes + 1)
    if len(text) > most_bytes:
        raise Refused(f"an answer of more than {most_bytes} bytes")
    if request.body is not None and answer.content_length is None and not text:
        # A server that dies after its headers ends the connection, as one does whose answer has no length.
        raise Unreachable("an answer that ends after its headers")
    return text


async def _read(answer: ClientResponse, most_bytes: int) -> bytes:
    """Return the first bytes of a body."""
    pieces = []
    size_bytes = 0
    while size_bytes < most_bytes and (piece := await answer.content.read(min(_PIECE_BYTES, most_bytes - size_bytes))):
        pieces.append(piece)
        size_bytes += len(piece)
    return b"".join(pieces)


async def _error_body(answer: ClientResponse) -> bytes:
    """Return the first bytes of an error's body, which may be cut off."""
    try:
        return await _read(answer, _SHOWN_BYTES)
    except ClientPayloadError:
        return b""


def _error_of(answer: ClientResponse, text: bytes) -> Unreachable | Refused:
    words = text.decode(errors="replace").split()
    shown_text = " ".join(words)[:300]
    message = f"status {answer.status}: {shown_text}"
    if answer.status >= 500 or answer.status in _LATER:
        unreachable = Unreachable(message)
        unreachable.retry_after_s = retry_after_s(answer.headers)
        return unreachable
    refused = Refused(message)
    refused.status = answer.status
    return refused


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the time in seconds that an answer asks to wait, as a number or up to a date; None if it names none."""
    text = headers.get("Retry-After", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        until = _date(text)
        if until is None:
            return None
        # By the other side's own clock, if its answer has the time: the two may differ.
        now = _date(headers.get("Date", "")) or datetime.now(UTC)
        seconds = (until - now).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _date(text: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def _proxy(url: URL) -> str | None:
    """Return the environment's proxy for an address; None: it is asked without one."""
    host = url.host or ""
    proxies = urllib.request.getproxies()
    if is_this_machine(host) or _is_within(host, proxies.get("no", "")):
        return None
    if urllib.request.proxy_bypass(f"{host}:{url.port}"):
        return None
    return proxies.get(url.scheme) or proxies.get("all")


def _is_within(host: str, names: str) -> bool:
    """Whether a host is an address in one of the networks among names, such as 10.0.0.0/8."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    for name in names.split(","):
        try:
            if address in ip_network(name.strip(), strict=False):
                return True
        except ValueError:  # The name isn't the address of a network.
            continue
    return False


def is_this_machine(host: str) -> bool:
    """Whether a host is a loopback address or its name."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address: IPv4Address | IPv6Address = ip_address(name.partition("%")[0])
    except ValueError:
        try:
            address = IPv4Address(socket.inet_aton(name))  # Short forms, such as 127.1.
        except OSError:
            return False
    mapped_address = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped_address or address).is_loopback or address.is_unspecified


class Pauses:
    """Pauses of one request.

    Args:
        attempts: number of attempts after the first one, without those at times that the other side asks for.

    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._attempts_made = 0
        self._requested_s = 0.0

    def after(self, retry_after_s: float | None) -> float | None:
        """Return the time in seconds until the next attempt; None: there is none.

        A pause that the other side asks for uses up no attempt, until `MOST_REQUESTED_S` have passed in such pauses.

        Args:
            retry_after_s: time that the other side asks for; None if it asks for none.

        """
        doublings = min(self._attempts_made, 10)
        usual_s = min(_LONGEST_S, _FIRST_S * 2.0**doublings)
        left_s = MOST_REQUESTED_S - self._requested_s
        if self._attempts and retry_after_s is not None and left_s > 0:
            pause_s = min(max(retry_after_s, usual_s), left_s)
            self._requested_s += pause_s
            return pause_s
        if self._attempts_made >= self._attempts:
            return None
        self._attempts_made += 1
        return usual_s

    def begin_anew(self) -> None:
        """Allow all attempts again, because something was reached."""
        self._attempts_made = 0
