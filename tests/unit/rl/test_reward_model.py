"""Rewards by a sequence classifier: those that plain transformers gives each text by itself, and clear refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from hypha_ray.config.rl import Reward
from hypha_ray.config.schema import Model
from hypha_ray.errors import HyphaError
from hypha_ray.rl.island import Island
from hypha_ray.rl.reward_model import check_reward_model, load_scores, unscored
from hypha_ray.rl.rewards.response import Response
from tests.support.rl import BATCH, PAD, classifier, job, prompts, settings, tokenizer

TEXTS = ["1", "2222222222", "333", "98765", "", "0=0=0=0", "4"]
close = partial(pytest.approx, rel=1e-6, abs=1e-6)
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 14}
CHAT = (
    "{% for m in messages %}{{ {'user': '1', 'assistant': '2', 'system': '3'}[m.role] + m.content + '=' }}{% endfor %}"
)


def bert(folder: Path) -> None:
    torch.manual_seed(1)
    sizes = {**SMALL, "max_position_embeddings": 32, "initializer_range": 0.3}
    BertForSequenceClassification(BertConfig(num_labels=1, pad_token_id=PAD, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def gpt2(folder: Path) -> None:
    torch.manual_seed(2)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 14, "n_positions": 12, "initializer_range": 0.3}
    GPT2ForSequenceClassification(GPT2Config(num_labels=1, pad_token_id=PAD, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def without_padding(folder: Path) -> None:
    classifier(folder)
    change(folder, pad_token_id=None)


def of_half_precision(folder: Path) -> None:
    classifier(folder, dtype=torch.bfloat16)


def change(folder: Path, **keys: Any) -> None:
    """Change keys of a saved configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | keys), encoding="utf-8")


def responses(*texts: str, **data: Any) -> list[Response]:
    return [Response(f"{len(text)}7=", text, (), True, {"task": "sums", **data}, 12) for text in texts]


def scores(folder: Path, given: list[Response], **table: Any) -> list[float]:
    reward = Reward.model_validate({"functions": ["model"], "model": {"repository": str(folder), **table}})
    assert check_reward_model(reward, Model()) == []
    return [one for (one,) in load_scores(reward, Model(), torch.device("cpu")).rewards(given)]


def plain_scores(folder: Path, texts: list[str], **options: Any) -> list[float]:
    """Scores of each text by itself, as users of transformers compute them."""
    model, own = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        found = [model(**own(text, return_tensors="pt", **options)).logits for text in texts]
    assert all(one.shape == (1, 1) for one in found)
    return [float(one) for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("make", [classifier, without_padding, bert, gpt2], ids=lambda make: make.__name__)
def test_scores_are_those_of_each_text_by_itself_whatever_the_batches(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path)
    given = responses(*TEXTS[:1], *TEXTS[2:])
    expected = plain_scores(tmp_path, [one.prompt + one.text for one in given])

    assert max(expected) - min(expected) > 0.05
    for size in (1, 2, 4, 16):
        assert scores(tmp_path, given, batch_size=size) == close(expected)
    assert scores(tmp_path, given[::-1], batch_size=2) == close(expected[::-1])


def test_a_model_scores_in_the_precision_that_it_was_saved_in(tmp_path: Path) -> None:
    of_half_precision(tmp_path)
    given = responses(*TEXTS)

    assert scores(tmp_path, given, batch_size=1) == plain_scores(tmp_path, [one.prompt + one.text for one in given])


def test_texts_beyond_the_models_positions_have_no_reward(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpt2(tmp_path)
    given = responses("1" * 9, "1" * 10)
    fits, beyond = scores(tmp_path, given)
    one_too_many = replace(given[0], text="1" * 10)

    assert math.isnan(scores(tmp_path, [one_too_many])[0])
    assert fits == close(plain_scores(tmp_path, ["97=" + "1" * 9])[0])
    assert math.isnan(beyond)
    assert "1 of 2 texts are empty, or longer than the 12 positions" in caplog.text


def test_text_and_messages_of_a_column_go_into_the_models_chat_template(tmp_path: Path) -> None:
    classifier(tmp_path, chat_template=CHAT)
    system = [{"role": "system", "content": "5"}, {"role": "user", "content": "66"}]
    given = [*responses("8", asked="44"), *responses("99", asked=system)]

    found = scores(tmp_path, given, chat_column="asked")
    assert found == close(plain_scores(tmp_path, ["144=28=", "35=166=299="]))


def test_responses_of_tasks_with_other_functions_are_not_scored(tmp_path: Path) -> None:
    classifier(tmp_path)
    tasks = [{"name": "sums", "functions": ["exact"]}]
    table = {"functions": ["exact", "model"], "tasks": tasks, "model": {"repository": str(tmp_path)}}
    found = load_scores(Reward.model_validate(table), Model(), torch.device("cpu"))
    other = Response("3", "4", (), True, {"task": "poems"}, 12)

    (summed,), (written,) = found.rewards([*responses("1"), other])
    assert math.isnan(summed) and math.isfinite(written)


def headless(folder: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**settings())).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def with_two_labels(folder: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(num_labels=2, **settings())).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def without_a_tokenizer(folder: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(num_labels=1, **settings())).save_pretrained(folder)


def with_a_small_vocabulary(folder: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(num_labels=1, **settings(vocab_size=13))).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def without_any_padding(folder: Path) -> None:
    without_padding(folder)
    own = AutoTokenizer.from_pretrained(folder)
    own.pad_token = None
    own.save_pretrained(folder)


def renamed(folder: Path) -> None:
    """A language model that says it is a classifier."""
    headless(folder)
    change(folder, architectures=["LlamaForSequenceClassification"], num_labels=1)


def of_the_last_token(folder: Path) -> None:
    """A family whose head looks at the last place, whatever is there."""
    sizes = {"d_model": 32, "d_inner": 32, "n_layer": 2, "n_head": 4, "vocab_size": 14}
    XLNetForSequenceClassification(XLNetConfig(num_labels=1, pad_token_id=PAD, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


@pytest.mark.parametrize(
    ("make", "table", "code", "told"),
    [
        (classifier, {"repository": None}, "RWD007", "rl.reward.model.repository"),
        (headless, {}, "RWD007", "got LlamaForCausalLM, allowed a model of a class …ForSequenceClassification"),
        (with_two_labels, {}, "RWD007", "got 2 labels, allowed a sequence classifier with one label"),
        (without_a_tokenizer, {}, "RWD007", "got no tokenizer"),
        (with_a_small_vocabulary, {}, "RWD007", "got a tokenizer with token 13, allowed token ids below 13"),
        (without_any_padding, {}, "RWD007", "got no padding token, allowed pad_token_id in its config.json"),
        (classifier, {"chat_column": "asked"}, "RWD007", "got no chat template"),
        (classifier, {"repository": "./nowhere"}, "HUB001", "doesn't exist"),
        (of_the_last_token, {}, "RWD007", "apart with padding and without, allowed up to 0.001"),
        (renamed, {}, "MODEL006", "score.weight"),
    ],
)
def test_a_model_that_cannot_reward_is_one_line_before_the_start(
    make: Callable[[Path], None], table: dict[str, Any], code: str, told: str, tmp_path: Path
) -> None:
    make(tmp_path)
    reward = Reward.model_validate({"functions": ["model"], "model": {"repository": str(tmp_path), **table}})
    with pytest.raises(HyphaError) as raised:
        check_reward_model(reward, Model())

    assert raised.value.code == code
    assert told in str(raised.value) and "\n" not in str(raised.value)
    assert raised.value.exit_code in (2, 5)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (
            {},
            "has no 'asked' for the reward model — got task. Fix: prepare the dataset with --keep-columns asked",
        ),
        ({"asked": [{"role": "robot", "content": "1"}]}, "got 'asked' in its chat template: "),
    ],
)
def test_prompts_that_the_chat_template_does_not_take_are_refused_before_the_start(
    data: dict[str, Any], told: str, tmp_path: Path
) -> None:
    classifier(tmp_path, chat_template=CHAT)
    table = {"functions": ["model"], "model": {"repository": str(tmp_path), "chat_column": "asked"}}
    with pytest.raises(HyphaError, match=f"RWD007.*{told}"):
        unscored(Reward.model_validate(table), Model()).rewards(responses("1", **data))  # type: ignore[union-attr]


def test_an_island_is_rewarded_by_the_model_and_has_no_share_of_right_responses(tmp_path: Path) -> None:
    classifier(tmp_path)
    flags = ('--rl.reward.functions=["model", "exact"]', "--rl.reward.weights=[2, 0]")
    table = {"reward.model.repository": str(tmp_path), "reward.model.batch_size": 1, "shown_responses": 16}
    island = Island(job(*flags, **table), tokenizer())
    step = island.step(BATCH)

    expected = plain_scores(tmp_path, [one["prompt"] + one["response"] for one in step.shown])
    assert [one["rewards"]["model"] for one in step.shown] == expected
    assert step.sums["reward"] == (pytest.approx(2 * sum(expected), abs=1e-5), 16)
    assert "pass@1" not in island.evaluate([BATCH])


def fond_of_sevens(folder: Path) -> None:
    """Save a reward model whose last layer was fitted to the share of sevens in a response."""
    classifier(folder)
    model, own = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    digits = torch.randint(0, 10, (600, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ids = own([f"{row[0]}=" + "".join(map(str, row.tolist())) for row in digits], return_tensors="pt").input_ids
        features = model.model(ids).last_hidden_state[:, -1]
        fitted = torch.linalg.lstsq(features, (digits == 7).float().mean(1, keepdim=True)).solution
        model.score.weight.copy_(fitted.T)
    model.save_pretrained(folder)


@pytest.mark.slow
def test_a_policy_learns_what_the_reward_model_likes(tmp_path: Path) -> None:
    fond_of_sevens(tmp_path)
    flags = ('--rl.reward.functions=["model"]', f"--rl.reward.model.repository={tmp_path}")
    island = Island(job(*flags, "--rounds.update_rounds=40", group_size=8), tokenizer())

    def sevens() -> float:
        """Mean probability of a seven after the equals sign."""
        ids = tokenizer()(["12=", "34=", "56=", "98="], return_tensors="pt").input_ids
        with torch.no_grad():
            return float(island.model(ids).logits[:, -1].softmax(-1)[:, tokenizer().convert_tokens_to_ids("7")].mean())

    before = sevens()
    figures = [
        island.step(prompts(["12=", "34=", "56=", "98="], [""] * 4, epoch)).sums["reward"] for epoch in range(40)
    ]

    rewards = [total / count for total, count in figures]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert before < 0.2
    assert sevens() > 0.6
