"""Generators beside an island: the same steps whoever responds, each prompt answered once, whatever dies."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util.placement_group import placement_group_table

from hypha_ray.data.catalogue import load as load_dataset
from hypha_ray.failpoints import arm, hits
from hypha_ray.market.cluster import lease_entries
from hypha_ray.model.tokenizers import pack
from hypha_ray.rl.actor import GROUPS, ResponseGenerator
from hypha_ray.rl.island import Island
from hypha_ray.worker.incarnation import epoch_order
from tests.cluster.test_islands import islands, listed, problems
from tests.support.faults import events
from tests.support.jobs import run_job
from tests.support.rl import EPISODES, job, prompts, tokenizer

pytestmark = pytest.mark.usefixtures("local_ray")
__all__ = ["problems"]

ANSWERS = ["21", "543", "7", "89", "1", "32"]
BATCHES = [prompts(["12=", "345=", "7=", "98=", "1=", "23="], ANSWERS, epoch) for epoch in range(5)]
SETTINGS = {"generators": 2, "generation.request_prompts": 1}


@pytest.fixture
def disarmed() -> Iterator[None]:
    """No failpoints outlive the test in this process."""
    yield
    arm([], None)


@contextmanager
def generators(run: str, count: int, *flags: str, **settings: Any) -> Iterator[list[Any]]:
    """Start generators of a run that prepare themselves, and end them."""
    ready_job = job(f"--run.name={run}", *flags, **SETTINGS, **settings)
    actor_class = ray.remote(concurrency_groups=GROUPS)(ResponseGenerator)
    actors = []
    for number in range(count):
        options = {"name": f"generator-{number}", "namespace": run, "num_cpus": 0}
        actors.append(actor_class.options(**options).remote(ready_job, pack(tokenizer())))
    ray.get([actor.prepare.remote() for actor in actors])
    try:
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


def trained(
    run: str, count: int, *flags: str, before_step: Callable[[int], None] = lambda number: None, **settings: Any
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Weights of an island after all batches, and the results of its steps, once it reaches so many generators."""
    island = Island(job(f"--run.name={run}", *flags, **SETTINGS, **settings), tokenizer())
    try:
        while len(island._shared._pool._dispatch.usable) < count:
            time.sleep(0.05)
        results = []
        for number, batch in enumerate(BATCHES):
            before_step(number)
            island.announce(iter(BATCHES[number + 1 :]))
            results.append(island.step(batch))
        return {name: tensor.detach().clone() for name, tensor in island.model.state_dict().items()}, results
    finally:
        island.close()


def responders(result: Any) -> list[str]:
    """Names of who has responded, once for each prompt of a batch; each prompt has been responded to once."""
    names: dict[tuple[int, int, int], str] = {}
    for part in result.responders:
        for prompt in part.prompts:
            assert prompt not in names
            names[prompt] = part.responder
    return list(names.values())


def figures(result: Any) -> dict[str, tuple[float, float]]:
    """Figures of a step that don't tell who has responded."""
    return {name: figure for name, figure in result.sums.items() if name != "by_generators"}


def require_same(expected: tuple[dict[str, torch.Tensor], list[Any]], got: tuple[Any, list[Any]]) -> None:
    for name, tensor in expected[0].items():
        assert torch.equal(got[0][name], tensor), name
    for one, other in zip(expected[1], got[1], strict=True):
        assert figures(one) == figures(other)
        assert float(one.loss) == float(other.loss)


@pytest.mark.parametrize(("staleness", "flags"), [(0, EPISODES), (2, ())])
@pytest.mark.long(keep=1)
def test_steps_are_the_same_bits_with_no_generator_and_with_one_or_two(staleness: int, flags: tuple[str, ...]) -> None:
    settings = {"algorithm": "ppo", "reference": "average", "kl": 0.3, "staleness": staleness}
    expected = trained("none", 0, *flags, **settings)
    assert {name for step in expected[1] for name in responders(step)} == {"worker-0"}
    for count in (1, 2):
        run = f"some-{count}-{staleness}-{len(flags)}"
        with generators(run, count, *flags, **settings):
            got = trained(run, count, *flags, **settings)
        require_same(expected, got)
        names = {name for step in got[1] for name in responders(step)}
        assert names - {"worker-0"} <= {f"generator-{number}" for number in range(count)}
        assert names - {"worker-0"}


def test_generators_that_are_killed_or_stopped_change_no_bit(tmp_path: Path, disarmed: None) -> None:
    settings = {"reference": "round", "kl": 0.3, "staleness": 1}
    expected = trained("unharmed", 0, **settings)
    log = tmp_path / "hits.jsonl"
    flags = ('--testing.failpoints=["generator.answer=kill@4"]', f"--testing.failpoint_log={log}", "--worker.stall_s=9")
    with generators("harmed", 2, *flags, **settings) as actors:
        processes = ray.get([actor.ping.remote() for actor in actors])

        def stop_all(number: int) -> None:
            if number == 3:
                for process in processes:
                    with suppress(ProcessLookupError):  # It was killed.
                        os.kill(process, signal.SIGSTOP)

        got = trained("harmed", 2, *flags, before_step=stop_all, **settings)

    assert hits(log, "generator.answer") == 1
    require_same(expected, got)
    assert len({name for step in got[1][:3] for name in responders(step)}) >= 2
    assert set(responders(got[1][4])) == {"worker-0"}
    problems = [line for step in got[1] for line in step.problems]
    assert sum("is lost" in line for line in problems) == 1
    assert any("is silent" in line for line in problems)
    assert any(line == "worker-0 reaches no generator, and responds itself meanwhile" for line in problems)


@pytest.mark.long
def test_a_run_whose_generator_is_killed_names_each_prompt_of_a_commit_once(problems: Path, tmp_path: Path) -> None:
    log = tmp_path / "hits.jsonl"
    specs = ["generator.answer=kill@3", "rl.train=kill@25", "scheduler.before_persist=kill@12"]
    keys = {
        "testing.failpoints": listed(specs),
        "testing.failpoint_log": log,
        "rounds.update_rounds": 16,
        "rl.generators": 2,
        "rl.staleness": 1,
        "resources.worker.cpu": 1,
        "resources.generator.cpu": 1,
    }
    run = run_job(islands("generators", problems, **keys), tmp_path, problems)

    assert [hits(log, spec.partition("=")[0]) for spec in specs] == [1, 1, 1]
    replaced = [event["role"] for event in events(run, "revive")]
    assert sum(name.startswith("generator-") for name in replaced) == 1
    sizes = {info.index: info.samples for info in load_dataset(problems).slices}
    names = set()
    for number, (commit, workers) in enumerate(zip(run.commits(), run.spans(), strict=True)):
        assert commit["round"] == number
        trained_on = []
        for span in itertools.chain(*workers.values()):
            rows = epoch_order(0, span.epoch, span.slice, sizes[span.slice])[span.start : span.stop]
            trained_on += [[span.epoch, span.slice, row] for row in rows.tolist()]
        assert sorted(itertools.chain(*commit["responders"].values())) == sorted(trained_on)
        names.update(commit["responders"])
    assert len(run.commits()) == 16
    assert lease_entries() == []
    assert [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"] == []
    assert names & {"generator-0", "generator-1"}
    assert names <= {"generator-0", "generator-1", "worker-0", "worker-1"}
