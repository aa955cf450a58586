"""The parameter server as a Ray actor: its results are those of the pure function, and outlive it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import RayActorError

from hypha_ray.config.schema import Job, Sync
from hypha_ray.errors import ConfigError
from hypha_ray.failpoints import hits
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.server.actor import GROUPS, ParameterServer, StepRequest
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, initial_momentum, reduce
from hypha_ray.types import Flat, Layout
from tests.support.jobs import MODEL

WIDE = MODEL | {"vocab_size": 4000, "hidden_size": 64, "intermediate_size": 96}
GROUP = "parameters/float32"
WAIT_S = 120.0
MEAN = Sync()

Expected = tuple[Flat, Flat, Any]

pytestmark = pytest.mark.usefixtures("local_ray")


def job_of(fragments: int, **tables: dict[str, Any]) -> Job:
    sync = {"fragments": fragments, **tables.pop("sync", {})}
    return Job.model_validate({"run": {"seed": 7}, "model": {"config": WIDE}, "sync": sync, **tables})


def start(job: Job) -> Any:
    """A server as the scheduler starts it."""
    return ray.remote(concurrency_groups=GROUPS)(ParameterServer).options(num_cpus=0).remote(job)


@pytest.fixture(scope="module")
def server(local_ray: None) -> Any:
    return start(job_of(2))


def initial(server: Any) -> list[Any]:
    """Refs of layout and weights."""
    *theta, layout = server.initial.options(num_returns=3).remote()
    return [layout, *theta]


def drifted(theta: Flat, seed: int) -> Flat:
    noise = np.random.default_rng(seed).standard_normal(theta[GROUP].size, dtype=np.float32)
    return {GROUP: theta[GROUP] + np.float32(0.01) * noise}


def same(one: Flat, other: Flat) -> bool:
    return one.keys() == other.keys() and all(one[group].tobytes() == other[group].tobytes() for group in one)


def test_initial_gives_layout_and_weights_of_the_jobs_model(server: Any) -> None:
    layout, *flats = ray.get(initial(server), timeout=WAIT_S)
    model = build_model(job_of(2).model, 7)
    assert layout == layout_of(model, 2)
    assert all(same(flat, gather(model, layout, fragment)) for fragment, flat in enumerate(flats))


def test_initial_of_a_model_that_cannot_be_cut_raises_the_users_error() -> None:
    with pytest.raises(ConfigError, match=r"sync\.fragments doesn't fit the model"):
        ray.get(start(job_of(5000)).initial.options(num_returns=2).remote()[0], timeout=WAIT_S)


def rounds(server: Any, refs: list[Any], payloads: list[list[Any]], fragment: int) -> list[list[Any]]:
    """Refs of θ, momentum and verdict after each round."""
    layout, theta_ref = ray.get(refs[0], timeout=WAIT_S), refs[1 + fragment]
    momentum_ref = server.momentum.remote(layout, fragment)
    results = []
    for number, round_payloads in enumerate(payloads):
        senders = tuple((worker, 0, 10 + worker) for worker in range(len(round_payloads)))
        request = StepRequest(f"step {number}", layout, fragment, number, senders)
        call = request, theta_ref, momentum_ref, *round_payloads
        theta_ref, _, verdict_ref = server.reduce.remote(*call)
        momentum_ref, _ = server.momentum_after.remote(*call)
        results.append([theta_ref, momentum_ref, verdict_ref])
    return results


def expected(
    layout: Layout, theta: Flat, payloads: list[list[Flat]], fragment: int, sync: Sync = MEAN
) -> list[Expected]:
    rules = ReduceSpec(layout, fragment, job_of(2).outer_optimizer, sync)
    momentum, results = initial_momentum(layout, fragment), []
    for number, flats in enumerate(payloads):
        received = [Received(worker, 0, 10 + worker, flat) for worker, flat in enumerate(flats)]
        theta, momentum, verdict = reduce(number, theta, momentum, received, rules)
        results.append((theta, momentum, verdict))
    return results


@pytest.mark.parametrize("fragment", [0, 1])
def test_reduce_over_rounds_gives_the_pure_functions_bits_and_keeps_every_result(server: Any, fragment: int) -> None:
    torch.set_num_threads(1)
    refs = initial(server)
    layout, theta = ray.get([refs[0], refs[1 + fragment]], timeout=WAIT_S)
    assert theta[GROUP].nbytes > 100_000 and not theta[GROUP].flags.writeable
    payloads = [[drifted(theta, 3 * number + worker) for worker in range(3)] for number in range(3)]
    payloads[1][1][GROUP][17] = np.nan
    payload_refs = [[ray.put(flat) for flat in flats] for flats in payloads]
    steps = rounds(server, refs, payload_refs, fragment)
    for step, (new_theta, momentum, verdict) in zip(steps, expected(layout, theta, payloads, fragment), strict=True):
        found = ray.get(step, timeout=WAIT_S)
        assert same(found[0], new_theta) and same(found[1], momentum) and found[2] == verdict
    assert [rejection.worker for rejection in ray.get(steps[1][2]).rejected] == [1]
    for refs_of_round, flats in zip(payload_refs, payloads, strict=True):
        assert all(same(found, flat) for found, flat in zip(ray.get(refs_of_round), flats, strict=True))


def test_rounds_of_the_warmup_are_plain_averages_that_leave_outer_momentum_alone() -> None:
    server = start(job_of(2, rounds={"warmup_rounds": 1}))
    refs = initial(server)
    theta = ray.get(refs[1], timeout=WAIT_S)
    alike = [drifted(theta, 0)] * 2
    steps = ray.get([ref for step in rounds(server, refs, [alike, alike], 0) for ref in step], timeout=WAIT_S)
    assert same(steps[0], alike[0]) and not steps[1][GROUP].any()
    assert same(steps[3], alike[0]) and not steps[4][GROUP].any(), "the second round has nothing to step by"


def test_reduce_asked_of_a_second_server_after_the_first_was_killed_gives_the_same_bits() -> None:
    first = start(job_of(2))
    refs = initial(first)
    theta = ray.get(refs[1], timeout=WAIT_S)
    payloads = [[ray.put(drifted(theta, worker)) for worker in range(2)]]
    before = ray.get(rounds(first, refs, payloads, 0)[0], timeout=WAIT_S)
    ray.kill(first)
    with pytest.raises(RayActorError):
        while True:  # What is asked before it hears that it is killed is still answered.
            ray.get(first.momentum.remote(refs[0], 0), timeout=WAIT_S)
    after = ray.get(rounds(start(job_of(2)), refs, payloads, 0)[0], timeout=WAIT_S)
    assert same(before[0], after[0]) and same(before[1], after[1]) and before[2] == after[2]


def test_momentum_asked_of_whoever_did_not_take_the_step_or_took_another_since_has_the_same_bits(server: Any) -> None:
    refs = initial(server)
    layout, theta = ray.get(refs[:2], timeout=WAIT_S)
    payloads = [[ray.put(drifted(theta, 5 * number + worker)) for worker in range(2)] for number in range(2)]
    still, senders = server.momentum.remote(refs[0], 0), ((0, 0, 10), (1, 0, 11))
    requests = [StepRequest(f"one {n}", layout, 0, 0, senders) for n in range(2)]
    calls = [(request, refs[1], still, *flats) for request, flats in zip(requests, payloads, strict=True)]
    verdicts = [server.reduce.remote(*call)[2] for call in calls]
    whole = [expected(layout, theta, [ray.get(flats)], 0)[0] for flats in payloads]
    for one in (server, start(job_of(2))):
        found = ray.get([one.momentum_after.remote(*call)[0] for call in calls], timeout=WAIT_S)
        assert [same(momentum, step[1]) for momentum, step in zip(found, whole, strict=True)] == [True, True]
    assert ray.get(verdicts) == [step[2] for step in whole]
    assert not same(whole[0][1], whole[1][1])


@pytest.mark.parametrize("rule", [{"merge": "median"}, {"merge": "trimmed_mean"}, {"clip": 1.0}, {"norm_gate": 2.0}])
def test_reduce_goes_by_the_jobs_merge_rule_gate_and_clipping(rule: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    job = job_of(2, sync=rule)
    server = start(job)
    refs = initial(server)
    layout, theta = ray.get(refs[:2], timeout=WAIT_S)
    payloads = [drifted(theta, worker) for worker in range(5)]
    payloads[3] = {GROUP: theta[GROUP] + 3 * (payloads[3][GROUP] - theta[GROUP])}
    found = ray.get(rounds(server, refs, [[ray.put(payload) for payload in payloads]], 0)[0], timeout=WAIT_S)
    by_rule, by_mean = (expected(layout, theta, [payloads], 0, sync)[0] for sync in (job.sync, MEAN))
    assert same(found[0], by_rule[0]) and same(found[1], by_rule[1]) and found[2] == by_rule[2]
    assert not same(found[0], by_mean[0])


def test_ping_is_answered_while_calls_wait() -> None:
    server = start(job_of(2))
    waiting = [initial(server)[0] for _ in range(20)]
    pid = ray.get(server.ping.remote(), timeout=WAIT_S)
    done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
    assert len(done) < len(waiting)
    ray.get(waiting, timeout=WAIT_S)
    assert ray.get(server.ping.remote(), timeout=WAIT_S) == pid


def test_reduce_that_fails_before_or_after_the_step_gives_the_same_bits_when_asked_again(tmp_path: Path) -> None:
    log = tmp_path / "hits.jsonl"
    specs = ["server.before_reduce=error@1", "server.after_reduce=error@1"]
    server = start(job_of(2, testing={"failpoints": specs, "failpoint_log": str(log)}))
    refs = initial(server)
    layout, theta = ray.get(refs[:2], timeout=WAIT_S)
    payloads = [drifted(theta, worker) for worker in range(2)]
    for _ in specs:
        with pytest.raises(RuntimeError, match="a failpoint"):
            ray.get(rounds(server, refs, [[ray.put(payload) for payload in payloads]], 0)[0], timeout=WAIT_S)
    found = ray.get(rounds(server, refs, [[ray.put(payload) for payload in payloads]], 0)[0], timeout=WAIT_S)
    whole = expected(layout, theta, [payloads], 0)[0]
    assert same(found[0], whole[0]) and same(found[1], whole[1]) and found[2] == whole[2]
    assert [hits(log, spec.partition("=")[0]) for spec in specs] == [1, 1]
    assert [hits(log, spec.partition("=")[0], fired=False) for spec in specs] == [3, 2]


def test_import_of_the_actor_needs_no_heavy_library() -> None:
    code = "import sys, hypha_ray.server.actor; print(*{'torch', 'transformers', 'datasets'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
