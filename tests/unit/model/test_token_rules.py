"""Decisions about tokens on their way: in a tokenizer, through its files, to generation and to saved models."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from hypha_ray.config.schema import Job, Model
from hypha_ray.data.encoders import save_preprocessor
from hypha_ray.data.storage import preprocessor_files, write_files
from hypha_ray.errors import ConfigError
from hypha_ray.model.layout import gather, layout_of, views
from hypha_ray.model.lora import build_trained
from hypha_ray.model.saved_model import ADAPTER, export
from hypha_ray.model.tokenizers import apply_rules, pack, prompt_ids, rules_of, saved_rules
from hypha_ray.model.writer import Writer
from hypha_ray.rl.policy import end_tokens
from hypha_ray.types import TokenRules
from tests.support import small_tokenizers as tokenizers

MAKERS = ("begins", "ends", "bare", "chatml", "llama3", "gemma", "mistral", "prefixed", "wordpiece", "unigram")
TEXT = "say red 10"


def begin_of(tokenizer: Any) -> tuple[int, ...]:
    """The ids before a text, by the tokenizer's own account of its special tokens."""
    whole = tokenizer(TEXT)["input_ids"]
    count = next((place for place, one in enumerate(whole) if one not in tokenizer.all_special_ids), 0)
    return tuple(whole[:count])


def saved(tokenizer: Any, folder: Path) -> Any:
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", MAKERS)
def test_saved_tokenizer_puts_the_begin_before_a_prompt_and_nothing_behind_it(name: str, tmp_path: Path) -> None:
    tokenizer = getattr(tokenizers, name)()
    bare = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    for rules in (TokenRules(begin_of(tokenizer), (5, 6), 7), TokenRules()):
        apply_rules(tokenizer, rules)
        for other in (tokenizer, saved(tokenizer, tmp_path / "one"), pack(tokenizer).load()):
            assert other(TEXT)["input_ids"] == [*rules.begin, *bare] == prompt_ids(other, TEXT, translates=False)
            assert other.decode(bare) == tokenizer.decode(bare)
            assert rules_of(other) == rules


def test_chat_templates_with_names_are_those_of_the_tokenizer_wherever_it_goes(tmp_path: Path) -> None:
    """One for tools is taken if a chat has some, as by environments with tools."""
    tokenizer = tokenizers.chatml()
    tokenizer.chat_template = {"default": tokenizers.CHATML, "tool_use": "{{ tools[0]['name'] }}: " + tokenizers.CHATML}
    chat: dict[str, Any] = {"conversation": [{"role": "user", "content": "red"}], "tokenize": False}
    tools = [{"name": "add"}]
    expected = "add: <|im_start|>user\nred<|im_end|>\n"

    save_preprocessor(tokenizer, tmp_path / "dataset" / "tokenizer")
    write_files(preprocessor_files(tmp_path / "dataset"), tmp_path / "copy")

    copies = (pack(tokenizer).load(), AutoTokenizer.from_pretrained(tmp_path / "copy" / "tokenizer"))
    for copy in copies:
        assert copy.apply_chat_template(**chat, tools=tools) == expected
        assert copy.apply_chat_template(**chat) == expected.removeprefix("add: ")


def test_texts_beside_a_template_begin_as_the_tokenizer_begins_them() -> None:
    tokenizer = tokenizers.llama3()
    before = tokenizer(TEXT)["input_ids"]

    apply_rules(tokenizer, TokenRules((), (3,), template_sha256="0" * 64))

    assert tokenizer(TEXT)["input_ids"] == before


@pytest.mark.parametrize("name", ["bare", "ends", "begins"])
def test_sources_of_translations_end_in_an_end_token(name: str, tmp_path: Path) -> None:
    tokenizer = getattr(tokenizers, name)()
    begin, bare = begin_of(tokenizer), tokenizer(TEXT, add_special_tokens=False)["input_ids"]

    apply_rules(tokenizer, TokenRules(begin, (tokenizer.eos_token_id,)), translates=True)

    loaded, wanted = saved(tokenizer, tmp_path), [*begin, *bare, tokenizer.eos_token_id]
    assert loaded(TEXT)["input_ids"] == wanted == prompt_ids(loaded, TEXT, translates=True)


def tiny(tokenizer: Any, rows: int | None = None) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "model_type": "llama",
        "vocab_size": rows or len(tokenizer),
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
        **sizes,
    }


def exported_by(job: Job, tokenizer: Any, folder: Path) -> Path:
    trained = build_trained(job)
    layout = layout_of(trained)
    export(job, tokenizer, views(layout, [gather(trained, layout, 0)]), folder)
    return folder


def job_of(model: dict[str, Any]) -> Job:
    return Job.model_validate({"model": model, "dataset": {"path": "unused"}})


def test_saved_folder_ends_where_answers_end_and_knows_no_further_ids(tmp_path: Path) -> None:
    tokenizer = tokenizers.chatml()
    turn, rows = tokenizer.convert_tokens_to_ids("<|im_end|>"), len(tokenizer) + 3
    apply_rules(tokenizer, TokenRules((), (turn,), len(tokenizer)))

    folder = exported_by(job_of({"config": tiny(tokenizer, rows)}), tokenizer, tmp_path / "model")

    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [tokenizer.eos_token_id, turn]
    assert settings["suppress_tokens"] == [rows - 3, rows - 2, rows - 1]
    assert saved_rules(Model(repository=str(folder))) == TokenRules((), (turn,), len(tokenizer))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert end_tokens(loaded, AutoTokenizer.from_pretrained(folder)) == {tokenizer.eos_token_id, turn}
    again = exported_by(job_of({"repository": str(folder)}), tokenizer, tmp_path / "again")
    assert json.loads((again / "generation_config.json").read_text()) == settings


def test_saved_adapter_tells_where_answers_end(tmp_path: Path) -> None:
    tokenizer = tokenizers.chatml()
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    LlamaForCausalLM(LlamaConfig(**tiny(tokenizer))).save_pretrained(tmp_path / "base")
    apply_rules(tokenizer, TokenRules((), (turn,)))

    job = job_of({"repository": str(tmp_path / "base"), "lora": {"rank": 2}})
    folder = exported_by(job, tokenizer, tmp_path / "model")

    for place in (folder, folder / ADAPTER):
        assert GenerationConfig.from_pretrained(place).eos_token_id == [tokenizer.eos_token_id, turn]
        assert saved_rules(Model(repository=str(place))) == TokenRules((), (turn,))


def saying(folder: Path, tokenizer: Any, chain: list[int], rules: TokenRules) -> Path:
    """Save a model that says each token of a chain after the one before, whatever is before that."""
    settings = tiny(tokenizer) | {"hidden_size": 512, "num_hidden_layers": 1, "tie_word_embeddings": False}
    torch.manual_seed(0)
    network = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for parameter in network.model.layers.parameters():
            parameter.zero_()
        network.lm_head.weight.zero_()
        for before, after in pairwise(chain):
            network.lm_head.weight[after] = network.model.embed_tokens.weight[before]
    apply_rules(tokenizer, rules)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("special", [True, False])
def test_writer_stops_where_answers_end_and_shows_no_end(
    special: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tokenizers.chatml()
    red, green, turn = (tokenizer(text)["input_ids"][-1] for text in ("say red", "say green", "say tree"))
    if special:
        turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    rules = TokenRules((), (turn,))
    folder = saying(tmp_path / "model", tokenizer, [red, green, turn, red], rules)

    answer = Writer(folder, raw=True).write("say red", max_new_tokens=12, temperature=0.0, top_p=1.0)

    assert answer == tokenizer.decode([green]) == capsys.readouterr().out.removesuffix("\n")


def test_prompt_with_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizers.bare()
    folder = saying(tmp_path / "model", tokenizer, [5, 6], TokenRules())
    config = LlamaConfig.from_pretrained(folder, vocab_size=100)
    LlamaForCausalLM(config).save_pretrained(folder)

    lacking = r"GEN003.*a token that the model lacks, 'say' — got token \d+, allowed 0 … 99"
    with pytest.raises(ConfigError, match=lacking):
        Writer(folder, raw=True).write("say red", max_new_tokens=2, temperature=0.0, top_p=1.0)
