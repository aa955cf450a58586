"""`jobs/grpo.py` as a user runs it: it learns from rewards alone, and leaves a model that scores alike elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from hypha_ray.data.catalogue import load
from hypha_ray.data.slices import read_slice
from hypha_ray.rl.rewards.response import unpack_records
from hypha_ray.telemetry.sinks.files import read_jsonl
from tests.support.job_scripts import Jobs

TINY = ("@", "jobs/configs/grpo-tiny.toml")


@pytest.fixture(scope="module")
def run(run_shared_job: Jobs, problems: Path) -> Path:
    """The folder of a run with the ready job file."""
    done = run_shared_job(*TINY, "--dataset.path", problems, script="grpo")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return Path(done.stdout.splitlines()[-1].removeprefix("run: "))


def test_a_policy_learns_to_sort_from_rewards_alone(run: Path) -> None:
    evaluations = [record for record in read_jsonl(run / "metrics.jsonl") if record["kind"] == "eval"]
    assert evaluations[0]["pass@1"] < 0.1
    assert evaluations[-1]["pass@1"] >= 0.95
    assert evaluations[-1]["response_tokens"] == pytest.approx(3, abs=0.2)


def test_records_have_the_figures_of_reinforcement_learning(run: Path) -> None:
    rounds = [record for record in read_jsonl(run / "metrics.jsonl") if record["kind"] == "round"]
    assert len(rounds) == 20
    for record in rounds:
        assert 0 <= record["reward"] <= 1
        assert record["entropy"] > 0
        assert 0 <= record["equal_groups"] <= 1
    assert rounds[0]["reward"] < 0.5 and rounds[-1]["reward"] > 0.9
    assert rounds[0]["entropy"] == pytest.approx(torch.tensor(18.0).log().item(), abs=0.3)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["best_reward"] >= 0.95


def test_responses_can_be_read_with_their_prompts_and_rewards(run: Path) -> None:
    responses = read_jsonl(run / "rollouts.jsonl")
    assert [one["round"] for one in responses] == [number for number in range(20) for _ in range(4)]
    for one in responses:
        answer = "".join(sorted(one["prompt"][:2]))
        assert (one["reward"] == 1) == (one["response"] == answer and one["ended"])
    assert sum(one["reward"] == 1 for one in responses[-20:]) > sum(one["reward"] == 1 for one in responses[:20])


def test_every_prompt_of_a_round_is_in_its_commit(run: Path) -> None:
    commits = [json.loads(one.read_text(encoding="utf-8")) for one in sorted((run / "commits").glob("*.json"))]
    assert [sum(delta["samples"] for delta in commit["deltas"]) for commit in commits] == [320] * 20


def greedy_answers(run: Path, problems: Path) -> list[tuple[str, str, str]]:
    """Prompts of the first validation slice, greedy answers of the saved model by transformers, and the right ones."""
    model = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    manifest = load(problems)
    (info, *_) = manifest.of("validation")
    arrays = read_slice(problems, info, manifest)
    ids, mask = (torch.from_numpy(arrays[name]).long() for name in ("input_ids", "attention_mask"))
    found = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    texts = tokenizer.batch_decode(found[:, ids.shape[1] :], skip_special_tokens=True)
    right = [str(record["answer"]) for record in unpack_records(arrays["reward_data"])]
    return list(zip(tokenizer.batch_decode(ids, skip_special_tokens=True), texts, right, strict=True))


def test_the_saved_model_answers_by_greedy_generation_of_transformers(run: Path, problems: Path) -> None:
    answers = greedy_answers(run, problems)
    assert sum(text == answer for _, text, answer in answers) >= 0.95 * len(answers)


def test_a_reward_model_scores_answers_as_plain_transformers_does(
    run_shared_job: Jobs, run: Path, problems: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(num_labels=1, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
    scorer = LlamaForSequenceClassification(config).eval()
    scorer.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with torch.no_grad():
        texts = [prompt + text for prompt, text, _ in greedy_answers(run, problems)]
        scores = [float(scorer(**tokenizer(text, return_tensors="pt")).logits) for text in texts]

    words = ("--model", run / "model", "--dataset", problems, "--max-response-tokens", "4", "--temperature", "0")
    given = ("--reward", "model", "--reward-model", tmp_path)
    done = run_shared_job(*words, *given, "--json", script="evaluate")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["prompts"] == len(scores)
    assert found["reward"] == pytest.approx(sum(scores) / len(scores), abs=1e-6)
    assert "pass@1" not in found


def test_the_score_of_the_saved_model_is_that_of_the_run(run_shared_job: Jobs, run: Path, problems: Path) -> None:
    """Rewards and the limit of tokens are the run's own."""
    done = run_shared_job("--model", run / "model", "--dataset", problems, "--json", script="evaluate")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    last = [record for record in read_jsonl(run / "metrics.jsonl") if record["kind"] == "eval"][-1]
    for name in ("pass@1", "reward", "response_tokens"):
        assert found[name] == pytest.approx(last[name], abs=0.02)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--rl.reward.functions", '["exactly"]'),
            ("error[RWD003]: there is no such reward function — got 'exactly'", "did you mean 'exact'?"),
        ),
        (
            ("--rl.reward.functions", '["model"]', "--rl.reward.model.repository", "jobs"),
            ("error[MODEL005]: jobs/config.json can't be read", "a folder with a saved model"),
        ),
    ],
)
def test_rewards_that_cannot_be_had_are_refused_before_anything_starts(
    run_job: Jobs, problems: Path, words: tuple[str, ...], told: tuple[str, str]
) -> None:
    done = run_job(*TINY, "--dataset.path", problems, *words, script="grpo")
    assert (done.returncode in (2, 5), done.stdout) == (True, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(told[0])
    assert told[1] in line
    assert not run_job.home.exists()
