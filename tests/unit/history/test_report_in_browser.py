"""The page of a run in a real browser: every chart is drawn, and nothing is asked of a network."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hypha_ray.history.report import write_report
from tests.support.run_folders import evaluation, make_run, round_record

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium to open the page in"),
]


def opened(page: Path, profile: Path, width: int) -> tuple[str, str]:
    """Open a page without a network; return its document after its scripts, and the browser's messages."""
    assert BROWSER is not None
    command = [
        *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={profile}", "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *(f"--window-size={width},9000", "--virtual-time-budget=6000", "--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


@pytest.mark.parametrize("width", [500, 1280])
def test_every_chart_is_drawn_and_routine_events_are_hidden(tmp_path: Path, width: int) -> None:
    metrics = [round_record(0, 4.0), evaluation(0, 3.5), round_record(1, 3.0)]
    events = [{"kind": "plan", "round": 0}, {"kind": "join", "worker": 0, "device": "</script>"}]
    folder = make_run(tmp_path, commits=2, metrics=metrics, events=events)
    document, messages = opened(write_report(folder), tmp_path / "profile", width)
    assert "CONSOLE" not in messages
    places = document.count('data-figure="')
    assert places > 3 and len(re.findall(r'class="plot[^"]*js-plotly-plot', document)) == places
    (loss,) = re.findall(r'(?s)aria-label="Loss: .*?</figure>', document)
    assert "scatterlayer" in loss and loss.count('class="point"') == 3
    assert re.search(r'<tr data-kind="plan" hidden', document)
    assert re.search(r'<tr data-kind="join">.*&lt;/script&gt;', document)
