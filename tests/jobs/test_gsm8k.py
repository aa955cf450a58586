"""`jobs/configs/gsm8k.toml` by the commands at its beginning, on a small model and questions in GSM8K's form."""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import math_verify
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from hypha_ray.telemetry.sinks.files import read_jsonl
from tests.support.forked_process import ROOT
from tests.support.job_scripts import Jobs, jobs_in
from tests.support.prepared import table

FILE = ROOT / "jobs" / "configs" / "gsm8k.toml"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = r"Put the final answer in \boxed{}."
SMALLER = {
    "rl.generation.max_response_tokens": 20,
    "rl.reward.processes": 1,
    "rl.reward.functions": '["math", "format", "own_rewards:letters", "model"]',
    "rl.reward.weights": "[1.0, 0.1, 0.0, 0.5]",
    "rl.reward.model.repository": "scorer",
    "rl.reward.model.chat_column": "question",
    "rounds.update_rounds": 2,
    "rounds.samples_between_updates": 16,
    "rounds.max_batch_size": 4,
    "resources.num_workers": 2,
    "resources.worker.gpu": 0,
}
"""Keys that make the job one for two cores; all others are the file's."""


OWN = """
def letters(response):
    return len(response.text)
"""


def question(draw: random.Random) -> dict[str, str]:
    one, other = draw.randint(0, 2), draw.randint(0, 1)
    text = f"Ann has {one} pens and buys {other} more. How many pens has she now?"
    return {"question": text, "answer": f"She has {one} + {other} = {one + other} pens.\n#### {one + other}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with random weights, and a tokenizer of byte pairs with its chat template."""
    folder, draw = tmp_path_factory.mktemp("models") / "qwen", random.Random(1)
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer, pairs.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    texts = [*(" ".join(question(draw).values()) for _ in range(200)), f"{SYSTEM} system user assistant"]
    pairs.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token=special[2], pad_token=special[0])
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **tokens)).save_pretrained(folder)
    return folder


def scorer(model: Path, folder: Path) -> None:
    """Save a reward model with the same tokenizer, beside the job."""
    torch.manual_seed(7)
    config = Qwen2Config.from_pretrained(model, num_labels=1, initializer_range=0.2)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def commands(folder: Path, model: Path) -> list[list[str]]:
    """Words of the commands in the comment of the job file, with files of this test in place of those that it names."""
    comment = "\n".join(line[1:] for line in FILE.read_text().splitlines() if line.startswith("#"))
    names = {"gsm8k.jsonl": f"{folder}/gsm8k.jsonl", "Qwen/Qwen2.5-0.5B-Instruct": f"{model}", "data/": f"{folder}/"}
    for name, own in names.items():
        assert name in comment
        comment = comment.replace(name, own)
    return [shlex.split(line) for line in re.findall(r"(?m)^ +(python .*)$", comment.replace("\\\n", " "))]


@pytest.fixture
def run_job(head: str, tmp_path: Path) -> Iterator[Jobs]:
    """Runs jobs in a folder with a reward function, which isn't the one that the cluster was started in."""
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    (tmp_path / "own_rewards.py").write_text(OWN)
    with jobs_in(tmp_path / "home", tmp_path, head) as jobs:
        yield jobs


def test_the_file_trains_a_chat_model_on_questions_by_the_commands_in_it(
    run_job: Jobs, model: Path, tmp_path: Path
) -> None:
    draw = random.Random(0)
    rows = [question(draw) for _ in range(60)]
    table(tmp_path / "gsm8k.jsonl", *rows)
    (_, _, *prepare), (_, _, *train) = commands(tmp_path, model)
    scorer(model, tmp_path / "scorer")
    prepared = run_job(*prepare, "--keep-columns", "question", script="prepare")
    assert prepared.returncode == 0, prepared.stderr
    flags = [f"--{key}={value}" for key, value in {"model.repository": model, **SMALLER}.items()]
    done = run_job(*train, *flags, script="grpo")
    assert done.returncode == 0, done.stderr

    folder = Path(done.stdout.splitlines()[-1].removeprefix("run: "))
    records = list(read_jsonl(folder / "metrics.jsonl"))
    rounds, evaluations = ([one for one in records if one["kind"] == kind] for kind in ("round", "eval"))
    assert [one["samples"] for one in rounds] == [16, 16]
    assert all(0 <= one["pass@1"] <= one["pass@4"] <= 1 for one in evaluations) and len(evaluations) == 1
    for one in rounds:
        parts = one["reward/math"] + 0.1 * one["reward/format"] + 0.5 * one["reward/model"]
        assert one["reward"] == pytest.approx(parts)
    commits = [json.loads(one.read_text()) for one in sorted((folder / "commits").glob("*.json"))]
    assert len({one["theta_sha256"] for one in commits}) == 2, "nothing was learned from"
    AutoModelForCausalLM.from_pretrained(folder / "model")
    require_right_rewards(folder, rows, tmp_path / "scorer")


def require_right_rewards(folder: Path, rows: list[dict[str, str]], scorer: Path) -> None:
    """Compare prompts and rewards of a run with questions, chat template, math-verify and the scorer itself."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    network = AutoModelForSequenceClassification.from_pretrained(scorer).eval()
    asked = {}
    for row in rows:
        chat = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": row["question"]},
        ]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        asked[tokenizer.decode(ids, skip_special_tokens=True)] = row
    shown = list(read_jsonl(folder / "rollouts.jsonl"))
    assert len(shown) == 16
    for one in shown:
        row = asked[one["prompt"]]
        answer = math_verify.parse(row["answer"].rpartition("#### ")[2])
        right = math_verify.verify(answer, math_verify.parse(one["response"]))
        assert one["rewards"]["math"] == float(right), one
        assert one["rewards"]["own_rewards:letters"] == len(one["response"])
        chat = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": one["response"]}]
        with torch.no_grad():
            score = network(torch.tensor([tokenizer.apply_chat_template(chat, return_dict=False)])).logits
        assert one["rewards"]["model"] == pytest.approx(float(score), abs=1e-5)
