"""An object store of S3's kind on this machine that refuses as it is told, and otherwise keeps files in memory."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import s3fs

from tests.support.http_servers import LocalServer, QuietHandler

ANSWERS = {
    "expired as 400": (400, "ExpiredToken", "The provided token has expired."),
    "expired as 403": (403, "ExpiredToken", "The provided token has expired."),
    "skewed": (
        403,
        "RequestTimeTooSkewed",
        "The difference between the request time and now is too large.",
    ),
    "another region": (400, "AuthorizationHeaderMalformed", "the region is wrong"),
    "unknown key": (403, "InvalidAccessKeyId", "The key does not exist."),
    "wrong secret": (403, "SignatureDoesNotMatch", "The signature does not match."),
    "denied": (403, "AccessDenied", "Access Denied"),
}
"""Status, code and message of each refusal, as object stores give them."""
NO_CHECKSUMS = (501, "NotImplemented", "A header you provided implies functionality that is not implemented.")


@dataclass
class Store:
    """Content of each file by bucket and key; what is refused; and methods of the requests."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    refuses: str = ""
    """Name of a refusal of all requests; "checksums" refuses those headers alone."""
    asked: list[str] = field(default_factory=list)


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def do_GET(self) -> None:
        if self._is_refused():
            return
        url = urllib.parse.urlsplit(self.path)
        key, query = urllib.parse.unquote(url.path).strip("/"), urllib.parse.parse_qs(url.query)
        if "list-type" in query:
            self._list(key, query.get("prefix", [""])[0])
        elif "/" not in key:
            self._answer(200, b"")
        elif key in self.store.files:
            self._answer(200, self.store.files[key])
        else:
            self._refuse(404, "NoSuchKey", "The specified key does not exist.")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        data = self.body()
        if not self._is_refused():
            self.store.files[urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")] = data
            self._answer(200, b"", ETag='"x"')

    def do_DELETE(self) -> None:
        self.store.files.pop(self.path.strip("/"), None)
        self._answer(204, b"")

    def _is_refused(self) -> bool:
        self.store.asked.append(self.command)
        summed = any(name.lower().startswith(("x-amz-checksum", "x-amz-trailer")) for name in self.headers)
        if self.store.refuses == "checksums" and summed:
            self._refuse(*NO_CHECKSUMS)
        elif self.store.refuses in ANSWERS:
            self._refuse(*ANSWERS[self.store.refuses])
        else:
            return False
        return True

    def _list(self, bucket: str, prefix: str) -> None:
        names = [name.removeprefix(f"{bucket}/") for name in sorted(self.store.files)]
        rows = "".join(
            f"<Contents><Key>{name}</Key><Size>{len(self.store.files[f'{bucket}/{name}'])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in names
            if name.startswith(prefix)
        )
        self._answer(200, f"<ListBucketResult><Name>{bucket}</Name>{rows}</ListBucketResult>".encode())

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        """Answer; as HEAD gets no body, the code of an error is lost then."""
        self.answer(status, body, **{"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **headers})


@contextmanager
def refusing_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store that this process finds by its environment."""
    store = Store()
    handler = type("Handler", (_Handler,), {"store": store})
    with LocalServer(handler) as server:
        store.port = server.server_port
        environment = {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            yield store
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
