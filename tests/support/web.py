"""Servers on this machine that have a dataset: plain HTTP that counts requests, and S3."""

from __future__ import annotations

import functools
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import fsspec
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from tests.support.http_servers import LocalServer, QuietHandler


@dataclass
class Web:
    """An HTTP server of a folder; `fetched` counts its answers with content by path, `statuses` overrides answers."""

    url: str
    fetched: Counter[str] = field(default_factory=Counter)
    statuses: dict[str, list[int]] = field(default_factory=dict)
    """Statuses of the next answers for a path, which are errors; then come real ones."""


@contextmanager
def web_of(folder: Path) -> Iterator[Web]:
    """Serve a folder by HTTP, with listings, as `python -m http.server` does."""

    class Handler(QuietHandler, SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/").partition("?")[0]
            statuses = web.statuses.get(name)
            if statuses:
                self.send_error(statuses.pop(0))
                return
            web.fetched[name] += 1
            super().do_GET()

    handler = functools.partial(Handler, directory=str(folder))
    with LocalServer(handler) as server:
        web = Web(server.url)
        yield web


@contextmanager
def s3_of(monkeypatch: pytest.MonkeyPatch, bucket: str = "bucket") -> Iterator[fsspec.AbstractFileSystem]:
    """An S3 server with an empty bucket, which this process and its children find by their environment."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        fs = fsspec.filesystem("s3")
        fs.mkdir(bucket)
        yield fs
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
