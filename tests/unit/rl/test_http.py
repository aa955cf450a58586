"""Calls of other programs by HTTP, against servers on real sockets."""

from __future__ import annotations

import http.server
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import trustme

from hypha_ray.rl.http import (
    MOST_REQUESTED_S,
    Pauses,
    Refused,
    TooLate,
    Unreachable,
    call,
    is_this_machine,
    retry_after_s,
)
from tests.support.http_servers import LocalServer, QuietHandler

KEY = {"Authorization": "Bearer sk-secret"}
Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@dataclass
class Site:
    """A server, and the requests that came to it: method, path and key."""

    url: str = ""
    seen: list[tuple[str, str, str | None]] = field(default_factory=list)


@contextmanager
def serving(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[Site]:
    """Serve by a function of the request."""
    site = Site()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.body()
            site.seen.append((self.command, self.path, self.headers["Authorization"]))
            answer(self)

        do_POST = do_CONNECT = do_GET

    server = LocalServer(Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    site.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    with server:
        yield site


def says(value: Any, status: int = 200, **headers: str) -> Answer:
    """Return an answer with a JSON value."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        body = json.dumps(value).encode()
        handler.send_response(status)
        for name, text in headers.items():
            handler.send_header(name.replace("_", "-"), text)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def leads_to(url: str, status: int = 302) -> Answer:
    """Return an answer that names another address."""
    return says(None, status, Location=url)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_post_is_never_redirected(status: int, elsewhere: bool) -> None:
    with serving(says({"taken": True})) as other, ExitStack() as stack:
        target = f"{other.url}/elsewhere" if elsewhere else "/elsewhere"
        first = stack.enter_context(serving(leads_to(target, status)))
        with pytest.raises(Refused, match=f"status {status}: a redirect to .*/elsewhere") as raised:
            call(f"{first.url}/v1", {"prompt": 1}, 20.0, KEY)

        assert raised.value.status == status
        assert first.seen == [("POST", "/v1", "Bearer sk-secret")] and other.seen == []


def test_a_page_is_looked_for_elsewhere_without_the_key() -> None:
    with serving(says({"page": 1})) as other, serving(leads_to(f"{other.url}/page")) as first:
        assert call(first.url, None, 20.0, KEY) == {"page": 1}
        assert other.seen == [("GET", "/page", None)]


def test_a_key_stays_with_its_origin_only() -> None:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        (says(3) if handler.path == "/b" else leads_to("/b"))(handler)

    with serving(answer) as site:
        assert call(f"{site.url}/a", None, 20.0, KEY) == 3
        assert [path for _, path, key in site.seen if key == KEY["Authorization"]] == ["/a", "/b"]


@pytest.mark.parametrize(("redirects", "followed"), [(5, True), (6, False)])
def test_a_page_is_redirected_five_times_at_most(redirects: int, followed: bool) -> None:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        number = int(handler.path[1:])
        (says("here") if number == redirects else leads_to(f"/{number + 1}"))(handler)

    with serving(answer) as site:
        if followed:
            assert call(f"{site.url}/0", None, 20.0) == "here"
        else:
            with pytest.raises(Refused, match="more than 5 redirects"):
                call(f"{site.url}/0", None, 20.0)
        assert len(site.seen) == 6


def test_a_page_with_encryption_is_not_looked_for_without(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    with serving(says(1)) as plain, serving(leads_to(plain.url), tls) as encrypted:
        program = f"from hypha_ray.rl.http import call; call({encrypted.url!r}, None, 20.0)"
        environment = os.environ | {"SSL_CERT_FILE": str(tmp_path / "ca.pem")}
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        assert f"Refused: status 302: a redirect to {plain.url}" in ended.stderr
        assert len(encrypted.seen) == 1 and plain.seen == []


@contextmanager
def trickling(first: bytes, piece: bytes) -> Iterator[tuple[str, threading.Event]]:
    """Serve an answer that goes on until the other side has gone, a piece at a time; the event is set at its end."""
    gone = threading.Event()

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        try:
            handler.wfile.write(first)
            while not gone.wait(0.02):
                handler.wfile.write(piece)
        except OSError:
            gone.set()

    with serving(answer) as site:
        yield site.url, gone
        gone.set()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
        (b"HTTP/1.1 500 Sorry\r\n\r\n", b"x"),
        (b"", b"H"),
    ],
)
def test_a_limit_is_one_of_the_whole_answer(first: bytes, piece: bytes) -> None:
    with trickling(first, piece) as (url, gone):
        began = time.monotonic()
        with pytest.raises((TooLate, Unreachable)):
            call(url, {}, 0.5)
        assert time.monotonic() - began < 30  # It would go on for ever.
        assert gone.wait(30)


@pytest.mark.timeout(60)
def test_redirects_count_towards_the_time() -> None:
    waiting = threading.Event()

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        waiting.wait(0.3)
        leads_to("/again")(handler)

    with serving(answer) as site, pytest.raises(TooLate, match=r"0\.7 s"):
        call(site.url, None, 0.7)


@pytest.mark.timeout(60)
def test_an_answer_without_end_is_read_up_to_a_size() -> None:
    sent = [0]

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                sent[0] += handler.wfile.write(b" " * 65536)
        except OSError:
            return

    with serving(answer) as site:
        with pytest.raises(Refused, match="more than 300000 bytes"):
            call(site.url, {}, 50.0, most_bytes=300_000)
        with pytest.raises(Refused, match="more than 4194304 bytes"):
            call(site.url, {}, 50.0)
    assert sent[0] < 64 << 20


def test_an_answer_of_the_largest_size_is_taken() -> None:
    with serving(says("x" * 98)) as site:
        assert call(site.url, {}, 20.0, most_bytes=100) == "x" * 98
        with pytest.raises(Refused, match="more than 99 bytes"):
            call(site.url, {}, 20.0, most_bytes=99)


def test_json_that_is_nested_without_end_is_refused() -> None:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"[" * 200_000)

    with serving(answer) as site, pytest.raises(Refused, match="isn't JSON"):
        call(site.url, {}, 20.0)


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A proxy that the environment names, which answers everything itself."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with serving(says("by proxy")) as site:
        monkeypatch.setenv("http_proxy", site.url)
        yield site


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.8.9.10"])
def test_this_machine_is_asked_without_a_proxy(proxied: Site, host: str) -> None:
    with serving(says("itself")) as site:
        port = site.url.rpartition(":")[2]
        if host == "127.8.9.10":  # Nothing listens there; what counts is that the proxy isn't asked.
            with pytest.raises(Unreachable):
                call(f"http://{host}:{port}", {}, 20.0, KEY)
        else:
            assert call(f"http://{host}:{port}", {}, 20.0, KEY) == "itself"
    assert proxied.seen == []


def test_other_machines_are_asked_by_the_environments_proxy(proxied: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("http://judge.invalid:8000/v1", {}, 20.0) == "by proxy"
    assert [path for _, path, _ in proxied.seen] == ["http://judge.invalid:8000/v1"]
    for excepted in ("judge.invalid", ".invalid", "judge.invalid:8000", "other,invalid"):
        monkeypatch.setenv("no_proxy", excepted)
        with pytest.raises(Unreachable):
            call("http://judge.invalid:8000/v1", {}, 20.0)
    assert len(proxied.seen) == 1


def test_networks_may_be_excepted_from_the_proxy(proxied: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8, 192.0.2.0/24")
    assert call("http://198.51.100.7/v1", {}, 20.0) == "by proxy"
    with pytest.raises((TooLate, Unreachable)):
        call("http://192.0.2.7:1/v1", {}, 0.3)
    assert len(proxied.seen) == 1


def test_a_proxy_that_refuses_is_told_without_its_password(proxied: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(says("no", 407)) as refusing:
        monkeypatch.setenv("https_proxy", refusing.url.replace("://", "://me:hidden-word@"))
        with pytest.raises((Unreachable, Refused), match="407") as raised:
            call("https://judge.invalid/v1", {}, 20.0)
        assert "hidden-word" not in str(raised.value)
        assert refusing.seen[0][:2] == ("CONNECT", "judge.invalid:443")


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("a.localhost", True),
        ("127.1", True),
        ("::1", True),
        ("::ffff:127.0.0.2", True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("::2", False),
        ("", False),
    ],
)
def test_this_machine_has_several_names(host: str, own: bool) -> None:
    assert is_this_machine(host) == own


@pytest.mark.parametrize("url", ["http://[bad/v1", "http://me:hidden-word@[bad/v1", "http://a:99999/v1", "ftp://a/v1"])
def test_an_address_that_is_none_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises((Refused, Unreachable)) as raised:
        call(url, {}, 5.0)
    assert "hidden-word" not in str(raised.value)


NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"Retry-After": "5"}, 5),
        ({"Retry-After": " 0.5 "}, 0.5),
        ({"Retry-After": "-3"}, 0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": format_datetime(NOW + timedelta(seconds=90), usegmt=True)}, 90),
        ({"Retry-After": format_datetime(NOW - timedelta(seconds=90), usegmt=True)}, 0),
    ],
)
def test_the_time_to_wait_is_a_number_or_a_date(headers: Mapping[str, str], expected: float | None) -> None:
    assert retry_after_s({"Date": format_datetime(NOW, usegmt=True), **headers}) == expected


@pytest.mark.parametrize("status", [429, 503])
def test_an_answer_that_asks_for_patience_says_how_long(status: int) -> None:
    with serving(says({}, status, Retry_After="7")) as site, pytest.raises(Unreachable) as raised:
        call(site.url, {}, 20.0)
    assert raised.value.retry_after_s == 7


def test_pauses_grow_and_end() -> None:
    pauses = Pauses(8)
    assert [pauses.after(None) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, None]


def test_pauses_that_are_asked_for_use_up_no_attempt_until_their_time_is_over() -> None:
    pauses = Pauses(1)
    assert [pauses.after(25.0) for _ in range(5)] == [25, 25, MOST_REQUESTED_S - 50, 0.5, None]
    assert Pauses(0).after(1.0) is None
    assert Pauses(3).after(3600.0) == MOST_REQUESTED_S
    assert Pauses(3).after(0.0) == 0.5
