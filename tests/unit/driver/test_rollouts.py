"""Checks of a job of reinforcement learning before anything starts, as a dry run makes them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hypha_ray.config.load import load, resolved_toml
from hypha_ray.data.catalogue import load as load_dataset
from hypha_ray.driver.data_source import in_folder
from hypha_ray.driver.evaluation import EvaluationRequest, ModelSource, evaluate_on_dataset, rl_of
from hypha_ray.driver.preflight.checks import case_of, check_case, check_rewards
from hypha_ray.errors import HyphaError
from hypha_ray.model.metrics import batches_of
from hypha_ray.rl.island import Island
from hypha_ray.types import TokenRules
from hypha_ray.types.events import means
from tests.support.plugins import modules_beside
from tests.support.prepared import prepared
from tests.support.rl import settings

OPT = ["--model.config.model_type=opt", "--model.config.ffn_dim=64", "--model.config.word_embed_proj_dim=32"]
"""A model with a table of 32 positions."""
REWARDS = """
def broken(response):
    raise RuntimeError(f"no verifier for {response.answer}")

number = 3
"""


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred prompts of three characters."""
    folder = tmp_path_factory.mktemp("data") / "sort2"
    prepared("problems:sort2", folder, tokenizer="characters", max_documents=100)
    return folder


beside = modules_beside(rewards_of_mine=REWARDS)


def check(dataset: Path, *flags: str, **config: object) -> list[str]:
    """Check a job with a tiny Llama on this dataset."""
    table = settings(model_type="llama", **{"vocab_size": 18, **config})
    sizes = {"intermediate_size", "num_key_value_heads"} if OPT[0] in flags else set()
    model = [f"--model.config.{name}={value}" for name, value in table.items() if name not in sizes]
    rl = ["--rl.algorithm=grpo", "--rl.generation.max_response_tokens=4", *flags]
    job = load([f"--dataset.path={dataset}", *model, *rl]).job
    return check_case(case_of(job, in_folder(dataset)))


@pytest.mark.parametrize("flags", [[], ["--rl.algorithm=ppo"], ["--rl.algorithm=ppo", "--sync.fragments=4"], OPT])
def test_a_job_that_fits_is_accepted_without_a_note(problems: Path, flags: list[str]) -> None:
    assert check(problems, *flags) == []


def test_functions_for_a_task_that_no_prompt_is_of_are_told(problems: Path) -> None:
    table = "--rl.reward.tasks.{0}.name={1} --rl.reward.tasks.{0}.functions=exact"
    tasks = [flag for number, name in enumerate(("sort2", "sort")) for flag in table.format(number, name).split()]

    assert check(problems, *tasks) == ["rl.reward.tasks names sort, and the first prompts are of sort2 alone"]


@pytest.mark.parametrize(
    ("flags", "code", "exit_code", "told"),
    [
        (["--model.type=token-classification", "--model.config.num_labels=2"], "RL001", 2, "causal-lm"),
        (["--rl.generation.max_response_tokens=30", *OPT], "DATA024", 3, "33 tokens, allowed up to 32"),
        (['--rl.reward.functions=["rewards_of_mine:broken"]'], "RWD001", 2, "RuntimeError: no verifier for"),
        (['--rl.reward.functions=["numbr"]'], "RWD003", 2, "did you mean 'number'?"),
        (['--rl.reward.functions=["rewards_of_mine:number"]'], "RWD004", 2, "got int, allowed a function"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_by_its_code(
    problems: Path, flags: list[str], code: str, exit_code: int, told: str
) -> None:
    with pytest.raises(HyphaError) as caught:
        check(problems, *flags)

    assert (caught.value.code, caught.value.exit_code) == (code, exit_code), caught.value
    assert told in str(caught.value)
    assert "Fix: " in str(caught.value)


@pytest.mark.slow
def test_functions_are_looked_up_in_the_working_directory_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(tmp_path)])
    (tmp_path / "found_here.py").write_text("def long(response):\n    return len(response.text)\n", encoding="utf-8")
    flags = ["--rl.algorithm=grpo", "--rl.reward.functions"]

    check_rewards(load([*flags, '["judge", "exact", "found_here:long"]']).job)
    with pytest.raises(HyphaError, match=r"RWD004.*ModuleNotFoundError.*put not_here.py into the job's work") as caught:
        check_rewards(load([*flags, '["not_here:long"]']).job)

    assert caught.value.exit_code == 2


def test_a_dataset_without_prompts_is_refused(corpus: Path) -> None:
    with pytest.raises(HyphaError, match=r"RL002.*has no prompts.*Fix: prepare prompts") as caught:
        check(corpus, vocab_size=384)

    assert caught.value.exit_code == 3


def test_prompts_without_a_tokenizer_are_refused(problems: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(problems, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer")))
    load_dataset(problems).model_copy(update={"preprocessor": None}).save(bare)

    with pytest.raises(HyphaError, match=r"RL003.*there is no tokenizer.*Fix: ") as caught:
        check(bare)

    assert caught.value.exit_code == 2


def test_rows_beyond_the_tokenizer_have_a_note(problems: Path) -> None:
    (note,) = check(problems, vocab_size=64)

    assert "the model has 64 rows, the tokenizer 18 tokens" in note


def test_dataset_of_an_earlier_release_has_one_note_and_is_used_as_it_was_prepared(
    problems: Path, tmp_path: Path
) -> None:
    old = Path(shutil.copytree(problems, tmp_path / "old"))
    load_dataset(problems).model_copy(update={"tokens": None}).save(old)

    (note,) = check(old)

    assert "earlier release" in note and "prepare it again" in note


def test_a_policy_that_can_not_end_a_response_is_refused(problems: Path, tmp_path: Path) -> None:
    endless = Path(shutil.copytree(problems, tmp_path / "endless"))
    tokenizer = AutoTokenizer.from_pretrained(endless / "tokenizer")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(endless / "tokenizer")
    load_dataset(endless).model_copy(update={"tokens": TokenRules()}).save(endless)

    with pytest.raises(HyphaError, match=r"RL004.*a token that ends a response.*Fix: ") as caught:
        check(endless, eos_token_id=18)

    assert caught.value.exit_code == 2


ECHO = """
from hypha_ray.plugins import Options

class Echo:
    class Options(Options):
        reward: float = 0.0

    def __init__(self, options):
        self.reward = options.reward

    def reset(self, record): ...

    def step(self, response):
        return [{"role": "user", "content": "1"}], self.reward * len(response.ids)
"""


@pytest.mark.slow
def test_model_of_a_run_with_an_environment_is_evaluated_as_in_the_run(problems: Path, tmp_path: Path) -> None:
    (tmp_path / "echoes.py").write_text(ECHO, encoding="utf-8")
    table = settings(model_type="llama", vocab_size=18)
    flags = [f"--model.config.{name}={value}" for name, value in table.items()]
    flags += ["--rl.algorithm=grpo", "--rl.environment=echoes:Echo", "--rl.environment_options={reward=0.5}"]
    flags += ["--rl.episode.turns=3", "--rl.episode.turn_tokens=4", "--rl.generation.max_response_tokens=11"]
    flags += ["--rl.evaluation.samples=2", '--rl.reward.functions=["environment", "positions"]']
    loaded = load([f"--dataset.path={problems}", *flags])
    tokenizer = AutoTokenizer.from_pretrained(problems / "tokenizer")
    island = Island(loaded.job, tokenizer)
    island.model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "config.toml").write_text(resolved_toml(loaded.job), encoding="utf-8")
    (tmp_path / "events.jsonl").touch()
    source = in_folder(problems)
    infos = source.manifest.of("train")
    batches = list(batches_of([source.read(info) for info in infos], 32, [info.index for info in infos]))
    in_run = means(island.evaluate(batches))
    island.close()

    def figures(**options: Any) -> dict[str, float]:
        request = EvaluationRequest(str(problems), split="train", **options)
        subject, found = evaluate_on_dataset(request, ModelSource(tmp_path / "model"), lambda phase: None)
        assert ("environment echoes:Echo" in subject) == ("turns" in found)
        functions = "environment, positions" if not options else options.get("reward", "")
        assert subject.split("  ")[1].startswith(functions)
        return found

    found = figures()
    assert found.pop("prompts") == sum(info.samples for info in infos)
    assert found == pytest.approx(in_run)
    assert found["turns"] > 1 and found["reward/environment"] > 0
    assert figures(environment="echoes:Echo")["reward"] == found["reward"]
    assert figures(turns=1)["turns"] == 1
    assert "turns" not in figures(reward="exact")


@pytest.mark.parametrize(
    ("request_of_user", "functions", "tokens", "samples"),
    [
        ({}, ["positions", "length"], 4, 3),
        ({"samples": 2}, ["positions", "length"], 4, 2),
        ({"reward": "exact"}, ["exact"], 256, 1),
        ({"reward": "exact", "max_response_tokens": 7}, ["exact"], 7, 1),
        ({"environment": "calculator"}, ["environment"], 256, 1),
    ],
)
def test_answers_of_a_saved_policy_are_scored_as_its_run_did_unless_told_otherwise(
    request_of_user: dict[str, Any], functions: list[str], tokens: int, samples: int
) -> None:
    flags = ['--rl.reward.functions=["positions", "length"]', "--rl.evaluation.samples=3"]
    job = load(["--dataset.path=d", "--rl.algorithm=grpo", "--rl.generation.max_response_tokens=4", *flags]).job
    rl = rl_of(EvaluationRequest("d", **request_of_user), job)
    found = rl.reward.functions, rl.generation.max_response_tokens, rl.evaluation.samples
    assert found == (functions, tokens, samples)


def test_answers_of_other_models_are_compared_with_the_right_ones() -> None:
    for job in (None, load(["--dataset.path=d"]).job):
        assert rl_of(EvaluationRequest("d"), job).reward.functions == ["exact"]
