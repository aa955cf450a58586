"""Jobs with workers whose trainers are outside of Ray."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import trustme

from hypha_ray.config import Job
from hypha_ray.config.load import load
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.errors import ConfigError
from hypha_ray.failpoints import hits
from tests.support.faults import events, is_back
from tests.support.jobs import Outcome, job_of, run_job
from tests.support.plain import final_weights, furthest, joined_batches, train_plainly

pytestmark = pytest.mark.usefixtures("local_ray")

ROOT = Path(__file__).parents[2]
TORCH = f"{sys.executable} {ROOT / 'examples' / 'torch_trainer.py'}"
NODE = f"node {ROOT / 'examples' / 'node' / 'trainer.mjs'}"
EQUAL = {"dynamic_local_steps": False}
"""Whoever has one slow batch on a busy machine has as many in the next round."""


def pids(command: str) -> list[int]:
    """Processes whose command line ends like that."""
    found, end = [], command.replace(" ", "\0").encode() + b"\0"
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().endswith(end):
                found.append(int(process.name))
        except OSError:  # It has ended meanwhile.
            continue
    return found


def gone(command: str) -> bool:
    """Whether its processes end, now that nobody speaks to them any more."""
    deadline = time.monotonic() + 60
    while pids(command) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not pids(command)


def mixed(name: str, corpus: Path, **rounds: int) -> Job:
    """Worker 0 is ours, worker 1 isn't; on a busy machine that takes long to start, and is silent while it loads."""
    sizes = {"update_rounds": 4, "samples_between_updates": 128, "max_batch_size": 4, **rounds}
    patient: dict[str, dict[str, Any]] = {"worker": {"lease_s": 20.0}, "testing": {"batch_s": 0.03}}
    return job_of(name, corpus, rounds=sizes, bridge={"commands": [TORCH]}, sync=EQUAL, **patient)


def awaiting(name: str, corpus: Path, directory: Path, **tables: dict[str, Any]) -> Job:
    """Worker 1 dials in, and nothing is done without it."""
    ours = {"run": {"dir": str(directory)}, "bridge": {"commands": [""]}, "resources": {"min_workers": 2}}
    return job_of(name, corpus, worker={"lease_s": 20.0}, **ours, **tables)


@contextmanager
def dialled(place: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer from elsewhere, which takes the place of worker 1 as soon as its address is written down."""
    command = f"""
        until [ -s {place}/worker-1.address ]; do sleep 0.1; done
        exec {sys.executable} {ROOT}/jobs/worker.py --connect $(cat {place}/worker-1.address) \
            --token-file {place}/worker-1.token --device cpu {shlex.join(flags)}
    """
    process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def whole(outcome: Outcome, rounds: int) -> None:
    assert [commit["round"] for commit in outcome.commits()] == list(range(rounds))
    assert set(outcome.used().values()) == {1}
    assert not any(commit["rejected"] for commit in outcome.commits())


@pytest.mark.long
def test_external_trainer_takes_part_like_any_other_worker(corpus: Path, tmp_path: Path) -> None:
    outcome = run_job(mixed("mixed", corpus), tmp_path, corpus)
    whole(outcome, 4)
    assert all([delta["worker"] for delta in commit["deltas"]] == [0, 1] for commit in outcome.commits())
    losses = [record["val_loss"] for record in outcome.of_kind("eval")]
    assert losses[-1] < losses[0] - 0.3
    assert not events(outcome, "loss") and gone(TORCH)


def test_external_trainer_killed_in_mid_round_is_a_lost_worker(corpus: Path, tmp_path: Path) -> None:
    hit: list[int] = []

    def strike(record: dict[str, Any]) -> None:
        if record["kind"] == "step" and record["worker"] == 1 and not hit:
            hit.extend(pids(TORCH))
            os.kill(hit[0], signal.SIGKILL)

    job = mixed("struck", corpus, update_rounds=60, samples_between_updates=480)
    outcome = run_job(job, tmp_path, corpus, seen=strike, until=lambda: is_back(tmp_path / "struck", 1, 1))
    whole(outcome, len(outcome.commits()))
    assert len(hit) == 1 and gone(TORCH)
    (loss,) = events(outcome, "loss")
    assert loss["worker"] == 1 and "the trainer is gone" in loss["reason"]
    incarnations = {d["incarnation"] for commit in outcome.commits() for d in commit["deltas"] if d["worker"] == 1}
    assert max(incarnations) > loss["incarnation"]
    assert all(any(delta["worker"] == 0 for delta in commit["deltas"]) for commit in outcome.commits())


def three_kinds(tmp_path: Path, *flags: str) -> tuple[Job, Outcome]:
    """Run a job of one worker of ours, one in plain PyTorch and one in JavaScript, with time to start them."""
    prepare(PrepareOptions("digits", tmp_path / "digits"), lambda what, count: None)
    file = str(ROOT / "jobs" / "configs" / "bridge.toml")
    job = load(["@", file, "--dataset.path", str(tmp_path / "digits"), "--worker.lease_s", "60", *flags]).job
    job = job.model_copy(update={"bridge": job.bridge.model_copy(update={"commands": [TORCH, NODE]})})
    return job, run_job(job, tmp_path, tmp_path / "digits")


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js here")
@pytest.mark.long
def test_trainers_of_three_kinds_learn_digits_together(tmp_path: Path) -> None:
    _, outcome = three_kinds(tmp_path, "--run.name", "digits")
    whole(outcome, 12)
    assert {delta["worker"] for commit in outcome.commits() for delta in commit["deltas"]} == {0, 1, 2}
    assert outcome.of_kind("eval")[-1]["accuracy"] > 0.9
    assert not events(outcome, "loss") and gone(NODE)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js here")
def test_trainers_of_three_kinds_make_one_gradient(tmp_path: Path) -> None:
    steps = ["--rounds.update_rounds", "12", "--rounds.samples_between_updates", "96", "--inner_optimizer.name", "sgd"]
    job, outcome = three_kinds(tmp_path, *steps, "--run.name", "gradients", "--sync.strategy", "sync")
    whole(outcome, 12)
    assert all(record["batches"] == {0: 1, 1: 1, 2: 1} for record in outcome.of_kind("round"))
    expected = train_plainly(job, joined_batches(outcome, tmp_path / "digits"))
    assert furthest(final_weights(outcome.directory), expected) < 1e-6


def test_program_that_is_not_there_ends_the_job_and_is_named(corpus: Path, tmp_path: Path) -> None:
    job = job_of("absent", corpus, bridge={"commands": ["; rm -rf $HOME"]})
    with pytest.raises(ConfigError, match=r"CFG009.*no such program — got ;"):
        run_job(job, tmp_path, corpus)


@pytest.mark.long
def test_trainer_hears_that_the_training_is_completed_however_late_its_driver_says_so(
    corpus: Path, tmp_path: Path
) -> None:
    rounds, hits_log = {"update_rounds": 2, "samples_between_updates": 64, "max_batch_size": 4}, tmp_path / "hits.jsonl"
    testing = {"failpoints": ["worker.before_done:1=pause@1"], "failpoint_log": str(hits_log)}
    job = awaiting("late", corpus, tmp_path, rounds=rounds, testing=testing)
    place = tmp_path / "late" / "bridge"
    with dialled(place) as process:
        outcome = run_job(job, tmp_path, corpus)
        output, _ = process.communicate(timeout=30)
    whole(outcome, 2)
    assert hits(hits_log, "worker.before_done") == 1
    assert output.splitlines() == ["joined run late as worker 1", "the training is completed"]
    assert process.returncode == 0 and not events(outcome, "loss")


@pytest.mark.long
def test_trainer_that_was_dropped_dials_in_again_at_the_same_place(corpus: Path, tmp_path: Path) -> None:
    cut: list[int] = []

    def strike(record: dict[str, Any]) -> None:
        if record["kind"] == "step" and record["worker"] == 1 and not cut:
            actor = ray.get_actor("worker-1", namespace="dropped")
            cut.append(ray.get(actor.pid.remote()))
            os.kill(cut[0], signal.SIGKILL)

    rounds = {"update_rounds": 6, "samples_between_updates": 128, "max_batch_size": 4}
    job = awaiting("dropped", corpus, tmp_path, rounds=rounds, sync=EQUAL, testing={"batch_s": 0.03})
    place = tmp_path / "dropped" / "bridge"
    with dialled(place) as process:
        outcome = run_job(job, tmp_path, corpus, seen=strike)
        output, _ = process.communicate(timeout=30)
    whole(outcome, 6)
    assert len(cut) == 1 and len(events(outcome, "loss")) == 1
    assert output.splitlines() == [*["joined run dropped as worker 1"] * 2, "the training is completed"]
    assert process.returncode == 0
    assert [delta["worker"] for delta in outcome.commits()[-1]["deltas"]] == [0, 1]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, authority = tmp_path_factory.mktemp("certificates"), trustme.CA()
    ours = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "authority.pem")
    ours.private_key_pem.write_to_path(folder / "key.pem")
    ours.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    return folder


@contextmanager
def strangers(file: Path) -> Iterator[list[int]]:
    """Somebody who keeps sending noise to an address as soon as it is in a file, and stays on the line."""
    sent, held, ended = list[int](), deque[socket.socket](maxlen=20), threading.Event()

    def pester() -> None:
        while not ended.wait(0.02):
            with suppress(OSError, ValueError):
                host, _, port = file.read_text(encoding="utf-8").strip().rpartition(":")
                stream = socket.create_connection((host, int(port)))
                held.append(stream)
                sent.append(stream.send(random.Random(len(sent)).randbytes(100)))

    thread = threading.Thread(target=pester)
    thread.start()
    try:
        yield sent
    finally:
        ended.set()
        thread.join()
        for stream in held:
            stream.close()


@pytest.mark.long
def test_worker_from_elsewhere_dials_in_by_tls_amid_noise(corpus: Path, tmp_path: Path, certificates: Path) -> None:
    bridge = {"commands": [""], **{name: str(certificates / f"{name}.pem") for name in ("certificate", "key")}}
    rounds = {"update_rounds": 12, "samples_between_updates": 240, "max_batch_size": 4}
    run, worker = {"dir": str(tmp_path)}, {"lease_s": 3.0}
    job = job_of("dialled", corpus, rounds=rounds, bridge=bridge, run=run, worker=worker, sync=EQUAL)
    place = tmp_path / "dialled" / "bridge"
    authority = ["--authority", str(certificates / "authority.pem")]
    with strangers(place / "worker-1.address") as sent, dialled(place, *authority) as process:
        outcome = run_job(job, tmp_path, corpus)
        output, _ = process.communicate(timeout=30)
    whole(outcome, 12)
    assert process.returncode == 0
    assert sent and not events(outcome, "loss")
    assert all(commit["deltas"][0]["worker"] == 0 for commit in outcome.commits())
    assert output.splitlines() == ["joined run dialled as worker 1", "the training is completed"]
    assert [delta["worker"] for delta in outcome.commits()[-1]["deltas"]] == [0, 1]
