"""Uploads to a hub: by the hub's own client, checked before a start, and without harm where they fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hypha_ray.driver.saved_models import check_upload, upload
from hypha_ray.errors import AuthenticationError, ConfigError
from tests.support.hub import TOKEN, Hub, hub_of

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")  # huggingface_hub's own use of its HTTP library


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_of() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model" / "adapter").mkdir(parents=True)
    for name, content in {"config.json": "{}", "model.safetensors": "weights", "adapter/a.json": "[]"}.items():
        (tmp_path / "model" / name).write_text(content)
    return tmp_path / "model"


def test_upload_makes_a_private_repository_with_all_files_and_then_changes_it(hub: Hub, model: Path) -> None:
    assert check_upload("owner/tiny") == []
    assert upload(model, "owner/tiny", "model of run a") == "the model is uploaded to owner/tiny"
    files = {"config.json": b"{}", "model.safetensors": b"weights", "adapter/a.json": b"[]"}
    assert hub.repositories == {"owner/tiny": files} and hub.private == {"owner/tiny": True}
    assert hub.by_lfs == {"model.safetensors"}
    (model / "config.json").write_text('{"a": 1}')
    upload(model, "owner/tiny", "model of run b")
    assert hub.repositories["owner/tiny"] == files | {"config.json": b'{"a": 1}'}
    assert hub.messages == ["model of run a", "model of run b"]


def test_upload_of_an_adapter_tells_no_path_of_its_base(hub: Hub, model: Path) -> None:
    described = model / "adapter" / "adapter_config.json"
    for base, told in (("../../../home/someone/base", "base"), ("/home/someone/base", "base"), ("own/er", "own/er")):
        described.write_text(json.dumps({"base_model_name_or_path": base, "r": 4}))
        task = {"type": "causal-lm", "base": {base: "../../someone/base"}}
        (model / "adapter" / "task.json").write_text(json.dumps(task))
        upload(model, "owner/tiny", "model")
        assert json.loads(hub.repositories["owner/tiny"]["adapter/adapter_config.json"]) == {
            "base_model_name_or_path": told,
            "r": 4,
        }
        uploaded_task = json.loads(hub.repositories["owner/tiny"]["adapter/task.json"])
        assert ("base" in uploaded_task) is (told == base)


def test_upload_that_fails_is_told_of_in_a_line_without_the_token(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.broken = True
    failed = upload(model, "owner/tiny", "model")
    assert failed.startswith("the model isn't uploaded to owner/tiny: Server error '500 ") and "\n" not in failed
    assert failed.endswith("; the same command tries again") and TOKEN not in failed
    monkeypatch.delenv("HF_TOKEN")
    assert upload(model, "owner/tiny", "model") == (
        "the model isn't uploaded to owner/tiny, since HF_TOKEN isn't set; the same command tries again"
    )


def test_upload_without_a_valid_token_is_refused_before_a_start(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(AuthenticationError, match=r"HUB002.*refuses HF_TOKEN — got HTTP 401.*export HF_TOKEN") as wrong:
        check_upload("owner/tiny")
    assert "hf_wrong" not in str(wrong.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(
        AuthenticationError, match=r"HUB006.*checkpoint.push = 'owner/tiny' needs a token — got no HF_TO"
    ):
        check_upload("owner/tiny")
    assert hub.repositories == {}


def test_hub_that_is_not_asked_is_refused_and_one_that_does_not_answer_is_noted(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    (note,) = check_upload("owner/tiny")
    assert note.startswith("the hub can't be reached now (") and note.endswith("to owner/tiny is tried at the end")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"CFG011.*checkpoint.push and HF_HUB_OFFLINE exclude each other"):
        check_upload("owner/tiny")
