"""Reads of data by HTTP: redirects, limits of time and size, proxies, and servers that ask for patience."""

from __future__ import annotations

import asyncio
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from fsspec.implementations.http import HTTPFileSystem
from yarl import URL

from hypha_ray import remote_files
from hypha_ray.data import catalogue
from hypha_ray.data.catalogue import LargeError, UrlFolder
from hypha_ray.data.manifest import MOST_BYTES
from hypha_ray.data.storage import DiskCache, UrlFiles
from hypha_ray.errors import HyphaError
from hypha_ray.remote_errors import retry_after_s
from hypha_ray.remote_files import RedirectError, is_loopback, proxy_for
from tests.support.http_servers import LocalServer, QuietHandler

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@dataclass
class Server:
    """A server of HTTP; `seen` has path and headers of each request."""

    url: str
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    @property
    def authorized(self) -> list[bool]:
        """Whether each request had credentials."""
        return ["authorization" in headers for _, headers in self.seen]


@contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            server.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            answer(self)

    with LocalServer(Handler) as made:
        server = Server(made.url)
        yield server


def body(data: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def to(location: str) -> Answer:
    return body(b"", 302, Location=location)


@pytest.fixture
def servers() -> Iterator[Callable[[Answer], Server]]:
    with ExitStack() as stack:
        yield lambda answer: stack.enter_context(serving(answer))


@pytest.fixture(autouse=True)
def _new_clients() -> None:
    """File systems of other tests, which fsspec keeps with their settings, are forgotten."""
    HTTPFileSystem.clear_instance_cache()


def refusal(url: str) -> HyphaError:
    with pytest.raises(HyphaError) as caught:
        UrlFolder(url).read("file")
    return caught.value


def test_redirect_to_another_host_is_followed_without_the_credentials_of_the_first_one(
    servers: Callable[[Answer], Server],
) -> None:
    other = servers(body(b"data"))
    first = servers(to(f"{other.url.replace('127.0.0.1', 'localhost')}/elsewhere"))
    assert UrlFolder(first.url.replace("//", "//me:secret@")).read("file") == b"data"
    assert first.authorized == [True] and other.authorized == [False]


def test_redirect_on_one_host_keeps_its_credentials(servers: Callable[[Answer], Server]) -> None:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        (to("/moved/file") if handler.path == "/file" else body(b"data"))(handler)

    first = servers(answer)
    assert UrlFolder(first.url.replace("//", "//me:secret@")).read("file") == b"data"
    assert first.authorized == [True, True]


def test_headers_of_the_user_stay_with_the_first_host(servers: Callable[[Answer], Server]) -> None:
    other = servers(body(b"data"))
    first = servers(to(f"{other.url}/elsewhere"))

    async def scene() -> bytes:
        client = remote_files.Client(headers={"X-Api-Key": "secret", "Accept": "text/plain"}, cookies={"a": "secret"})
        try:
            async with client.get(first.url) as answer:
                return bytes(await answer.read())
        finally:
            await client.close()

    assert asyncio.run(scene()) == b"data"
    ((_, sent),) = first.seen
    ((_, passed_on),) = other.seen
    assert sent["x-api-key"] == "secret" and "secret" in sent["cookie"]
    assert passed_on["accept"] == "text/plain" and not any("secret" in value for value in passed_on.values())


@pytest.mark.parametrize(("redirects", "arrives"), [(5, True), (6, False)])
def test_five_redirects_are_followed_and_no_more(
    redirects: int, arrives: bool, servers: Callable[[Answer], Server]
) -> None:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        done = len(server.seen) > redirects
        (body(b"data") if done else to(f"/hop{len(server.seen)}"))(handler)

    server = servers(answer)
    if arrives:
        assert UrlFolder(server.url).read("file") == b"data"
    else:
        error = refusal(server.url)
        assert error.exit_code == 3 and "more than 5 redirects" in error.got
    assert len(server.seen) == 6


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("http://other.example/x?token=s3cret", "from https to http"),
        ("file:///etc/hostname", "isn't of HTTP"),
        ("http://[bad/x", "no URL"),
    ],
)
def test_redirect_that_leads_out_is_not_followed(location: str, told: str) -> None:
    with pytest.raises(RedirectError, match=told):
        remote_files._target(URL("https://host.example/data/file"), location)


def test_redirect_from_http_to_https_is_followed() -> None:
    target = remote_files._target(URL("http://host.example/data/file"), "https://host.example/data/file")
    assert target == URL("https://host.example/data/file")


def test_refused_redirect_shows_no_secret_of_its_target(servers: Callable[[Answer], Server]) -> None:
    error = refusal(servers(to("ftp://other.example/x?token=s3cretword")).url)
    assert "s3cretword" not in str(error) and error.exit_code == 3


def pieces(count: int, pause_s: float, size: int = 1024) -> Answer:
    """An answer in pieces, with a pause before each."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(count * size))
        handler.end_headers()
        for _ in range(count):
            threading.Event().wait(pause_s)
            handler.wfile.write(b"x" * size)
            handler.wfile.flush()

    return answer


def test_slow_answer_that_is_never_silent_has_no_limit_of_time_in_all(
    servers: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own limit of five minutes is a second here, and the answer takes two."""
    short = aiohttp.ClientTimeout(total=1.0, sock_connect=30)
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", short)
    assert len(UrlFolder(servers(pieces(20, 0.1)).url).read("file")) == 20 * 1024


def test_silence_ends_a_read(servers: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "SILENCE_S", 0.2)
    monkeypatch.setattr(catalogue, "WAITS_S", ())
    assert refusal(servers(pieces(2, 30.0)).url).exit_code == 75


@pytest.mark.parametrize("told", [True, False])
def test_file_larger_than_its_limit_is_refused_before_it_is_read(
    told: bool, servers: Callable[[Answer], Server]
) -> None:
    sent: list[int] = []

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        if told:
            handler.send_header("Content-Length", str(50 << 20))
        handler.end_headers()
        try:
            for _ in range(50):
                handler.wfile.write(b" " * (1 << 20))
                sent.append(1)
        except OSError:
            return

    server = servers(answer)
    with pytest.raises(LargeError, match="is too large"):
        UrlFolder(server.url).read("file", 1 << 20)
    assert len(sent) < 30 and len(server.seen) == 1


def test_endless_manifest_is_refused_by_its_limit(servers: Callable[[Answer], Server], tmp_path: Path) -> None:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(MOST_BYTES + 1))
        handler.end_headers()

    with pytest.raises(HyphaError, match="is too large") as caught:
        UrlFiles(servers(answer).url, DiskCache(tmp_path)).manifest()
    assert caught.value.code == "DATA003"


@pytest.mark.slow
@pytest.mark.parametrize(("status", "exit_code"), [(429, None), (503, None), (501, 3)])
def test_server_that_asks_for_patience_gets_it(
    status: int, exit_code: int | None, servers: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "WAITS_S", (0.0,))

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        (body(b"", status, Retry_After="1") if len(server.seen) == 1 else body(b"data"))(handler)

    server, began = servers(answer), time.monotonic()
    if exit_code is None:
        assert UrlFolder(server.url).read("file") == b"data"
        assert time.monotonic() - began >= 1.0
    else:
        assert refusal(server.url).exit_code == exit_code and len(server.seen) == 1


@pytest.mark.parametrize(
    ("told", "seconds"),
    [("7", 7.0), ("3600", 60.0), ("-5", 0.0), ("nan", 0.0), ("soon", 0.0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0)],
)
def test_time_that_a_server_asks_for_has_a_bound(told: str, seconds: float) -> None:
    class Refused(Exception):
        headers = {"Retry-After": told}  # noqa: RUF012

    assert retry_after_s(Refused(), 60.0) == seconds


@pytest.mark.parametrize(
    ("url", "no_proxy", "proxy"),
    [
        ("http://host.example/x", "", "http://proxy.example:3128"),
        ("http://host.example/x", "host.example", None),
        ("http://127.0.0.1:8000/x", "", None),
        ("http://[::1]:8000/x", "", None),
        ("http://localhost:8000/x", "", None),
        ("https://host.example/x", "", None),
    ],
)
def test_proxy_of_the_environment_counts_but_not_for_this_machine(
    url: str, no_proxy: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "HTTP_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://me:secret@proxy.example:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    found = proxy_for(URL(url))
    assert (None if found is None else found.with_user(None)) == (None if proxy is None else URL(proxy))
    assert is_loopback("127.8.9.1") and not is_loopback("10.0.0.1")


def test_read_goes_through_the_proxy_of_the_environment(
    servers: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = servers(body(b"by the proxy"))
    monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:secret@"))
    monkeypatch.setenv("no_proxy", "")
    assert UrlFolder("http://data.example/texts").read("file") == b"by the proxy"
    ((path, headers),) = proxy.seen
    assert path == "http://data.example/texts/file" and "authorization" not in headers
    assert headers["proxy-authorization"] == "Basic bWU6c2VjcmV0"


@pytest.mark.parametrize(
    "url", ["http://me:s3cretword@[bad/d", "s3://me:s3cretword@[bad/d", "http://me:s3cretword@h:x/"]
)
def test_text_that_is_no_url_is_one_error_without_its_secret(url: str, tmp_path: Path) -> None:
    with pytest.raises(HyphaError) as caught:
        UrlFiles(url, DiskCache(tmp_path)).manifest()
    assert (caught.value.code, caught.value.exit_code) == ("CFG003", 2)
    assert "s3cretword" not in str(caught.value)
