"""Webhooks and programs: each alert reaches a real server or program once; one that hangs or fails costs nothing."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config.training import Alert
from hypha_ray.telemetry.sinks import notifications as module
from hypha_ray.telemetry.sinks.base import Composite, Files, build
from hypha_ray.telemetry.sinks.files import EVENTS, read_jsonl
from tests.support.http_servers import LocalServer, QuietHandler

SECRET = "T0KEN-s3cr3t"
EVENT: dict[str, Any] = {
    "wall_time": "2026-01-02T03:04:05.678+00:00",
    "kind": "alert",
    "monotonic_s": 12.5,
    "alert": "loss > 5",
    "metric": "loss",
    "op": ">",
    "value": 7.5,
    "limit": 5.0,
    "round": 3,
    "worker": None,
    "text": "loss is 7.5, above 5, after round 4",
}


class Hook:
    """A web server that keeps the requests it gets, and answers with the given statuses, 200 after the last of them."""

    def __init__(self, server: LocalServer) -> None:
        self.host = f"127.0.0.1:{server.server_port}"
        self.url = f"http://{self.host}/hooks/{SECRET}?key={SECRET}"
        self.statuses: list[int] = []
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.answers = threading.Event()
        self.answers.set()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.body())
            hook.requests.append((self.path, self.headers["Content-Type"], body))
            hook.answers.wait(60)
            self.answer(hook.statuses.pop(0) if hook.statuses else 200, Location="/elsewhere")

    monkeypatch.setattr(module, "PAUSES_S", (0.01, 0.02))
    with LocalServer(Handler) as server:
        hook = Hook(server)
        monkeypatch.setenv("TEAM_HOOK", hook.url)
        yield hook
        hook.answers.set()


def alert(**fields: Any) -> Alert:
    return Alert(metric="loss", op=">", value=5, for_rounds=1, **fields)


def sinks_of(directory: Path, *alerts: Alert, patience_s: float = 60.0) -> Composite:
    sinks = build(directory, "run-1", ["jsonl"], patience_s=patience_s)
    sinks.add(module.notifications(alerts, "run-1"))
    sinks.start({})
    return sinks


def told(directory: Path, *alerts: Alert, event: dict[str, Any] = EVENT) -> tuple[list[str], dict[str, dict[str, int]]]:
    """Problems and losses of a run with one event of an alert among its records."""
    sinks = sinks_of(directory, *alerts)
    sinks.record({"kind": "round", "round": 3, "loss": 7.5})
    for one in (event, {**event, "kind": "alert_over"}, {**event, "alert": "another"}, {"kind": "commit", "round": 3}):
        sinks.event(one)
    sinks.summary({"rounds": 4})
    sinks.close()
    return sinks.problems(), sinks.losses()


def test_webhook_gets_the_alert_once_with_its_figures(tmp_path: Path, hook: Hook) -> None:
    problems, losses = told(tmp_path, alert(url_env="TEAM_HOOK"))
    assert problems == [] and losses["webhook of alert loss > 5"] == {"failed": 0, "dropped": 0}
    text = "run-1: loss is 7.5, above 5, after round 4"
    fields = {name: value for name, value in EVENT.items() if name != "monotonic_s"}
    expected = {**fields, "run": "run-1", "text": text, "content": text}
    assert hook.requests == [(f"/hooks/{SECRET}?key={SECRET}", "application/json", expected)]


def test_webhook_gets_null_for_a_value_that_is_no_number(tmp_path: Path, hook: Hook) -> None:
    told(tmp_path, alert(url_env="TEAM_HOOK"), event={**EVENT, "value": math.nan})
    ((_, _, body),) = hook.requests
    assert body["value"] is None


def test_webhook_is_tried_three_times(tmp_path: Path, hook: Hook) -> None:
    hook.statuses = [503, 500]
    problems, _ = told(tmp_path, alert(url_env="TEAM_HOOK"))
    assert problems == [] and len(hook.requests) == 3


@pytest.mark.parametrize("status", [404, 302])
def test_webhook_that_refuses_is_one_line_without_any_part_of_its_address(
    status: int, tmp_path: Path, hook: Hook, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    hook.statuses = [status] * 3
    (problem,), losses = told(tmp_path, alert(url_env="TEAM_HOOK"))
    assert f"the webhook of TEAM_HOOK answers with status {status}" in problem
    assert losses["webhook of alert loss > 5"] == {"failed": 1, "dropped": 0}
    assert {path for path, _, _ in hook.requests} == {f"/hooks/{SECRET}?key={SECRET}"}, "redirections aren't followed"
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    shown = problem + caplog.text + str(capfd.readouterr()) + files.decode()
    assert SECRET not in shown and hook.host not in shown


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/{}", "http://{}.invalid/", "https://[::1/{}", "http://x\n{}/"])
def test_webhook_that_cannot_be_reached_is_one_line_without_its_address(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setenv("TEAM_HOOK", url.format(SECRET))
    (problem,), _ = told(tmp_path, alert(url_env="TEAM_HOOK", timeout_s=20))
    assert "the webhook of TEAM_HOOK can't be reached" in problem
    assert SECRET not in problem and "127.0.0.1" not in problem


@pytest.mark.slow
def test_webhook_that_hangs_holds_up_neither_records_nor_other_alerts_nor_the_end(tmp_path: Path, hook: Hook) -> None:
    hook.answers.clear()
    mark = tmp_path / "mark"
    other = alert(name="other", command=[sys.executable, "-c", f"open({str(mark)!r}, 'w')"])
    sinks = sinks_of(tmp_path, alert(url_env="TEAM_HOOK"), other, patience_s=3.0)
    began_s = time.monotonic()
    for _ in range(200):
        sinks.event(EVENT)
    longest_s = time.monotonic() - began_s
    sinks.event({**EVENT, "alert": "other"})
    while not mark.exists():
        time.sleep(0.01)
    sinks.close()
    assert longest_s < 5.0, "the calls only queue"
    assert len(read_jsonl(tmp_path / EVENTS)) == 201
    assert len(hook.requests) == 1
    losses = sinks.losses()["webhook of alert loss > 5"]
    assert losses["failed"] == 1 and losses["dropped"] == 199
    assert sinks.losses()["program of alert other"] == {"failed": 0, "dropped": 0}


def test_webhook_gives_up_after_its_time(tmp_path: Path, hook: Hook) -> None:
    hook.answers.clear()
    (problem,), _ = told(tmp_path, alert(url_env="TEAM_HOOK", timeout_s=0.1))
    assert "the webhook of TEAM_HOOK gives no answer in 0.1 s" in problem and len(hook.requests) == 3


def test_webhook_without_its_variable_on_that_machine_is_a_line(tmp_path: Path) -> None:
    problems, _ = told(tmp_path, alert(url_env="NO_SUCH_HOOK"))
    assert "NO_SUCH_HOOK isn't set on the machine of the run directory" in problems[0]


def test_program_gets_its_arguments_as_they_are_and_the_figures(tmp_path: Path) -> None:
    code = "import json, os, sys; json.dump([sys.argv[2:], dict(os.environ)], open(sys.argv[1], 'w'))"
    output = tmp_path / "told.json"
    command = [sys.executable, "-c", code, str(output), "$HOME; echo", "*"]
    problems, _ = told(tmp_path, alert(command=command))
    assert problems == []
    arguments, environment = json.loads(output.read_text())
    assert arguments == ["$HOME; echo", "*"]
    figures = {name: value for name, value in environment.items() if name.startswith("HYPHA_RAY_ALERT_")}
    assert figures == {
        "HYPHA_RAY_ALERT_RUN": "run-1",
        "HYPHA_RAY_ALERT_NAME": "loss > 5",
        "HYPHA_RAY_ALERT_METRIC": "loss",
        "HYPHA_RAY_ALERT_OP": ">",
        "HYPHA_RAY_ALERT_VALUE": "7.5",
        "HYPHA_RAY_ALERT_LIMIT": "5.0",
        "HYPHA_RAY_ALERT_ROUND": "3",
        "HYPHA_RAY_ALERT_WORKER": "",
        "HYPHA_RAY_ALERT_TEXT": EVENT["text"],
        "HYPHA_RAY_ALERT_WALL_TIME": EVENT["wall_time"],
    }
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import sys; print('a'); sys.exit('no such pager')", "ended with exit code 1: no such pager"),
        ("import sys; sys.exit(3)", "ended with exit code 3: it wrote no error"),
        ("import sys; sys.stderr.write('a line\\n' * 10**5); sys.exit('the end')", "ended with exit code 1: the end"),
    ],
)
def test_program_that_fails_is_one_line_with_its_last_words(code: str, text: str, tmp_path: Path) -> None:
    (problem,), losses = told(tmp_path, alert(command=[sys.executable, "-c", code]))
    assert text in problem and losses["program of alert loss > 5"] == {"failed": 1, "dropped": 0}


def is_gone(pid: int) -> bool:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


HANGING = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
    "print(child.pid, file=open(sys.argv[1] + '.part', 'w'), flush=True)\n"
    "__import__('os').rename(sys.argv[1] + '.part', sys.argv[1])\n"
    "time.sleep(3600)"
)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks processes up in /proc")
@pytest.mark.parametrize(("timeout_s", "patience_s"), [(3.0, 60.0), (3600.0, 3.0)])
def test_program_that_hangs_is_killed_with_its_children_after_its_time_or_at_the_end(
    timeout_s: float, patience_s: float, tmp_path: Path
) -> None:
    output = tmp_path / "pid"
    command = [sys.executable, "-c", HANGING, str(output)]
    sinks = sinks_of(tmp_path, alert(command=command, timeout_s=timeout_s), patience_s=patience_s)
    sinks.event(EVENT)
    while not output.exists():
        time.sleep(0.01)
    sinks.close()
    (problem,) = sinks.problems()
    assert ("was killed after 3 s" if timeout_s == 3.0 else "not done in time at the end of the run") in problem
    assert is_gone(int(output.read_text()))


def test_program_that_is_gone_is_a_line(tmp_path: Path) -> None:
    (problem,), _ = told(tmp_path, alert(command=[str(tmp_path / "nosuch")]))
    assert "FileNotFoundError" in problem


def test_files_alone_have_no_notifications(tmp_path: Path) -> None:
    assert Composite(Files(tmp_path)).losses() == {"files": {"failed": 0, "dropped": 0}}
    assert list(module.notifications([alert()], "run-1")) == []
