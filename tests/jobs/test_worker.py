"""`jobs/worker.py` where it can't join: one line, an exit code, no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hypha_ray.bridge.access import make_token
from hypha_ray.bridge.channel import Listener


@pytest.fixture
def token(tmp_path: Path) -> Path:
    make_token(tmp_path / "token")
    return tmp_path / "token"


def refused(run_job: Any, *arguments: object) -> tuple[int, str]:
    done = run_job("--patience-s", 0, *arguments, script="worker", env={"HYPHA_BRIDGE_TOKEN_FILE": ""})
    assert done.stdout == "" and "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    return done.returncode, line


def test_worker_without_a_token_or_with_one_that_others_may_read_is_refused(run_job: Any, token: Path) -> None:
    code, line = refused(run_job, "--connect", "127.0.0.1:1")
    assert code == 2 and line.startswith("error[CFG021]: no file with the token.")
    words = ("--connect", "127.0.0.1:1", "--token-file", token, "--authority", "missing.pem")
    code, line = refused(run_job, *words)
    assert code == 2 and line.startswith("error[SEC005]: certificates missing.pem can't be used")
    token.chmod(0o644)
    code, line = refused(run_job, "--connect", "127.0.0.1:1", "--token-file", token)
    assert code == 4 and line.startswith(f"error[AUTH011]: {token}: others may read this token")


@pytest.mark.parametrize(("address", "code", "error"), [("127.0.0.1", 2, "CFG020"), ("192.0.2.1:1", 2, "SEC001")])
def test_worker_that_is_sent_nowhere_or_without_tls_is_refused(
    address: str, code: int, error: str, run_job: Any, token: Path
) -> None:
    found, line = refused(run_job, "--connect", address, "--token-file", token)
    assert found == code and line.startswith(f"error[{error}]: ")


def test_worker_whom_nobody_awaits_may_try_again(run_job: Any, token: Path) -> None:
    code, line = refused(run_job, "--connect", "127.0.0.1:1", "--token-file", token)
    assert code == 75 and line.startswith("error[NET010]: no process can be reached at 127.0.0.1:1")


def test_worker_with_another_token_is_refused(run_job: Any, token: Path) -> None:
    listener = Listener("127.0.0.1:0", b"6" * 64, 5.0)
    code, line = refused(run_job, "--connect", listener.address, "--token-file", token)
    listener.close()
    assert code == 4 and line.startswith("error[AUTH002]: the driver says: the trainer has another token")
