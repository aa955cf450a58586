"""`jobs/ppo.py` as a user runs it: policy and critic learn together, and the policy alone is exported."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hypha_ray.telemetry.sinks.files import read_jsonl
from tests.support.job_scripts import Jobs

TINY = ("@", "jobs/configs/ppo-tiny.toml")


@pytest.fixture(scope="module")
def run(run_shared_job: Jobs, problems: Path) -> Path:
    """The folder of a run with the ready job file."""
    done = run_shared_job(*TINY, "--dataset.path", problems, script="ppo")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return Path(done.stdout.splitlines()[-1].removeprefix("run: "))


def test_a_policy_and_its_critic_learn_to_sort(run: Path) -> None:
    records = list(read_jsonl(run / "metrics.jsonl"))
    evaluations = [record for record in records if record["kind"] == "eval"]
    rounds = [record for record in records if record["kind"] == "round"]

    assert evaluations[0]["pass@1"] < 0.1
    assert evaluations[-1]["pass@1"] >= 0.95
    assert rounds[-1]["value_loss"] < rounds[0]["value_loss"]
    assert rounds[-1]["kl"] > 0.1


def test_the_exported_model_is_the_policy_and_checkpoints_have_the_critic(run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == 84_544

    with safe_open(run / "checkpoints" / "round_000019" / "model.safetensors", "pt") as snapshot:
        names = list(snapshot.keys())
    assert {name.split(".")[0] for name in names} == {"actor", "critic"}
    assert "critic.head.weight" in names


def test_a_dry_run_draws_the_graph_by_its_levels(run_job: Jobs, problems: Path) -> None:
    done = run_job(*TINY, "--dataset.path", problems, "--dry-run", script="ppo")

    assert done.returncode == 0, done.stderr
    drawn = [line.split()[:2] for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [level for level, _ in drawn] == list("0111233")
    assert [name for _, name in drawn][-2:] == ["actor_train", "critic_train"]


def test_a_dry_run_draws_what_is_done_ahead_and_what_is_left_of_a_step(run_job: Jobs, problems: Path) -> None:
    ahead = ("--rl.staleness=2", "--rl.model_workers=2")
    done = run_job(*TINY, "--dataset.path", problems, *ahead, "--dry-run", script="ppo")

    assert done.returncode == 0, done.stderr
    first = next(line for line in done.stdout.splitlines() if line.startswith("up to 2 ahead"))
    assert "rollout.generate" in first and first.endswith("ended, rewards")
    drawn = [line.split()[:2] for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert sorted(name for level, name in drawn if level == "0") == ["actor_inf", "critic_inf", "ref_inf"]
    assert {name for _, name in drawn}.isdisjoint({"actor_gen", "rew_inf"})


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rl.algorithm=rloo", "--rl.group_size=1"], "rl.group_size"),
        (["--sync.strategy=sync"], "rl.algorithm and sync.strategy"),
        (["--rl.staleness=1"], "rl.staleness"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    run_job: Jobs, problems: Path, flags: list[str], told: str
) -> None:
    done = run_job(*TINY, "--dataset.path", problems, *flags, "--dry-run", script="ppo")

    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error[CFG") and told in line
