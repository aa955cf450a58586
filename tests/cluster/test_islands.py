"""Islands of reinforcement learning on a local Ray cluster: whatever dies, every prompt counts once, and they learn."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import load
from hypha_ray.data.catalogue import load as load_dataset
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.failpoints import hits
from hypha_ray.model.tokenizers import load_preprocessor, tokenizer_of
from hypha_ray.rl.island import Island
from hypha_ray.types import Samples, Span
from hypha_ray.worker.incarnation import epoch_order
from tests.support.faults import events
from tests.support.jobs import Outcome, run_job
from tests.support.plain import final_weights, furthest, samples_of, train_plainly

pytestmark = pytest.mark.usefixtures("local_ray")

SERVER = Path(__file__).parents[1] / "support" / "generation_server.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_trainer.py"
TINY = Path(__file__).parents[2] / "jobs" / "configs" / "grpo-tiny.toml"
CALLS = ("rl.generate", "rl.reward", "rl.train", "rl.merge")
"""Every place of an island's step, and the merge."""


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of digits to sort: about 2900 prompts to train on."""
    folder = tmp_path_factory.mktemp("data") / "sort2"
    prepare(
        PrepareOptions("problems:sort2", folder, tokenizer="characters", max_documents=3000), lambda what, count: None
    )
    return folder


def islands(name: str, problems: Path, **keys: Any) -> Job:
    """The ready job on two islands, with these keys laid over it."""
    base = {"resources.num_workers": 2, "dataset.path": str(problems), "run.name": name, "telemetry.sinks": '["jsonl"]'}
    flags = [f"--{key}={value}" for key, value in {**base, **keys}.items()]
    return load(["@", str(TINY), *flags]).job


def listed(specs: list[str]) -> str:
    return "[" + ", ".join(f'"{spec}"' for spec in specs) + "]"


def epochs_used(run: Outcome, problems: Path) -> int:
    """Number of epochs of which each prompt is in exactly one commit; no prompt of any epoch is in two."""
    used, infos = run.used(), load_dataset(problems).of("train")
    assert set(used.values()) == {1}
    whole = 0
    while all((whole, info.index, sample) in used for info in infos for sample in range(info.samples)):
        whole += 1
    return whole


def test_islands_killed_at_every_call_learn_on_and_count_every_prompt_once(problems: Path, tmp_path: Path) -> None:
    log = tmp_path / "hits.jsonl"
    specs = [f"{call}=kill@{at}" for call, at in zip(CALLS, (25, 50, 75, 13), strict=True)]
    specs += ["worker.mid_delta:1=kill@8", "server.after_reduce=kill@9", "scheduler.before_persist=kill@10"]
    keys = {"testing.failpoints": listed(specs), "testing.failpoint_log": log, "rounds.update_rounds": 28}
    run = run_job(islands("killed", problems, **keys), tmp_path, problems)

    assert [hits(log, spec.partition("=")[0].partition(":")[0]) for spec in specs] == [1] * len(specs)
    assert [commit["round"] for commit in run.commits()] == list(range(28))
    assert epochs_used(run, problems) >= 2  # A third isn't always whole: what a late loss hands back may wait.
    assert len(events(run, "loss")) >= 4
    rewards = [record["reward"] for record in run.of_kind("round")]
    assert rewards[0] < 0.1 and min(rewards[-3:]) > 0.6


@pytest.mark.long
def test_episodes_and_refilled_batches_count_every_prompt_once_whatever_is_killed(
    problems: Path, tmp_path: Path
) -> None:
    log = tmp_path / "hits.jsonl"
    specs = ["rl.generate=kill@4", "rl.reward=kill@9", "rl.train=kill@6", "worker.mid_delta:1=kill@3"]
    specs += ["scheduler.before_persist=kill@2"]
    episodes = {"rl.environment": "calculator", "rl.episode.turns": 2, "rl.generation.max_response_tokens": 10}
    rewards = {"rl.reward.functions": '["environment", "positions"]', "rl.group_size": 4}
    refill = {"rl.algorithm": "dapo", "rl.refill": 2}
    sizes = {"rounds.max_batch_size": 64, "rounds.samples_between_updates": 640, "rounds.update_rounds": 6}
    keys = {"testing.failpoints": listed(specs), "testing.failpoint_log": log, "rounds.evaluate_every": 3}
    run = run_job(islands("episodes", problems, **episodes, **rewards, **refill, **sizes, **keys), tmp_path, problems)

    assert [hits(log, spec.partition("=")[0].partition(":")[0]) for spec in specs] == [1] * len(specs)
    assert [commit["round"] for commit in run.commits()] == list(range(6))
    assert epochs_used(run, problems) >= 1
    rounds = run.of_kind("round")
    assert sum(record["extra_prompts"] for record in rounds) > 0
    assert all(1 <= record["turns"] <= 2 for record in rounds)


@pytest.mark.long
def test_an_island_whose_server_dies_and_that_dies_itself_leaves_no_server(problems: Path, tmp_path: Path) -> None:
    log, died = tmp_path / "hits.jsonl", tmp_path / "died"
    keys = {
        "resources.num_workers": 1,
        "rl.generation.engine": "server",
        "rl.generation.server.command": f"{sys.executable} {SERVER} {{model}} {{port}} {died}",
        "rl.behaviour_cap": 2.0,
        "rl.group_size": 2,
        "rounds.update_rounds": 2,
        "rounds.samples_between_updates": 24,
        "rounds.max_batch_size": 8,
        "rounds.evaluate_every": 0,
        "testing.failpoints": listed(["rl.train=kill@2"]),
        "testing.failpoint_log": log,
    }
    run = run_job(islands("served", problems, **keys), tmp_path, problems)

    assert died.exists() and hits(log, "rl.train") == 1
    assert [commit["round"] for commit in run.commits()] == [0, 1]
    assert set(run.used().values()) == {1} and len(run.used()) == 48
    assert all(record["logprob_gap"] < 1e-5 for record in run.of_kind("round"))
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It has ended meanwhile.
            if str(died).encode() in (process / "cmdline").read_bytes():
                handle = os.pidfd_open(int(process.name))
                assert select.select([handle], [], [], 60)[0], "a server is left"


@pytest.mark.long
def test_an_external_trainer_of_policies_learns_beside_an_island(problems: Path, tmp_path: Path) -> None:
    keys = {"rounds.update_rounds": 12, "rounds.evaluate_every": 3, "worker.lease_s": 20.0}
    flags = {"bridge.commands": f'["{sys.executable} {EXAMPLE}"]', "resources.min_workers": 2}
    run = run_job(islands("beside", problems, **keys, **flags), tmp_path, problems)

    workers = [[delta["worker"] for delta in commit["deltas"]] for commit in run.commits()]
    assert workers[0] == [0, 1] and len(workers) == 12
    assert all(workers), "a later plan goes by speeds, and may leave the slower one nothing to do"
    assert not any(commit["rejected"] for commit in run.commits())
    assert set(run.used().values()) == {1}
    first, *_, last = run.of_kind("eval")
    assert "val_loss" not in last and 0 <= last["pass@1"] <= 1
    assert last["reward"] > first["reward"] + 0.1
    assert not events(run, "loss")


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_synchronous_steps_are_those_of_one_island_on_the_joined_prompts(
    algorithm: str, problems: Path, tmp_path: Path
) -> None:
    keys = {
        "sync.strategy": "sync",
        "rl.algorithm": algorithm,
        "inner_optimizer.name": "sgd",
        "inner_optimizer.learning_rate": 0.5,
        "rounds.update_rounds": 3,
        "rounds.samples_between_updates": 22,
        "rounds.max_batch_size": 4,
        "rounds.evaluate_every": 0,
    }
    job = islands(f"sync-{algorithm}", problems, **keys)
    run = run_job(job, tmp_path, problems)
    alone, start = (
        Island(job, tokenizer_of(load_preprocessor(job.preprocessor, problems, job.model))),
        train_plainly(job, []),
    )
    for spans in run.spans():
        assert len(spans) == 2
        alone.step(prompts_of(problems, [span for worker in sorted(spans) for span in spans[worker]]))
    found, expected = final_weights(run.directory), dict(alone.model.named_parameters())
    assert furthest(found, {name: one.detach().numpy() for name, one in expected.items()}) < 1e-6
    assert furthest(found, start) > 1e-4, "nothing was learned"


def prompts_of(problems: Path, spans: Sequence[Span]) -> Samples:
    """Return the prompts of spans with their keys: epoch, slice, and row in the file."""
    keys = []
    for span in spans:
        size = next(info.samples for info in load_dataset(problems).slices if info.index == span.slice)
        rows = epoch_order(0, span.epoch, span.slice, size)[span.start : span.stop]
        keys += [[span.epoch, span.slice, row] for row in rows]
    return Samples(samples_of(problems, spans), np.array(keys))


REPLAY = {
    "run.mode": "replay",
    "resources.min_workers": 2,
    "rounds.update_rounds": 4,
    "rounds.samples_between_updates": 126,
    "rounds.max_batch_size": 21,
    "rounds.evaluate_every": 0,
    "rl.algorithm": "dapo",
    "rl.environment": "number_game",
    "rl.episode.turns": 2,
    "rl.generation.max_response_tokens": 10,
    "rl.reward.functions": '["environment", "positions"]',
    "rl.epochs": 2,
    "rl.minibatches": 2,
    "rl.reference": "round",
    "rl.kl": 0.05,
}


def hashes(run: Outcome) -> list[Any]:
    return [(commit["theta_sha256"], commit["outer_sha256"], commit["spans"]) for commit in run.commits()]


@pytest.mark.long
def test_killed_and_resumed_replay_ends_with_the_bits_of_an_uninterrupted_run(problems: Path, tmp_path: Path) -> None:
    calm = run_job(islands("calm", problems, **REPLAY), tmp_path, problems)
    log = tmp_path / "hits.jsonl"
    specs = [f"{call}=kill@{at}" for call, at in zip(CALLS, (2, 9, 13, 3), strict=True)]
    specs += ["scheduler.after_commit=kill@1", "scheduler.before_reduce=kill@3"]
    keys = {**REPLAY, "testing.failpoints": listed(specs), "testing.failpoint_log": log}
    run = run_job(islands("killed-replay", problems, **keys), tmp_path, problems)

    assert [hits(log, spec.partition("=")[0]) for spec in specs] == [1] * len(specs)
    assert [event["attempt"] for event in events(run, "attempt")] == [1, 2, 3]
    assert hashes(run) == hashes(calm)
    assert len({theta for theta, *_ in hashes(run)}) == 4
