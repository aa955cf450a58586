"""File systems that fsspec knows, opened for a URL; and the client of HTTP, with its limits and its proxies.

    connect: 30 s      silence: 60 s      in all: no limit, for a large file on a slow link takes its time
    redirects: five at most, none from https to http; another host gets no credentials, headers or cookies of the user

fsspec's file system makes its requests by an object like this one, in place of a session of aiohttp.
"""

from __future__ import annotations

import ipaddress
from base64 import b64encode
from collections.abc import Awaitable, Callable, Generator, Mapping
from functools import partial
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
import fsspec
from yarl import URL

CONNECT_S = 30.0
"""Longest time in seconds until a server accepts a connection."""
SILENCE_S = 60.0
"""Longest time in seconds in which a server sends nothing."""
REDIRECTS = 5
"""Most redirects of one request."""
_MOVED = (301, 302, 303, 307, 308)
_PLAIN = {"accept", "accept-encoding", "range", "user-agent"}
"""Headers that say nothing about the user, in small letters."""


class TooLargeError(Exception):
    """A file that is larger than allowed."""


def open_url(url: str, reads_credentials: bool = False) -> tuple[Any, str]:
    """File system of a URL, and the path there.

    Args:
        url: URL, or a path of this machine.
        reads_credentials: whether to make a new file system, which reads credentials again.

    """
    options: dict[str, Any] = {}
    if reads_credentials:
        options["skip_instance_cache"] = True
    if url.startswith(("http://", "https://")) and "::" not in url:
        options["get_client"] = client
    fs, path = fsspec.core.url_to_fs(url, **options)
    return fs, path


def is_http(fs: Any) -> bool:
    """Whether a file system is one of HTTP."""
    return "http" in _protocols(fs)


def is_s3(fs: Any) -> bool:
    """Whether a file system is an object store of S3's kind."""
    return "s3" in _protocols(fs)


def _protocols(fs: Any) -> tuple[str, ...]:
    protocol = getattr(fs, "protocol", ())
    if isinstance(protocol, str):
        return (protocol,)
    return tuple(protocol)


class RedirectError(Exception):
    """A redirect that isn't followed."""


async def client(loop: Any = None, **options: Any) -> Client:
    """Make a client; options are those of `aiohttp.ClientSession`."""
    return Client(**options)


class Client:
    """Makes requests.

    Args:
        headers: headers for the server that is asked first.
        auth: credentials for it; those of its URL come before them.
        cookies: cookies for it.
        options: further options of `aiohttp.ClientSession`.

    """

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        auth: aiohttp.BasicAuth | None = None,
        cookies: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._headers = dict(headers or {})
        self._cookies = cookies
        if auth is not None:
            self._headers["Authorization"] = auth.encode()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        self._session = aiohttp.ClientSession(**{"timeout": timeout} | options)

    @property
    def _connector(self) -> Any:
        """Connector of the session, which fsspec closes when it is collected."""
        return self._session.connector

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def __getattr__(self, name: str) -> Callable[..., HttpRequest]:
        """Methods of HTTP: get, head, put and so on."""
        if name not in ("get", "head", "put", "post", "delete", "options", "patch"):
            raise AttributeError(name)
        return partial(self.request, name.upper())

    def request(self, method: str, url: str | URL, **options: Any) -> HttpRequest:
        """Begin a request; `limit_bytes` is the largest size of the answer."""
        return HttpRequest(self._followed(method, URL(url), **options))

    async def _followed(
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str] | None = None,
        allow_redirects: bool = True,
        limit_bytes: int | None = None,
        **options: Any,
    ) -> Any:
        """Answer of the server at the end of all redirects."""
        first_origin = url.origin()
        all_headers = self._headers | dict(headers or {})
        if url.user is not None:
            all_headers["Authorization"] = _basic(url)
        plain_headers = {name: value for name, value in all_headers.items() if name.lower() in _PLAIN}
        for _ in range(REDIRECTS + 1):
            credentials: dict[str, Any] = {"headers": plain_headers}
            if url.origin() == first_origin:
                credentials = {"headers": all_headers, "cookies": self._cookies}
            arguments = _by_proxy(url, {**credentials, **options})
            answer = await self._session.request(method, url.with_user(None), allow_redirects=False, **arguments)
            location = None
            if answer.status in _MOVED and allow_redirects:
                location = answer.headers.get("Location")
            if location is None or method not in ("GET", "HEAD"):
                if limit_bytes is None:
                    return answer
                return _Limited(answer, limit_bytes)
            answer.close()
            url = _target(url, location)
        raise RedirectError(f"more than {REDIRECTS} redirects")


class HttpRequest:
    """A request, to be awaited or entered as a session's requests are; leaving it frees the connection."""

    def __init__(self, answer: Awaitable[Any]) -> None:
        self._pending = answer
        self._answer: Any = None

    def __await__(self) -> Generator[Any, Any, Any]:
        """Wait for the answer."""
        return self._pending.__await__()

    async def __aenter__(self) -> Any:
        """Wait for the answer."""
        self._answer = await self._pending
        return self._answer

    async def __aexit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Give the connection back, or close it if its answer wasn't read to the end."""
        if error_type is None:
            self._answer.release()
        else:
            self._answer.close()


class _Limited:
    """An answer whose content has a largest size."""

    def __init__(self, answer: aiohttp.ClientResponse, limit_bytes: int) -> None:
        self._answer = answer
        self._limit_bytes = limit_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answer, name)

    async def read(self) -> bytes:
        """Content of the answer."""
        content_length = self._answer.content_length or 0
        content = bytearray()
        if content_length > self._limit_bytes:
            raise TooLargeError(f"{content_length:,} bytes")
        async for piece in self._answer.content.iter_any():
            content += piece
            if len(content) > self._limit_bytes:
                raise TooLargeError(f"more than {self._limit_bytes:,} bytes")
        return bytes(content)


def proxy_for(url: URL) -> URL | None:
    """Proxy that the environment names for a URL; none for this machine itself."""
    host = url.host or ""
    address = getproxies().get(url.scheme)
    if address is None or is_loopback(host) or proxy_bypass(host):
        return None
    return URL(address if "://" in address else f"http://{address}")


def _by_proxy(url: URL, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a request, with the proxy that it goes through."""
    proxy = proxy_for(url)
    if proxy is None:
        return arguments
    credentials = {} if proxy.user is None else {"Proxy-Authorization": _basic(proxy)}
    if url.scheme == "http":  # The proxy reads the request itself; otherwise a request of its own opens a tunnel.
        headers = {**arguments["headers"], **credentials}
        return {**arguments, "headers": headers, "proxy": proxy.with_user(None)}
    return {**arguments, "proxy": proxy.with_user(None), "proxy_headers": credentials}


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _basic(url: URL) -> str:
    """Header for user and password of a URL."""
    pair = f"{url.user or ''}:{url.password or ''}"
    encoded = b64encode(pair.encode()).decode()
    return f"Basic {encoded}"


def _target(url: URL, location: str) -> URL:
    """URL that a redirect leads to.

    Raises:
        RedirectError: it isn't followed.

    """
    try:
        target = url.join(URL(location))
    except ValueError:
        raise RedirectError(f"a redirect to {location}, which is no URL") from None
    if target.scheme not in ("http", "https") or not target.host:
        raise RedirectError(f"a redirect to {target}, which isn't of HTTP")
    if (url.scheme, target.scheme) == ("https", "http"):
        raise RedirectError(f"a redirect from https to {target.with_user(None)}, which isn't encrypted")
    return target
