"""jobs/chaos.py: a short campaign against a worker and a driver, and what it says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_scripts import ALONE, Jobs

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

ROLES = "worker,driver"
SEED = 1
"""Of this seed, the first strike is at a worker and the second at the driver."""


@pytest.fixture(scope="module")
def campaign(run_shared_job: Jobs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """The folder, the printed page and the figures of one that ended with 0."""
    folder = tmp_path_factory.mktemp("campaign")
    strikes = ("--mean-rounds-between-kills", "1", "--kills", "2", "--roles", ROLES, "--seed", str(SEED))
    size = ("--workers", "2", "--round-seconds", "1", "--calm-rounds", "1")
    places = ("--out", folder / "out", "--json", folder / "figures.json")
    done = run_shared_job(*strikes, *size, *places, script="chaos", env=ALONE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", strike 1: SIGKILL to worker-" in done.stderr and ", strike 2: SIGKILL to driver" in done.stderr
    return folder / "out", done.stdout, json.loads((folder / "figures.json").read_text())


def test_campaign_kills_whom_it_was_told_to_and_sees_them_come_back(
    campaign: tuple[Path, str, dict[str, Any]],
) -> None:
    out, _, got = campaign
    assert got["kills"] == {"worker": 1, "driver": 1}
    assert [strike["signal"] for strike in got["strikes"]] == ["SIGKILL", "SIGKILL"]
    assert got["recovery"]["worker"]["healed"] == 1 and got["recovery"]["worker"]["max_s"] > 0
    assert got["recovery"]["driver"]["healed"] == 1 and got["recovery"]["driver"]["max_s"] > 0
    assert "note: run chaos goes on after round" in (out / "driver.log").read_text()
    events = [json.loads(line) for line in (out / "chaos" / "events.jsonl").read_text().splitlines()]
    assert {event["attempt"] for event in events if event["kind"] == "attempt"} == {1, 2}
    assert any(event["kind"] == "loss" for event in events)


def test_campaign_accounts_for_every_commit_and_sample_that_is_in_the_log(
    campaign: tuple[Path, str, dict[str, Any]],
) -> None:
    out, page, got = campaign
    log = [json.loads(file.read_text()) for file in sorted((out / "chaos" / "commits").glob("round_*.json"))]
    assert got["commits"] == got["rounds"] == len(log)
    samples = sum(delta["samples"] for commit in log for delta in commit["deltas"])
    assert got["samples"]["committed"] == samples > 0
    assert got["calm"]["rounds"] == 1
    assert got["calm"]["steps_per_s"] * got["calm"]["seconds"] == pytest.approx(
        sum(delta["samples"] for delta in log[2]["deltas"]) / 8
    )
    zero = ("rounds_discarded", "commits_lost", "samples_lost", "samples_repeated", "samples_foreign")
    assert {name: got[name] for name in zero} == dict.fromkeys(zero, 0)
    assert got["problems"] == []
    assert f"commits    {len(log)} of {len(log)} rounds; lost 0; rounds discarded 0" in page
    assert page.splitlines()[-1] == f"run and logs: {out}"
