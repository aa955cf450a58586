"""A server of models and datasets that speaks the part of the Hugging Face hub's protocol that loading takes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.http_servers import LocalServer, QuietHandler

SHA = "0123456789abcdef0123456789abcdef01234567"
"""The only commit of each repository."""
_API = re.compile(r"/api/(models|datasets)/(.+?)(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?")
_FILE = re.compile(r"/(datasets/)?(.+?)/resolve/[^/]+/(.+)")


class _Hub(QuietHandler, SimpleHTTPRequestHandler):
    """Answers from the folders models/NAME and datasets/NAME of its directory."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := _API.fullmatch(path):
            self._describe(*found.groups(default=""))
        elif found := _FILE.fullmatch(path):
            self._send_file(Path(self.directory, "datasets" if found[1] else "models", found[2], found[3]))
        else:
            self.answer(404, b"{}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        asked = self.body().decode()
        found = _API.fullmatch(unquote(urlsplit(self.path).path))
        assert found is not None, self.path
        kind, name = found[1], found[2]
        wanted = json.loads(asked)["paths"] if asked.startswith("{") else parse_qs(asked)["paths"]
        places = [Path(self.directory, kind, name, one) for one in wanted]
        self._answer_json([self._entry(place, kind, name) for place in places if place.exists()])

    def _describe(self, kind: str, name: str, what: str, revision: str, below: str) -> None:
        folder = Path(self.directory, kind, name)
        deep = "recursive=true" in self.path.lower() or what != "tree"
        places = sorted((folder / below).rglob("*") if deep else (folder / below).iterdir()) if folder.is_dir() else []
        if not places:
            self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        elif what == "tree":
            self._answer_json([self._entry(place, kind, name) for place in places])
        else:
            files = [{"rfilename": str(place.relative_to(folder))} for place in places if place.is_file()]
            self._answer_json({"id": name, "sha": SHA, "siblings": files, "private": False, "gated": False, "tags": []})

    def _entry(self, place: Path, kind: str, name: str) -> dict[str, Any]:
        path = str(place.relative_to(Path(self.directory, kind, name)))
        if place.is_dir():
            return {"type": "directory", "path": path, "oid": SHA, "size": 0}
        return {"type": "file", "path": path, "oid": _digest(place), "size": place.stat().st_size}

    def _send_file(self, place: Path) -> None:
        if not place.is_file():
            self.answer(404, b"{}", **{"X-Error-Code": "EntryNotFound"})
            return
        content = place.read_bytes()
        headers = {"ETag": f'"{_digest(place)}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            self.answer(206, content[first : last + 1], **headers)
        else:
            self.answer(200, content, **headers)

    def _answer_json(self, content: Any) -> None:
        self.answer(200, json.dumps(content).encode(), **{"Content-Type": "application/json"})


def _digest(place: Path) -> str:
    return hashlib.sha1(place.read_bytes()).hexdigest()


@contextmanager
def serve_repositories(folder: Path) -> Iterator[str]:
    """Serve the folders models/NAME and datasets/NAME below `folder`; the value for HF_ENDPOINT."""
    with LocalServer(partial(_Hub, directory=str(folder))) as server:
        yield server.url
