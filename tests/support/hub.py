"""A hub on this machine that takes uploads, by the protocol that huggingface_hub speaks."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_servers import LocalServer, QuietHandler

TOKEN = "hf_right"


@dataclass
class Hub:
    """Repositories with their files; large ones come by LFS. Other tokens than `TOKEN` are refused."""

    url: str
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    by_lfs: set[str] = field(default_factory=set)
    """Names of files that came by LFS."""
    broken: bool = False
    """Whether commits are answered by an error of the server."""
    objects: dict[str, bytes] = field(default_factory=dict)

    def commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value, files = line["value"], self.repositories[repository]
            match line["key"]:
                case "header":
                    self.messages.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.objects[value["oid"]]
                    self.by_lfs.add(value["path"])


@contextmanager
def hub_of() -> Iterator[Hub]:
    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.dispatch(b"")

        def do_POST(self) -> None:
            self.dispatch(self.body())

        def do_PUT(self) -> None:
            hub.objects[self.path.rpartition("/")[2]] = self.body()
            self.reply(200, {})

        def dispatch(self, body: bytes) -> None:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.reply(401, {"error": "Invalid credentials"})
            elif self.path == "/api/whoami-v2":
                self.reply(200, {"name": "owner"})
            elif self.path == "/api/repos/create":
                self.create(json.loads(body))
            elif self.path == "/api/validate-yaml":
                self.reply(200, {"errors": [], "warnings": []})
            elif found := re.fullmatch(r"/api/models/(owner/\w+)/preupload/main", self.path):
                large = (".safetensors",)
                files = [one["path"] for one in json.loads(body)["files"]]
                modes = [{"path": path, "uploadMode": "lfs" if path.endswith(large) else "regular"} for path in files]
                self.reply(200, {"files": [mode | {"shouldIgnore": False} for mode in modes]})
            elif re.fullmatch(r"/owner/\w+\.git/info/lfs/objects/batch", self.path):
                self.reply(200, self.batch(json.loads(body)))
            elif hub.broken:
                self.reply(500, {"error": "broken"})
            elif found := re.fullmatch(r"/api/models/(owner/\w+)/commit/main", self.path):
                hub.commit(found[1], [json.loads(line) for line in body.splitlines()])
                self.reply(200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{hub.url}/{found[1]}/commit/0"})
            else:
                self.reply(404, {"error": "unknown"})

        def create(self, wanted: dict[str, Any]) -> None:
            name = f"{wanted.get('organization') or 'owner'}/{wanted['name']}"
            there = name in hub.repositories
            hub.repositories.setdefault(name, {})
            hub.private.setdefault(name, bool(wanted.get("private") or wanted.get("visibility") == "private"))
            self.reply(409 if there else 200, {"url": f"{hub.url}/{name}"})

        def batch(self, wanted: dict[str, Any]) -> dict[str, Any]:
            actions = {one["oid"]: {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}} for one in wanted["objects"]}
            objects = [one | {"actions": actions[one["oid"]]} for one in wanted["objects"]]
            return {"transfer": "basic", "objects": objects}

        def reply(self, status: int, content: dict[str, Any]) -> None:
            self.answer(status, json.dumps(content).encode(), **{"Content-Type": "application/json"})

    with LocalServer(Handler) as server:
        hub = Hub(server.url)
        yield hub
