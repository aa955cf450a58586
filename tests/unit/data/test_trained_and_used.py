"""One table: ids that are trained on are those that every use of the model makes, for tokenizers of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from transformers import AutoTokenizer

from hypha_ray.config.schema import Job, Model, Preprocessor
from hypha_ray.driver.data_source import DataSource, in_folder, preprocessor_for
from hypha_ray.model.layout import gather, layout_of, views
from hypha_ray.model.lora import build_trained
from hypha_ray.model.saved_model import export
from hypha_ray.model.tokenizers import vocabulary_of
from hypha_ray.model.writer import Writer
from hypha_ray.rl.policy import end_tokens
from tests.support.prepared import prepared, table
from tests.support.small_tokenizers import MAKERS

QUESTIONS = ["say red", "Q : 10 + 2 =", "say  two words ", "say sun\n", "Grüße: 12="]
ANSWERS = ["red", "12", " moon tree", "sun sun", "Ö 3"]
PADDING = 5
"""Rows of the model beyond the tokenizer's."""


class Prepared(NamedTuple):
    """A tokenizer's folder, and pairs and prompts that were prepared with it."""

    tokenizer: str
    pairs: Path
    prompts: Path


def made(name: str, folder: Path, **options: Any) -> Prepared:
    """Prepare the questions, with answers to train on and with answers for rewards."""
    if name == "byte":
        tokenizer = name
    else:
        MAKERS[name]().save_pretrained(folder / "tokenizer")
        tokenizer = str(folder / "tokenizer")
    rows = [{"q": question, "a": answer} for question, answer in zip(QUESTIONS, ANSWERS, strict=True)]
    source = table(folder / "rows.jsonl", *rows)
    common = {"tokenizer": tokenizer, "prompt_column": "q", "validation_fraction": 0.0, "seq_len": 256, **options}
    prepared(source, folder / "pairs", completion_column="a", **common)
    prepared(source, folder / "prompts", answer_column="a", **common)
    return Prepared(tokenizer, folder / "pairs", folder / "prompts")


def trained_rows(source: DataSource) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ids before the scored ones, and the scored ones, of each sample; a template may write more behind these."""
    found = set()
    for info in source.manifest.slices:
        arrays = source.read(info)
        for ids, mask, labels in zip(*(arrays[key] for key in ("input_ids", "attention_mask", "labels")), strict=True):
            scored = np.asarray(labels) != -100
            before = np.asarray(mask).astype(bool) & (np.cumsum(scored) == 0)
            found.add((tuple(ids[before].tolist()), tuple(ids[scored].tolist())))
    return found


def prompt_rows(source: DataSource) -> set[tuple[int, ...]]:
    """Ids of each prompt, which all engines begin with."""
    slices = [source.read(info) for info in source.manifest.slices]
    rows = [
        zip(arrays["input_ids"], np.asarray(arrays["attention_mask"]).astype(bool), strict=True) for arrays in slices
    ]
    return {tuple(ids[mask].tolist()) for part in rows for ids, mask in part}


def saved_model(source: DataSource, folder: Path) -> Path:
    """Save a model with random weights, as a run on this dataset does."""
    tokenizer: Any = preprocessor_for(Preprocessor(), Model(), source)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": len(tokenizer) + PADDING, "pad_token_id": 0, **sizes}
    config["eos_token_id"] = tokenizer.eos_token_id
    job = Job.model_validate({"model": {"config": config}, "dataset": {"path": str(source.folder)}})
    trained = build_trained(job)
    layout = layout_of(trained)
    export(job, tokenizer, views(layout, [gather(trained, layout, 0)]), folder)
    return folder


@pytest.mark.parametrize("name", [*MAKERS, "byte"])
def test_ids_of_prompts_are_the_trained_ones_wherever_a_model_is_used(name: str, tmp_path: Path) -> None:
    given = made(name, tmp_path)
    pairs, prompts = in_folder(given.pairs), in_folder(given.prompts)
    folder = saved_model(pairs, tmp_path / "model")
    saved, writer = AutoTokenizer.from_pretrained(folder), Writer(folder)

    trained = trained_rows(pairs)

    assert not writer.chats and writer.leaves_template == (saved.chat_template is not None)
    used = {tuple(saved(question)["input_ids"]) for question in QUESTIONS}
    assert {before for before, _ in trained} == used == prompt_rows(prompts)
    assert {tuple(writer._encode(question)[0].tolist()) for question in QUESTIONS} == used
    rules = pairs.manifest.tokens
    assert rules is not None and all(before[: len(rules.begin)] == rules.begin for before, _ in trained)
    ends = end_tokens(writer._network, saved)
    assert all(answer[-1] in ends for _, answer in trained)
    assert not any(token in ends for _, answer in trained for token in answer[:-1])
    assert ends >= set(rules.ends)
    rows = writer._network.config.vocab_size
    assert writer._network.generation_config.suppress_tokens == vocabulary_of(saved).unknown(rows)
    assert len(writer._network.generation_config.suppress_tokens) >= PADDING


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral", "lines", "phi"])
def test_ids_of_chats_are_the_trained_ones_wherever_a_model_is_used(name: str, tmp_path: Path) -> None:
    given = made(name, tmp_path, chat=True)
    pairs, prompts = in_folder(given.pairs), in_folder(given.prompts)
    folder = saved_model(pairs, tmp_path / "model")
    saved, writer = AutoTokenizer.from_pretrained(folder), Writer(folder)

    trained = trained_rows(pairs)

    assert writer.chats and not writer.leaves_template
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    used = {tuple(saved.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)) for chat in chats}
    assert {before for before, _ in trained} == used == prompt_rows(prompts)
    written = set()
    for question in QUESTIONS:
        writer.forget()
        written.add(tuple(writer._encode(question)[0].tolist()))
    assert written == used
    ends = end_tokens(writer._network, saved)
    assert all(answer[-1] in ends for _, answer in trained)
    rules = pairs.manifest.tokens
    assert rules is not None and all(before.count(begin) == 1 for begin in rules.begin for before, _ in trained)
