"""HTTP servers on this machine, each in a thread of its own, that say nothing on a test's output."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing."""

    def body(self) -> bytes:
        """Read the content of the request."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        """Send an answer with the length of its content; to HEAD, without the content."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


class LocalServer(ThreadingHTTPServer):
    """Serves while its context lasts.

    Args:
        handler: class of handlers, one of which answers each connection.
        port: of this machine; 0: any that is free.

    """

    def __init__(self, handler: Callable[..., BaseHTTPRequestHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *args: Any) -> None:
        self.shutdown()
        self._thread.join()
        super().__exit__(*args)
