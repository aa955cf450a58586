"""Manifests of mixtures: slices that can be told apart, one set of rules, and datasets that don't go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hypha_ray.config.training import Dataset, DatasetShare
from hypha_ray.data.manifest import ClassInfo, Manifest, PreprocessorInfo, TensorInfo
from hypha_ray.data.mixture import joined_rules, mixed, same_tokens, whole
from hypha_ray.driver.data_source import opened
from hypha_ray.errors import DataError
from hypha_ray.rl.rewards.response import unpack_records
from hypha_ray.types import SLICES_PER_DATASET, SLICES_PER_PART, SliceInfo, Span, TokenRules
from hypha_ray.worker.incarnation import BatchSource
from tests.support.prepared import prepared

TENSORS = (TensorInfo("input_ids", "int32", (8,), 0, 9),)
TOKENIZER = PreprocessorInfo("gpt2", folder="tokenizer", vocab_size=10)
TEMPLATE = "a" * 64


def manifest(name: str = "texts", **fields: Any) -> Manifest:
    slices = tuple(SliceInfo(index, f"{index}", f"{index}" * 64, 10) for index in range(2))
    known = {"modality": "language", "slices": slices, "tensors": TENSORS, "preprocessor": TOKENIZER}
    return Manifest(name=name, **{**known, **fields})


def test_mixture_has_all_slices_under_numbers_of_their_own_and_bounds_of_both() -> None:
    other = manifest("code", tensors=(TensorInfo("input_ids", "int32", (8,), 3, 30),))
    both = mixed([manifest(), other])
    assert [info.index for info in both.slices] == [0, 1, SLICES_PER_DATASET, SLICES_PER_DATASET + 1]
    assert both.tensors == (TensorInfo("input_ids", "int32", (8,), 0, 30),)
    assert (both.name, both.samples("train")) == ("texts+code", 40)
    alone = manifest("alone", slices=(SliceInfo(0, "0", "f" * 64, 10),))
    assert mixed([manifest(), alone]).identity != mixed([alone, manifest()]).identity


@pytest.mark.parametrize(
    ("fields", "thing"),
    [
        ({"modality": "prompts"}, "modality"),
        ({"tensors": (TensorInfo("input_ids", "int32", (9,), 0, 9),)}, "tensors"),
        ({"tensors": (TensorInfo("input_ids", "int64", (8,), 0, 9),)}, "tensors"),
        ({"preprocessor": PreprocessorInfo("bert", folder="tokenizer", vocab_size=10)}, "tokenizer"),
        ({"preprocessor": None}, "tokenizer"),
        ({"classes": ClassInfo(("good", "bad"))}, "classes"),
        ({"slices": (SliceInfo(0, "0", "0" * 64, 10, "validation"),)}, "nothing to train on"),
        ({"slices": (SliceInfo(SLICES_PER_DATASET, "0", "0" * 64, 10),)}, "too many slices"),
    ],
)
def test_datasets_that_do_not_go_together_are_refused(fields: dict[str, Any], thing: str) -> None:
    with pytest.raises(DataError, match=f"DATA062.*{thing}") as caught:
        mixed([manifest(), manifest("other", **fields)])
    assert "'other'" in str(caught.value)


def part(number: int, count: int, **fields: Any) -> Manifest:
    slices = (SliceInfo(number * SLICES_PER_PART, "0", f"{number}" * 64, 10),)
    return manifest("texts", slices=slices, part=(number, count), **fields)


def test_parts_are_one_dataset_whatever_their_order_and_repetition() -> None:
    joined = whole([part(2, 3), part(0, 3), part(1, 3), part(0, 3)])
    assert [info.index for info in joined.slices] == [0, SLICES_PER_PART, 2 * SLICES_PER_PART]
    assert (joined.name, joined.part, joined.samples("train")) == ("texts", None, 30)
    assert whole([part(0, 1)]).identity == part(0, 1).identity
    assert whole([manifest(), manifest()]) == manifest()


def test_missing_parts_are_named() -> None:
    with pytest.raises(DataError, match=r"DATA045.*no part 1/4, 3/4, allowed all 4"):
        whole([part(0, 4), part(2, 4)])


def test_parts_that_differ_are_refused() -> None:
    with pytest.raises(DataError, match=r"DATA062.*tokenizer"):
        whole([part(0, 2), part(1, 2, preprocessor=None)])


def test_prompts_of_datasets_that_differ_in_length_are_padded_on_their_side(tmp_path: Path) -> None:
    for name, problems in (("short", "sort2"), ("long", "copy5")):
        prepared(f"problems:{problems}", str(tmp_path / name), tokenizer="characters", max_documents=40)
    shares = [DatasetShare(path=str(tmp_path / name)) for name in ("short", "long")]
    with opened(Dataset(mix=shares)) as source:
        batches, held = BatchSource(seed=0), source.manifest.of("train")
        for info in held:
            batches.put(info.index, source.read(info))
        batch = batches.batch([Span(0, info.index, 0, 5) for info in held], 0, 10)
        tokenizer = AutoTokenizer.from_pretrained(source.folder / "tokenizer")

    assert {tensor.name: tensor.shape for tensor in source.manifest.tensors}["input_ids"] == (6,)
    records, kept = unpack_records(batch.arrays["reward_data"]), batch.arrays["attention_mask"].astype(bool)
    texts = [tokenizer.decode(ids[mask]) for ids, mask in zip(batch.arrays["input_ids"], kept, strict=True)]
    assert [len(text) for text in texts] == [3] * 5 + [6] * 5
    for text, mask, record in zip(texts, kept, records, strict=True):
        assert mask[-len(text) :].all()
        digits = text.removesuffix("=")
        assert record["answer"] == (digits if record["task"] == "copy5" else "".join(sorted(digits)))


def test_tokenizers_of_one_name_and_size_with_other_tokens_are_refused(tmp_path: Path) -> None:
    for name, text in (("first", "abc" * 20), ("second", "abd" * 20), ("third", "cab" * 20)):
        (tmp_path / f"{name}.txt").write_text(text)
        prepared(str(tmp_path / f"{name}.txt"), str(tmp_path / name), tokenizer="characters", seq_len=4)
    first, second, third = (DatasetShare(path=str(tmp_path / name)) for name in ("first", "second", "third"))

    with opened(Dataset(mix=[first, third, first])) as source:
        assert source.manifest.name == "first+third+first"
    with pytest.raises(DataError, match=r"DATA062.*'first' and 'second'.*other tokens.*--tokenizer"):
        opened(Dataset(mix=[first, second])).__enter__()


def test_tokens_differ_if_a_number_is_another_one_unless_it_is_special(tmp_path: Path) -> None:
    files: dict[str, tuple[object, str]] = {
        "bpe": ({"a": 0, "b": 1, "</s>": 3}, "</s>"),
        "larger": ({"a": 0, "b": 1, "c": 2, "<end>": 3}, "<end>"),
        "unigram": ([["a", -1.0], ["b", -2.5]], "</s>"),
        "other": ({"b": 0, "a": 1}, "</s>"),
    }
    for name, (words, special) in files.items():
        (tmp_path / name).mkdir()
        file = {"added_tokens": [{"id": 3, "content": special}], "model": {"vocab": words}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(file))
    alike = [same_tokens(tmp_path / "bpe", tmp_path / name) for name in (*files, "none")]
    assert alike == [True, True, True, False, True]


def test_mixed_datasets_end_at_the_ends_of_each() -> None:
    texts, chats = TokenRules((1,), (2,), 10), TokenRules((1,), (7, 2), 12, TEMPLATE)

    assert joined_rules([("texts", texts), ("chats", chats)]) == TokenRules((1,), (2, 7), 12, TEMPLATE)


def test_mixed_chats_have_a_system_message_if_all_have_the_same() -> None:
    brief, other = (("chats", TokenRules((), (7,), 12, TEMPLATE, system)) for system in ("be brief", None))
    texts = ("texts", TokenRules((), (2,), 12))

    systems = []
    for datasets in ([brief, texts, brief], [brief, other], [texts]):
        rules = joined_rules(datasets)
        assert rules is not None
        systems.append(rules.system)
    assert systems == ["be brief", None, None]


def test_mixed_datasets_of_an_earlier_release_alone_have_no_rules() -> None:
    assert joined_rules([("one", None), ("other", None)]) is None


@pytest.mark.parametrize("other", [TokenRules((3,), (2,)), TokenRules((), (2,)), None])
def test_mixed_datasets_whose_texts_begin_differently_are_refused_with_a_remedy(other: TokenRules | None) -> None:
    with pytest.raises(DataError, match=r"DATA062.*'texts' and 'old'.*begin with different tokens.*prepare both again"):
        joined_rules([("texts", TokenRules((1,), (2,))), ("old", other)])


def test_mixed_chats_in_different_templates_are_refused_as_a_model_is_saved_with_one() -> None:
    datasets = [("one", TokenRules((), (7,), 12, TEMPLATE)), ("texts", TokenRules((), (2,), 12))]
    other = ("other", TokenRules((), (7,), 12, "b" * 64))

    with pytest.raises(DataError, match=r"DATA062.*'one' and 'other'.*different templates.*--chat-template"):
        joined_rules([*datasets, other])


def test_mixed_chats_begin_as_their_template_writes() -> None:
    chats = TokenRules((), (7,), 12, TEMPLATE)

    assert joined_rules([("chats", chats), ("texts", TokenRules((1,), (2,)))]) == TokenRules((1,), (7, 2), 12, TEMPLATE)
