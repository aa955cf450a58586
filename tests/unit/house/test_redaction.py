"""Secrets of URLs: they are in no text that is shown, written or sent, and a run that needs one says so."""

from __future__ import annotations

import json
import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from hypha_ray.config import Job
from hypha_ray.config.load import differences, load, require_secrets, resolved_toml
from hypha_ray.errors import ConfigError, TryAgainError
from hypha_ray.store.directory import RunDirectory
from hypha_ray.store.mirror import Mirror, fetch
from hypha_ray.telemetry.sinks.aim import local
from hypha_ray.telemetry.sinks.base import build
from hypha_ray.texts import is_redacted, redacted, redacted_tree, secrets_of
from hypha_ray.worker.bridged.process import job_definition

MIRROR = "sftp://me:s3cr3t@backup/runs"
HIDDEN = "sftp://me:***@backup/runs"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (MIRROR, HIDDEN),
        ("see sftp://me:s3cr3t@backup, and ftp://a:b@c.", "see sftp://me:***@backup, and ftp://a:***@c."),
        ("s3://AKIA:s3cr3t/s3cr3t+s@bucket/x", "s3://AKIA:***@bucket/x"),
        ("s3://key:s3@cr3t@bucket/x", "s3://key:***@bucket/x"),
        ("redis://:s3cr3t@host/0", "redis://:***@host/0"),
        ("simplecache::s3://k:s3cr3t@b/x", "simplecache::s3://k:***@b/x"),
        ("https://s3cr3t@github.com/a/b", "https://***@github.com/a/b"),
        ("https://me:s3cr3t@host:8080/x", "https://me:***@host:8080/x"),
        ("https://host/x?token=s3cr3t&sig=s3%2Fcr3t#key=s3", "https://host/x?token=***&sig=***#key=***"),
        ("https://host/x?s3cr3t", "https://host/x?***"),
        ("'https://host/x?token=s3cr3t'", "'https://host/x?token=***'"),
        ("/home/me/s3:/key:s3cr3t@bucket/x isn't there", "/home/me/s3:/key:***@bucket/x isn't there"),
        ("sftp://me@backup/runs", "sftp://me@backup/runs"),
        ("C:/Users/me", "C:/Users/me"),
        ("https://host:8080/a/@b", "https://host:8080/a/@b"),
        ("file:///a/b@c", "file:///a/b@c"),
        ("https://host/docs#part", "https://host/docs#part"),
        ("me:s3cr3t@backup is no URL", "me:s3cr3t@backup is no URL"),
    ],
)
def test_secrets_of_urls_are_hidden_and_nothing_else(text: str, shown: str) -> None:
    assert redacted(text) == shown and redacted(shown) == shown
    assert is_redacted(shown) == (text != shown)


def test_secrets_of_a_url_are_known_as_they_are_written_and_as_they_are_meant() -> None:
    assert secrets_of("https://me:s3%2Fcr3t@host/x?token=abcdef&n=1") == ["s3%2Fcr3t", "s3/cr3t", "abcdef"]
    assert secrets_of("sftp://me@backup/runs") == []
    assert secrets_of("http://me:s3cr3t@[bad/d") == ["s3cr3t"]
    assert redacted_tree({"a": [MIRROR, 1, None], "b": {"c": (MIRROR,)}}) == {
        "a": [HIDDEN, 1, None],
        "b": {"c": [HIDDEN]},
    }


def job_file(folder: Path, **tables: dict[str, Any]) -> Path:
    known = {"run": {"name": "r", "dir": str(folder / "runs")}, "checkpoint": {"mirror": MIRROR}, **tables}
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(known))
    path.chmod(0o600)
    return path


EVERYWHERE = {
    "model": {"repository": "https://hub/m?token=s3cr3t"},
    "preprocessor": {"repository": "https://s3cr3t@hub/m"},
    "dataset": {"path": "s3://key:s3cr3t@bucket/data"},
    "telemetry": {"aim_repository": "aim://me:s3cr3t@host:53800"},
    "bridge": {"commands": ["fetch https://me:s3cr3t@host/program"]},
}


def test_job_is_written_without_them_whatever_key_they_are_in(tmp_path: Path) -> None:
    job = load(["@", str(job_file(tmp_path, **EVERYWHERE))]).job
    assert job.checkpoint.mirror == MIRROR
    text = resolved_toml(job)
    assert "s3cr3t" not in text and tomllib.loads(text)["checkpoint"]["mirror"] == HIDDEN
    assert "s3cr3t" not in json.dumps(job_definition(job.model_copy(update={"resources": job.resources}), 0))
    (tmp_path / "again.toml").write_text(text)
    assert differences(job, load(["@", str(tmp_path / "again.toml")]).job) == (), (
        "the same command goes on with the run"
    )


def test_former_job_file_of_a_run_loses_them_too(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    directory.configure("a = 1\n")
    directory.config.write_text(f"mirror = '{MIRROR}'\n")
    directory.configure("a = 2\n")
    assert (directory.path / "config.attempt_000.toml").read_text() == f"mirror = '{HIDDEN}'\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [("checkpoint.mirror", "sftp://me:***@backup/runs"), ("model.repository", "https://hub/m?token=***")],
)
def test_run_whose_url_lost_its_secret_says_what_it_needs(key: str, value: str) -> None:
    table, name = key.split(".")
    with pytest.raises(ConfigError, match=rf"CFG104.*{key} needs the secret.*FSSPEC_<PROTOCOL>_PASSWORD"):
        require_secrets(Job.model_validate({table: {name: value}}))
    for whole in (MIRROR, "sftp://me@backup/runs", "/backup"):
        require_secrets(Job.model_validate({"checkpoint": {"mirror": whole}}))


def resumed(tmp_path: Path, *arguments: str) -> Job:
    directory = RunDirectory(tmp_path / "r")
    directory.configure(resolved_toml(Job.model_validate({"run": {"name": "r"}, "checkpoint": {"mirror": MIRROR}})))
    return load(arguments, lambda wanted, name, parent: directory.path).job


def test_resumed_run_takes_the_secret_from_what_it_is_resumed_with(tmp_path: Path) -> None:
    job = resumed(tmp_path, "--resume", "r")
    assert job.checkpoint.mirror == HIDDEN
    with pytest.raises(ConfigError, match="CFG104"):
        require_secrets(job)
    by_file = resumed(tmp_path, "--resume", "r", "@", str(job_file(tmp_path)))
    by_flag = resumed(tmp_path, "--resume", "r", "--checkpoint.mirror", "sftp://me@backup/runs")
    by_url = resumed(tmp_path, "--resume", f"{MIRROR}/r")
    assert [one.checkpoint.mirror for one in (by_file, by_flag, by_url)] == [MIRROR, "sftp://me@backup/runs", MIRROR]
    for one in (by_file, by_flag, by_url):
        require_secrets(one)
    assert resumed(tmp_path, "--resume", "sftp://me:s3cr3t@elsewhere/runs/r").checkpoint.mirror == HIDDEN


def test_note_says_who_can_read_it(tmp_path: Path) -> None:
    file = job_file(tmp_path)
    assert any("CFG101" in note and "isn't stored" in note for note in load(["@", str(file)]).notes)
    file.chmod(0o644)
    for arguments in (["@", str(file)], ["--checkpoint.mirror", MIRROR]):
        (note,) = (note for note in load(arguments).notes if "CFG101" in note)
        assert "checkpoint.mirror has a secret in a URL" in note and "mode 0600" in note and "s3cr3t" not in note


def test_records_events_and_logs_have_none(tmp_path: Path) -> None:
    sinks = build(tmp_path, "r", ["jsonl"])
    sinks.start({"checkpoint": {"mirror": MIRROR}})
    sinks.record({"kind": "step", "note": MIRROR, "more": {"urls": [MIRROR]}})
    sinks.event({"kind": "problem", "text": f"the copy to {MIRROR} failed", "error": OSError(MIRROR)})
    sinks.summary({"mirror": MIRROR})
    sinks.close()
    RunDirectory(tmp_path).begin_attempt()
    try:
        raise OSError(f"can't reach {MIRROR}")
    except OSError:
        logging.getLogger("hypha_ray").exception("mirror %s", MIRROR)
    texts = {path.name: path.read_text() for path in tmp_path.rglob("*.*") if path.is_file()}
    assert texts.keys() == {"metrics.jsonl", "events.jsonl", "summary.json", "attempt_001.log"}
    for name, text in texts.items():
        assert "s3cr3t" not in text and HIDDEN in text, name


def test_errors_have_none(tmp_path: Path) -> None:
    error = ConfigError("X1", f"{MIRROR} is wrong", got=MIRROR, allowed="x", fix=f"try {MIRROR}")
    assert "s3cr3t" not in str(error) and str(error).count(HIDDEN) == 3
    with pytest.raises(Exception, match=r"SEC002.*aim://me:\*\*\*@host:53800"):
        local("aim://me:s3cr3t@host:53800")
    for flag, value in (
        ("--rounds.update_rounds", "https://me:s3cr3t@host/"),
        ("--telemetry.status_bridge", "me:s3cr3t@host:80"),
        ("--telemetry.status_bridge", "s3cr3t@host:80"),
    ):
        with pytest.raises(ConfigError, match=r"CFG00[23]") as caught:
            load([flag, value])
        assert "me:s3cr3t" not in str(caught.value)


class Talkative:
    """A file system whose errors repeat all that it was given."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self, *_: object, **__: object) -> None:
        raise OSError(self._text)


@pytest.mark.parametrize("text", [f"no route to {MIRROR}/r", "user me, password s3cr3t: refused"])
def test_error_of_a_mirror_that_repeats_a_password_is_told_without_it(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsspec.core.url_to_fs", Talkative(text))
    problem = Mirror(MIRROR, tmp_path).push(0, 1)
    assert problem is not None and "s3cr3t" not in problem and "***" in problem and "backup/runs" in problem
    with pytest.raises(TryAgainError) as caught:
        fetch(f"{MIRROR}/r", tmp_path / "copy")
    assert "s3cr3t" not in str(caught.value) and "backup/runs/r" in str(caught.value)


@pytest.mark.parametrize(
    "flag",
    [
        "dataset.path=http://me:s3cr3t@[bad/d",
        "checkpoint.mirror=http://me:s3cr3t@[bad/d",
        "checkpoint.mirror=sftp://me:s3cr3t@host:port/d",
        "rl.reward.judge.url=http://me:s3cr3t@[bad/v1",
        "rl.reward.judge.url=http://[bad/v1",
        "rl.reward.judge.url=http://host:99999/v1",
        'rl.generation.server.urls=["http://me:s3cr3t@[bad/v1"]',
    ],
)
def test_a_url_that_is_none_is_one_error_without_its_secret(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"CFG003.*{flag.partition('=')[0]}") as raised:
        load([*([] if "dataset" in flag else ["--dataset.path", "unused"]), f"--{flag}"])
    assert "s3cr3t" not in str(raised.value)
