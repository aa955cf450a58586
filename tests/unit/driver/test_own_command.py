"""The command of a process, as a user types it."""

from __future__ import annotations

import sys

import pytest

from hypha_ray.driver.start import own_command

SECRET = ["--dataset.path", "https://me:s3cret@host/d?token=abc"]
HIDDEN = ["--dataset.path", "https://me:***@host/d?token=***"]


@pytest.mark.parametrize(
    ("words", "script", "arguments", "expected"),
    [
        (
            ["python", "jobs/diloco.py"],
            "jobs/diloco.py",
            ["@", "job.toml"],
            ["python", "jobs/diloco.py", "@", "job.toml"],
        ),
        (["python3", "-u", "mine.py"], "mine.py", ["--lr", "3"], ["python3", "mine.py", "--lr", "3"]),
        (["python", "/env/bin/hypha-ray", "grpo"], "/lib/jobs/grpo.py", ["@", "x"], ["hypha-ray", "grpo", "@", "x"]),
        (["python", "-m", "hypha_ray"], "/lib/jobs/grpo.py", ["x"], ["python", "-m", "hypha_ray", "grpo", "x"]),
        (["python", "jobs/diloco.py"], "jobs/diloco.py", SECRET, ["python", "jobs/diloco.py", *HIDDEN]),
    ],
    ids=["script", "options of Python", "installed", "module", "secrets"],
)
def test_command_is_what_a_user_typed_without_secrets(
    monkeypatch: pytest.MonkeyPatch, words: list[str], script: str, arguments: list[str], expected: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr(sys, "orig_argv", [*words, *arguments])
    assert own_command() == expected
