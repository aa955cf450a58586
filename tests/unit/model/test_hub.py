import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest
import torch
from huggingface_hub import constants
from pydantic import SecretStr
from safetensors.torch import load_file, save

from hypha_ray.config.schema import Model
from hypha_ray.errors import AuthenticationError, CheckpointError, ConfigError, HubError
from hypha_ray.model.build import build_model, compare_weights, facts
from hypha_ray.model.sources import fetch

SHA = "0123456789abcdef0123456789abcdef01234567"
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 32}


class Hub(BaseHTTPRequestHandler):
    """A hub with one repository, owner/tiny, and a few that refuse."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []
    tokens: ClassVar[set[str | None]] = set()
    refusals: ClassVar[dict[str, tuple[int, str]]] = {
        "owner/nothing": (404, "RepoNotFound"),
        "owner/private": (401, "RepoNotFound"),
        "owner/gated": (403, "GatedRepo"),
        "owner/forbidden": (403, ""),
        "owner/broken": (503, ""),
    }

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.asked.append(path)
        if "owner/" in path:
            self.tokens.add(self.headers.get("Authorization"))
        for repository, (status, code) in self.refusals.items():
            if repository in path:
                return self.answer(status, b"{}", **{"X-Error-Code": code})
        if path == "/api/models/owner/tiny/revision/main":
            return self.answer(200, json.dumps({"id": "owner/tiny", "sha": SHA, "siblings": []}).encode())
        if path == f"/api/models/owner/tiny/tree/{SHA}":
            return self.answer(200, json.dumps([self.entry(name) for name in self.files]).encode())
        name = path.removeprefix(f"/owner/tiny/resolve/{SHA}/")
        if name in self.files:
            return self.answer(200, self.files[name], **{"ETag": f'"{self.entry(name)["oid"]}"', "X-Repo-Commit": SHA})
        return self.answer(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def entry(self, name: str) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": f"{len(name):040x}"}

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    Hub.files, Hub.asked, Hub.tokens = {}, [], set()
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    build_model(Model(config=GPT2), seed=1).save_pretrained(folder)
    return folder


def serve(folder: Path, *leave_out: str, **more: bytes) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in leave_out} | more


def test_fetch_hub_repository_downloads_what_is_needed_and_loads(hub: type[Hub], saved: Path) -> None:
    hub.files = serve(saved, **{"pytorch_model.bin": b"pickle", "modeling.py": b"code", "README.md": b"text"})
    network = build_model(Model(repository="owner/tiny", token=SecretStr("hf_secret")), seed=0)
    original = build_model(Model(config=GPT2), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), original.parameters(), strict=True))
    fetched = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert fetched == {"config.json", "generation_config.json", "model.safetensors"}
    assert hub.tokens == {"Bearer hf_secret"}


def test_chat_templates_with_names_are_fetched_and_other_folders_are_not(hub: type[Hub], saved: Path) -> None:
    templates = "additional_chat_templates"
    others = ("onnx/config.json", "additional/tokenizer.json", f"{templates}/more/a.jinja", f"old/{templates}/a.jinja")
    hub.files = serve(saved, **{f"{templates}/tool_use.jinja": b"tools", **dict.fromkeys(others, b"{}")})
    folder = fetch("owner/tiny", None, None)
    assert (folder / templates / "tool_use.jinja").read_bytes() == b"tools"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"config.json", "generation_config.json", f"{templates}/tool_use.jinja"}


def test_facts_hub_repository_reads_no_weights(hub: type[Hub], saved: Path) -> None:
    hub.files = serve(saved)
    assert facts(Model(repository="owner/tiny")).vocab_size == 32
    assert not any("safetensors" in path for path in hub.asked)


def test_weights_of_a_hub_that_do_not_fit_are_refused_once_they_are_here(hub: type[Hub], saved: Path) -> None:
    wrapped = {f"module.{name}": tensor for name, tensor in load_file(saved / "model.safetensors").items()}
    hub.files = serve(saved, **{"model.safetensors": save(wrapped, metadata={"format": "pt"})})
    model = Model(repository="owner/tiny")
    assert compare_weights(model) == []
    assert not any("safetensors" in path for path in hub.asked)
    with pytest.raises(CheckpointError, match=r"MODEL006.*'module\.'") as refusal:
        build_model(model, seed=0)
    assert refusal.value.exit_code == 5
    with pytest.raises(CheckpointError, match=r"MODEL006.*'module\.'"):
        compare_weights(model)


def test_fetch_offline_with_filled_cache_needs_no_hub(
    hub: type[Hub], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = serve(saved)
    fetch("owner/tiny", None, None, needs_weights=True)
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (fetch("owner/tiny", None, None, needs_weights=True) / "model.safetensors").is_file()
    assert hub.asked == []


def test_fetch_offline_with_half_filled_cache_raises(
    hub: type[Hub], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = serve(saved)
    fetch("owner/tiny", None, None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HUB003"):
        fetch("owner/tiny", None, None, needs_weights=True)


def test_fetch_hub_repository_with_pickled_weights_only_raises(hub: type[Hub], saved: Path) -> None:
    hub.files = serve(saved, "model.safetensors", **{"pytorch_model.bin": b"pickle"})
    with pytest.raises(CheckpointError, match=r"SEC003.*owner/tiny has no safetensors weights") as caught:
        fetch("owner/tiny", None, None, needs_weights=True)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("repository", "error", "exit_code", "text"),
    [
        ("owner/nothing", ConfigError, 2, r"HUB001.*owner/nothing"),
        ("owner/private", AuthenticationError, 4, r"HUB002.*owner/private.*HTTP 401.*HF_TOKEN"),
        ("owner/gated", AuthenticationError, 4, r"HUB002.*HTTP 403.*HF_TOKEN"),
        ("owner/forbidden", AuthenticationError, 4, r"HUB002.*HTTP 403.*HF_TOKEN"),
        ("owner/broken", HubError, 75, r"HUB003.*can't be fetched.*503"),
    ],
)
def test_fetch_hub_refuses_raises(
    hub: type[Hub], repository: str, error: type[Exception], exit_code: int, text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        fetch(repository, None, None)
    assert caught.value.exit_code == exit_code  # type: ignore[attr-defined]
    assert "\n" not in str(caught.value)


def test_fetch_unknown_revision_raises(hub: type[Hub], saved: Path) -> None:
    hub.files = serve(saved)
    with pytest.raises(ConfigError, match=r"HUB001.*no such revision.*'v9'"):
        fetch("owner/tiny", "v9", None)


def test_fetch_offline_mode_names_variable_and_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"HUB003.*owner/tiny.*offline.*HF_HUB_OFFLINE") as caught:
        fetch("owner/tiny", None, None)
    assert str(cache) in str(caught.value)
    assert caught.value.exit_code == 75


def test_fetch_unreachable_hub_raises(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(HubError, match=r"HUB003.*offline"):
            fetch("owner/tiny", None, None)


@pytest.mark.parametrize(
    "repository", ["https://hub.example/owner/tiny", "a/b/c", "owner/ti ny", "x\0y", "-", "s3://b/k"]
)
def test_fetch_malformed_repository_raises(cache: Path, repository: str) -> None:
    with pytest.raises(ConfigError, match="CFG010") as caught:
        fetch(repository, None, None)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("repository", ["/does/not/exist", "./nowhere", "../nowhere", "~/does-not-exist-here"])
def test_fetch_missing_folder_names_its_path(cache: Path, repository: str) -> None:
    with pytest.raises(ConfigError, match=r"HUB001.*model folder doesn't exist") as caught:
        fetch(repository, None, None)
    assert Path(repository).expanduser().name in str(caught.value)


def test_fetch_file_instead_of_folder_raises(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"HUB001.*not a folder"):
        fetch(str(saved / "config.json"), None, None)


def test_fetch_local_folder_is_taken_as_it_is(saved: Path) -> None:
    assert fetch(str(saved), None, None, needs_weights=True) == saved


def test_fetch_local_folder_with_pickled_weights_only_names_them(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"SEC003.*got pytorch_model.bin"):
        fetch(str(tmp_path), None, None, needs_weights=True)
