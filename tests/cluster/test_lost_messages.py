"""Calls between processes whose requests or answers get lost: what was ordered is ordered again, and done once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

from tests.support.jobs import job_of, run_job

LOST = 6


@pytest.mark.parametrize("what", ["req", "resp"])
def test_lost_calls_cost_no_round_and_no_sample(
    what: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chances = {"req_failure_prob": 0, "resp_failure_prob": 0, "in_flight_failure_prob": 0}
    loss = {"num_failures": LOST, **chances, f"{what}_failure_prob": 25}
    monkeypatch.setenv("RAY_testing_rpc_failure", json.dumps({"CoreWorkerService.grpc_client.PushTask": loss}))
    ray.init(address="local", num_cpus=4, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False)
    try:
        rounds = {"update_rounds": 5, "samples_between_updates": 64}
        run = run_job(job_of(f"lost-{what}", corpus, rounds=rounds, worker={"lease_s": 4.0}), tmp_path, corpus)
    finally:
        ray.shutdown()
    assert [commit["round"] for commit in run.commits()] == list(range(5))
    assert set(run.used().values()) == {1}
