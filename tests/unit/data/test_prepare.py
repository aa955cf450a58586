"""Preparation: the same bytes for the same options, documents in one split, folders that appear whole."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from hypha_ray.data.catalogue import load
from hypha_ray.data.encoders import ByteEncoder, Tokens, load_encoder
from hypha_ray.data.kinds.documents import batches, hold_out, pack, shuffle
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare, staged
from hypha_ray.data.slices import Arrays, read_slice
from hypha_ray.errors import ConfigError, DataError, TryAgainError

WORDS = 64


def silent(what: str, number: int) -> None:
    """No progress is shown."""


def stories(folder: Path, count: int = 60) -> Path:
    """Files of one line; the n-th says nothing but its own number, in three digits."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03d}.txt").write_text(f"{number:03d} " * WORDS)
    return folder


def run(source: Path | str, out: Path, **options: Any) -> Manifest:
    given_options = PrepareOptions(str(source), out, seq_len=32, samples_per_slice=50)
    return prepare(replace(given_options, **options), silent)


def arrays_of(out: Path, split: str) -> Arrays:
    manifest = load(out)
    parts = [read_slice(out, info, manifest) for info in manifest.of(split)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def text_of(ids: Tokens) -> list[str]:
    """The documents, or pieces of them, that rows of byte tokens hold."""
    rows = (bytes((row[row > 2] - 3).astype(np.uint8).tolist()).decode() for row in ids)
    return [word for row in rows for word in row.split() if len(word) == 3]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=40), max_size=5))
def test_byte_encoder_gives_the_ids_of_the_byt5_tokenizer(texts: list[str]) -> None:
    reference = ByT5Tokenizer()
    ids = [reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] for text in texts]
    expected = [token for text in ids for token in (*text, reference.eos_token_id)]
    assert ByteEncoder().encode(texts).tolist() == expected


@pytest.mark.parametrize("text", ["</s>", "a<pad>b", "<extra_id_0> <unk>", "\0", "ﬀ 🙂\r\n"])
def test_byte_encoder_takes_special_tokens_in_text_literally(text: str) -> None:
    reference = ByT5Tokenizer()(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ByteEncoder().encode([text]).tolist() == [*reference, 1]
    assert 1 not in reference


def test_byte_tokenizer_saved_beside_the_slices_decodes_them(tmp_path: Path) -> None:
    manifest = run(stories(tmp_path / "s"), tmp_path / "out")
    assert manifest.preprocessor is not None
    assert manifest.preprocessor.folder is not None
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / manifest.preprocessor.folder)
    row = arrays_of(tmp_path / "out", "train")["input_ids"][0]
    assert " ".join(text_of(row[None])) in tokenizer.decode(row)
    assert manifest.preprocessor.vocab_size == len(tokenizer) == 384
    manifest.require(vocab_size=len(tokenizer))


@pytest.fixture(scope="module")
def saved_bytes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bytes")
    ByteEncoder().save(folder)
    return AutoTokenizer.from_pretrained(folder / "tokenizer")


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_saved_byte_tokenizer_leaves_a_prompt_open(saved_bytes: Any, text: str) -> None:
    ids = saved_bytes(text, split_special_tokens=True)["input_ids"]
    assert [*ids, 1] == ByteEncoder().encode([text]).tolist()
    assert saved_bytes.decode(ids) == text


def test_saved_byte_tokenizer_has_the_tokens_of_byt5(saved_bytes: Any) -> None:
    reference = ByT5Tokenizer()
    names = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{number}>" for number in range(125))]
    assert saved_bytes.convert_tokens_to_ids(names) == reference.convert_tokens_to_ids(names)
    assert (saved_bytes.pad_token_id, saved_bytes.eos_token_id, saved_bytes.unk_token_id) == (0, 1, 2)
    assert set(saved_bytes("a")) == {"input_ids", "attention_mask"}  # whatever else is there, generate refuses
    assert "".join(text for text in saved_bytes.batch_decode([[1, 100, 0]], skip_special_tokens=True)) == "a"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_model_saved_with_the_byte_tokenizer_continues_a_prompt(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 384, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"hidden_size": 16, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    network.save_pretrained(tmp_path)
    ByteEncoder().save(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path / "tokenizer").save_pretrained(tmp_path)
    for prompt in ("def f(", "größer"):
        row = [byte + 3 for byte in prompt.encode()]
        for _ in range(8):
            row.append(int(network(torch.tensor([row])).logits[0, -1].argmax()))
        expected = bytes(token - 3 for token in row if 3 <= token < 259).decode(errors="replace")
        how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
        assert pipeline("text-generation", str(tmp_path))(prompt, **how)[0]["generated_text"] == expected
        loaded, tokenizer = (kind.from_pretrained(tmp_path) for kind in (AutoModelForCausalLM, AutoTokenizer))
        assert loaded.generate(**tokenizer(prompt, return_tensors="pt"), **how)[0].tolist() == row


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text(max_size=40), min_size=1, max_size=4))
def test_character_tokenizer_has_a_token_for_each_character(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    encoder, folder = load_encoder("characters", None, lambda: texts), tmp_path_factory.mktemp("characters")
    info = encoder.save(folder)
    saved = AutoTokenizer.from_pretrained(folder / "tokenizer")
    characters = sorted(set("".join(texts)))
    assert info.vocab_size == len(saved) == len(characters) + 3
    assert (saved.pad_token_id, saved.eos_token_id, saved.unk_token_id) == (0, 1, 2)
    expected = [id for text in texts for id in (*(characters.index(one) + 3 for one in text), 1)]
    assert encoder.encode(texts).tolist() == expected
    for text in texts:
        assert saved.decode(saved(text, split_special_tokens=True)["input_ids"]) == text


def test_character_tokenizer_takes_what_the_source_lacks_as_unknown() -> None:
    assert load_encoder("characters", None, lambda: ["ab"]).encode(["b?a"]).tolist() == [4, 2, 3, 1]


def test_prepare_with_characters_has_those_of_the_documents_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "%s"}\n{"text": "z"}\n' % ("ab " * 64))
    manifest = run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="characters", max_documents=1)
    assert manifest.preprocessor is not None
    assert (manifest.preprocessor.name, manifest.preprocessor.vocab_size) == ("characters", 6)
    assert [tensor.maximum for tensor in manifest.tensors if tensor.name == "input_ids"] == [5]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of our own in a folder, as `save_pretrained` leaves it."""
    vocabulary = {"<unk>": 0, "<end>": 1, "once": 2, "upon": 3, "a": 4, "time": 5}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>")
    fast.save_pretrained(tmp_path / "t")
    return tmp_path / "t"


def test_encoder_of_a_tokenizer_ends_each_document(tokenizer: Path) -> None:
    encoder = load_encoder(str(tokenizer), None, list)
    assert encoder.encode(["once upon", "a time a time", ""]).tolist() == [2, 3, 1, 4, 5, 4, 5, 1, 1]
    assert encoder.encode(["a"]).dtype == np.int32


def test_encoder_of_a_tokenizer_takes_special_tokens_in_text_literally(tokenizer: Path) -> None:
    assert load_encoder(str(tokenizer), None, list).encode(["once <end> upon"]).tolist().count(1) == 1


def test_prepare_with_a_tokenizer_of_a_folder_saves_it_beside_the_slices(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "once upon a time a time"}\n' * 99 + '{"text": "time"}\n')
    out = tmp_path / "out"
    manifest = run(tmp_path / "a.jsonl", out, tokenizer=str(tokenizer), validation_fraction=0.0)
    assert {tensor.maximum for tensor in manifest.tensors if tensor.name == "input_ids"} == {5}
    saved, own = (AutoTokenizer.from_pretrained(folder) for folder in (out / "tokenizer", tokenizer))
    assert saved.get_vocab() == own.get_vocab()


def test_tokenizer_that_ends_every_text_is_named(tmp_path: Path, tokenizer: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path / "ending")
    for folder, words in ((tmp_path / "ending", "ends every text"), (tokenizer, None)):
        manifest = run(stories(tmp_path / f"s-{words}"), tmp_path / f"out-{words}", tokenizer=str(folder))
        assert manifest.origin is not None
        assert [words in note for note in manifest.origin.notes] == ([True] if words else [])


def test_tokenizer_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PREP006.*can't be loaded"):
        load_encoder(str(tmp_path), None, list)


def test_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"PREP002.*end of a document"):
        load_encoder(str(tmp_path), None, list)


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 4), st.integers(1, 3))
def test_pack_gives_all_tokens_in_order_but_a_short_tail(lengths: list[int], seq_len: int, block: int) -> None:
    total = sum(lengths)
    parts = np.split(np.arange(total, dtype=np.int32), np.cumsum(lengths)[:-1]) if lengths else []
    blocks = list(pack(parts, seq_len, block))
    assert all(len(rows) == block for rows in blocks[:-1])
    assert all(rows.shape[1] == seq_len and len(rows) for rows in blocks)
    flat = [int(token) for rows in blocks for token in rows.ravel()]
    assert flat == list(range(total - total % seq_len))


@given(st.lists(st.text(max_size=5)), st.integers(1, 30))
def test_batches_are_full_and_keep_the_order(texts: list[str], size: int) -> None:
    groups = list(batches(texts, size))
    assert [text for group in groups for text in group] == texts
    assert all(sum(map(len, group)) >= size > sum(map(len, group[:-1])) for group in groups[:-1])


@given(st.lists(st.integers(0, 999)), st.integers(0, 50), st.integers(0, 3))
def test_shuffle_gives_each_document_once_and_holds_few(numbers: list[int], size: int, seed: int) -> None:
    taken = given = 0
    texts = [str(number) for number in numbers]

    def source() -> Any:
        nonlocal taken
        for text in texts:
            taken += len(text)
            yield text

    found = []
    for text in shuffle(source(), np.random.default_rng(seed), size):
        assert taken - given <= size + 3
        given += len(text)
        found.append(text)
    assert Counter(found) == Counter(texts)


def test_shuffle_depends_on_its_seed_only() -> None:
    texts = [str(number) for number in range(200)]
    first, again, other = (list(shuffle(texts, np.random.default_rng(seed), 100)) for seed in (1, 1, 2))
    assert first == again != other
    assert first != texts


def encoded(documents: Sequence[str]) -> Tokens:
    return ByteEncoder().encode(documents)


@pytest.mark.parametrize(
    ("documents", "fraction", "limit", "samples", "left"),
    [
        (20, 0.1, 99, 4, 18),  # two documents of 20 tokens each: four sequences of 10
        (20, 0.1, 1, 1, 19),  # one sequence is all that is asked for
        (20, 0.0, 99, 0, 20),
        (20, 0.5, 0, 0, 20),
        (20, 0.001, 99, 2, 19),  # one document at least
        (1, 0.5, 99, 0, 1),  # one document is left to train on
        (0, 0.5, 99, 0, 0),
    ],
)
def test_hold_out_takes_a_fraction_up_to_a_limit(
    documents: int, fraction: float, limit: int, samples: int, left: int
) -> None:
    window = [f"{number:019d}" for number in range(documents)]
    held = hold_out(window, encoded, 10, fraction, limit)
    assert (held.sequences.shape, len(window), len(held.digests)) == ((samples, 10), left, documents - left)


def test_hold_out_of_short_documents_goes_on_to_a_whole_sequence() -> None:
    held = hold_out([str(number) for number in range(10)], encoded, 10, 0.01, 99)
    assert (len(held.sequences), len(held.digests)) == (1, 5)


SHAPES = st.one_of(
    st.lists(st.integers(1, 60), min_size=40, max_size=120),  # all alike
    st.tuples(st.integers(1000, 20_000), st.lists(st.integers(1, 60), min_size=0, max_size=60)).map(
        lambda shape: [shape[0], *shape[1]]  # one giant among dwarves
    ),
    st.lists(st.integers(300, 5000), min_size=1, max_size=12),  # few and large
    st.lists(st.sampled_from([3, 30, 300, 3000]), min_size=1, max_size=30),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(SHAPES, st.sampled_from([4, 10, 32]), st.floats(0.01, 0.5), st.integers(1, 300), st.integers(0, 9))
def test_hold_out_loses_little_whatever_the_sizes_of_documents(
    sizes: list[int], seq_len: int, fraction: float, limit: int, seed: int
) -> None:
    texts = [f"{number:x}" + "." * size for number, size in enumerate(sizes)]
    np.random.default_rng(seed).shuffle(texts)
    window, total = list(texts), len(encoded(texts))
    held = hold_out(window, encoded, seq_len, fraction, limit)
    gone = [text for text in texts if text not in window]
    assert held.sequences.size + held.cut_tokens == len(encoded(gone)) and len(held.sequences) <= limit
    assert held.documents == len(held.digests) == len(gone)
    assert held.cut_tokens <= 0.06 * total + seq_len  # less than one sequence is no sample
    assert bool(held.why_none) == (not len(held.sequences))
    trained = len(encoded(window)) // seq_len * seq_len
    assert trained + held.sequences.size > 0.9 * total - 2 * seq_len


def test_hold_out_takes_none_of_the_training_samples_of_one_huge_document() -> None:
    window = ["." * 100_000, *(f"{number:049d}" for number in range(200))]
    held = hold_out(window, encoded, 10, 0.1, 999)
    assert (len(held.sequences), len(held.digests), len(window)) == (100, 20, 181)
    assert "." * 100_000 in window


def test_hold_out_takes_repetitions_together_and_loses_none() -> None:
    window = [f"{number % 100:019d}" for number in range(1000)]
    held = hold_out(window, encoded, 10, 0.05, 999)
    assert (len(held.sequences), len(held.digests), held.documents, len(window)) == (100, 5, 50, 950)


@pytest.mark.parametrize(
    ("documents", "limit", "words"),
    [
        (["." * 500], 9, "only one document"),
        (["." * 500] * 7, 9, "only one document"),
        (["a", "b", "c"], 9, "too little"),
        (["a" * 5000, "b" * 5000], 9, "for 9 samples.*--validation-samples"),
    ],
)
def test_hold_out_of_nothing_says_why(documents: list[str], limit: int, words: str) -> None:
    window = list(documents)
    held = hold_out(window, encoded, 10, 0.1, limit)
    assert (len(held.sequences), held.cut_tokens, window) == (0, 0, documents)
    assert re.search(words, held.why_none)


def test_prepare_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    source = stories(tmp_path / "s")
    run(source, tmp_path / "a" / "out")
    run(source, tmp_path / "b" / "out")
    assert files_of(tmp_path / "a" / "out") == files_of(tmp_path / "b" / "out")


def test_prepare_with_another_seed_gives_another_order(tmp_path: Path) -> None:
    source = stories(tmp_path / "s")
    first, other = (run(source, tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert {info.sha256 for info in first.slices}.isdisjoint(info.sha256 for info in other.slices)


def test_prepare_packs_documents_with_ends_between_and_no_padding(tmp_path: Path) -> None:
    run(stories(tmp_path / "s"), tmp_path / "out", validation_fraction=0.0)
    arrays = arrays_of(tmp_path / "out", "train")
    ids, mask = arrays["input_ids"], arrays["attention_mask"]
    assert ids.dtype == mask.dtype == np.int32
    assert ids.shape == mask.shape
    assert (mask == 1).all()
    assert ids.shape == (60 * (WORDS * 4 + 1) // 32, 32)
    assert (ids == 1).sum() in (59, 60)  # the last one may be in the tail that is dropped
    assert not np.isin(ids, (0, 2)).any()


def test_prepare_keeps_a_document_in_one_split(tmp_path: Path) -> None:
    source = stories(tmp_path / "s")
    for number in range(30):  # half of the documents once more, under another name
        (source / f"again-{number}.txt").write_text((source / f"{number:03d}.txt").read_text())
    run(source, tmp_path / "out", validation_fraction=0.3)
    splits = (arrays_of(tmp_path / "out", split) for split in ("validation", "train"))
    held_out, trained = (set(text_of(arrays["input_ids"])) for arrays in splits)
    assert len(held_out) > 10
    assert not held_out & trained
    assert len(held_out | trained) == 60


def test_prepare_mixes_documents_in_every_slice(tmp_path: Path) -> None:
    run(stories(tmp_path / "s"), tmp_path / "out", validation_fraction=0.0)
    words = text_of(arrays_of(tmp_path / "out", "train")["input_ids"][:50])
    assert len(set(words)) > 20


def test_prepare_cuts_slices_and_numbers_them_over_both_splits(tmp_path: Path) -> None:
    manifest = run(stories(tmp_path / "s"), tmp_path / "out", validation_samples=20, validation_fraction=0.2)
    train, validation = manifest.of("train"), manifest.of("validation")
    assert [info.index for info in (*train, *validation)] == list(range(len(manifest.slices)))
    assert all(info.samples == 50 for info in train[:-1])
    assert [info.samples for info in validation] == [20]
    assert load(tmp_path / "out") == manifest
    assert manifest.name == "out"


def test_prepare_stops_at_the_samples_and_documents_asked_for(tmp_path: Path) -> None:
    source = stories(tmp_path / "s")
    assert run(source, tmp_path / "a", max_samples=70).samples("train") == 70
    manifest = run(source, tmp_path / "b", max_documents=10, validation_fraction=0.0)
    assert manifest.origin is not None
    assert manifest.origin.notes == ("the source is read up to --max-documents 10",)
    assert set(text_of(arrays_of(tmp_path / "b", "train")["input_ids"])) == {f"{number:03d}" for number in range(10)}


def test_prepare_reports_what_it_does(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    options = PrepareOptions(str(stories(tmp_path / "s")), tmp_path / "out", seq_len=32, validation_fraction=0.0)
    manifest = prepare(options, lambda what, number: counts.update({what: number}))
    assert counts == {"documents": 60, "samples": manifest.samples("train")}


def test_prepare_of_a_single_long_text_has_both_splits(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{number} once upon a time\n" for number in range(20_000)))
    manifest = run(tmp_path / "a.txt", tmp_path / "out")
    assert manifest.samples("train") > manifest.samples("validation") == 256


def test_digits_are_split_by_class_and_no_image_is_in_both(tmp_path: Path) -> None:
    manifest = run("digits", tmp_path / "out", validation_samples=200, validation_fraction=0.1, samples_per_slice=1000)
    assert (manifest.modality, manifest.preprocessor) == ("vision", None)
    assert {tensor.name: tensor.maximum for tensor in manifest.tensors}["labels"] == 9
    train, validation = (arrays_of(tmp_path / "out", split) for split in ("train", "validation"))
    assert (len(train["labels"]), len(validation["labels"])) == (1617, 180)
    assert set(np.bincount(validation["labels"].astype(np.int64)).tolist()) <= {17, 18, 19}
    images = [{image.tobytes() for image in arrays["images"]} for arrays in (train, validation)]
    assert len(images[0] | images[1]) == len(images[0]) + len(images[1]) == 1797


def test_digits_twice_give_the_same_bytes(tmp_path: Path) -> None:
    first, again = (run("digits", tmp_path / parent / "d") for parent in "ab")
    other = run("digits", tmp_path / "c" / "d", seed=1)
    assert first == again
    assert first.slices[0].sha256 != other.slices[0].sha256


def test_digits_with_too_small_a_validation_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PREP005"):
        run("digits", tmp_path / "out", validation_samples=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"validation_fraction": 0.0, "seq_len": 1000}, "training sample.*514 tokens"),
        ({"seq_len": 1000}, "training sample.*514 tokens.*allowed 1000 tokens"),
    ],
)
def test_corpus_that_is_too_small_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=rf"DATA033.*{words}"):
        run(stories(tmp_path / "s", 2), tmp_path / "out", **options)


def test_corpus_that_is_too_small_for_two_splits_is_trained_on_and_says_so(tmp_path: Path) -> None:
    manifest = run(stories(tmp_path / "s", 2), tmp_path / "out", seq_len=400)
    assert (manifest.samples("train"), manifest.samples("validation")) == (1, 0)
    assert manifest.origin is not None
    assert any(note.startswith("no validation samples: there is too little") for note in manifest.origin.notes)


def left_out(manifest: Manifest) -> dict[tuple[str, str], int]:
    assert manifest.origin is not None
    return {(omission.what, omission.reason): omission.count for omission in manifest.origin.omissions}


ROWS = st.lists(st.one_of(st.integers(1, 200), st.sampled_from([1000, 8000])), min_size=1, max_size=60)


@settings(max_examples=25, deadline=None)
@given(ROWS, st.lists(st.sampled_from(["", " ", None, 7]), max_size=3), st.integers(0, 12), st.integers(1, 40))
def test_every_token_is_in_a_split_or_in_the_account(
    sizes: list[int], blanks: list[Any], repeated: int, limit: int
) -> None:
    texts = [f"{number:x}" + "." * size for number, size in enumerate(sizes)]
    texts += texts[:repeated]
    with tempfile.TemporaryDirectory() as place:
        source, out = Path(place) / "a.jsonl", Path(place) / "out"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, *blanks]))
        total = len(ByteEncoder().encode(texts))
        if total < 32:
            with pytest.raises(DataError, match=r"DATA033.*too small"):
                run(source, out, validation_samples=limit)
            return
        manifest = run(source, out, validation_samples=limit)
    told = left_out(manifest)
    kept = 32 * (manifest.samples("train") + manifest.samples("validation"))
    assert kept + sum(count for (what, _), count in told.items() if what == "tokens") == total
    assert kept > 0.9 * total - 2 * 32
    assert manifest.origin is not None and manifest.origin.documents == len(texts)
    assert sum(count for (what, _), count in told.items() if what == "rows") == len(blanks)


def test_repetitions_that_come_too_late_are_in_the_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypha_ray.data.kinds.documents.WINDOW_CHARACTERS", 3000)
    lines = [json.dumps({"text": f"{number % 50:03d}" + "." * 96}) + "\n" for number in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    manifest = run(tmp_path / "a.jsonl", tmp_path / "out")
    told, kept = left_out(manifest), 32 * (manifest.samples("train") + manifest.samples("validation"))
    late = told["documents", "repetitions of validation documents"]
    assert late > 0 and told["tokens", "of these repetitions"] == 100 * late
    assert kept + sum(count for (what, _), count in told.items() if what == "tokens") == 100 * 100


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no text.*empty"),
        (" \n\t\n", "there is no text.*blank"),
        ("One sentence.", "too small.*14 tokens"),
    ],
)
def test_corpus_without_enough_says_the_true_reason(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DataError, match=f"DATA033.*{words}"):
        run(tmp_path / "a.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_corpus_of_fewer_samples_than_asked_for_gives_a_part_of_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{number} once upon a time\n" for number in range(2000)))
    manifest = run(tmp_path / "a.txt", tmp_path / "out", validation_samples=10**6)
    train, validation = manifest.samples("train"), manifest.samples("validation")
    assert 0.04 * train < validation < 0.12 * train


def test_dataset_whose_name_is_no_utf8_is_made_and_read(tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"d\xff")
    assert run(stories(tmp_path / "s"), out) == load(out)
    assert (out / "tokenizer" / "tokenizer.json").is_file()
    assert load(out).name == "d?"
    (out / "manifest.json").unlink()
    assert load(out).name == "d?"


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"seq_len": 1}, "--seq-len"),
        ({"samples_per_slice": 0}, "--samples-per-slice"),
        ({"validation_fraction": 1.0}, "--validation-fraction"),
        ({"validation_fraction": float("nan")}, "--validation-fraction"),
        ({"validation_fraction": -0.1}, "--validation-fraction"),
        ({"validation_samples": -1}, "--validation-samples"),
        ({"seed": -1}, "--seed"),
        ({"max_documents": 0}, "--max-documents"),
        ({"max_samples": 0}, "--max-samples"),
        ({"source": ""}, "--source"),
    ],
)
def test_option_out_of_range_is_refused_by_name(tmp_path: Path, options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"PREP001.*{flag} "):
        run(options.pop("source", "digits"), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_has_a_dataset_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    source, out = stories(tmp_path / "s"), tmp_path / "out"
    run(source, out, samples_per_slice=10)
    before = files_of(out)
    with pytest.raises(ConfigError, match=r"PREP004.*--overwrite"):
        run(source, out)
    assert files_of(out) == before
    (out / "notes.md").write_text("mine")
    manifest = run(source, out, overwrite=True)
    assert load(out) == manifest
    assert set(files_of(out)) == {"manifest.json", "notes.md", *(info.file for info in manifest.slices)}


def test_folder_of_bare_slices_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "mine.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="PREP004"):
        run("digits", tmp_path)


def test_folder_of_a_model_is_kept_whatever_is_told(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"PREP003.*has the weights of a model"):
        run("digits", tmp_path, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "config.json": b"mine",
        "model.safetensors": b"mine",
    }


@pytest.mark.parametrize("overwrite", [False, True])
def test_second_preparation_in_a_folder_is_refused_while_the_first_runs(tmp_path: Path, overwrite: bool) -> None:
    """Both would move their slices into the folder, and each would clear away those of the other."""
    with staged(tmp_path / "out", overwrite=False) as work:
        (work / "slice-00000.safetensors").write_bytes(b"first")
        with pytest.raises(TryAgainError, match=r"PREP016.*another process"), staged(tmp_path / "out", overwrite):
            pytest.fail("the second preparation began")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["slice-00000.safetensors"]
    with staged(tmp_path / "out", overwrite=True):
        pass
    assert not list((tmp_path / "out").iterdir())


def test_folder_that_was_left_unfinished_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".unfinished").mkdir(parents=True)
    for folder in (out, out / ".unfinished"):
        (folder / "slice-00007.safetensors").write_bytes(b"half")
    manifest = run("digits", out)
    assert load(out) == manifest
    assert {path.name for path in out.iterdir()} == {"manifest.json", *(info.file for info in manifest.slices)}


def test_move_that_fails_midway_leaves_no_half_of_a_dataset(tmp_path: Path) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    run("digits", prepared)
    (out / "other").mkdir(parents=True)
    (out / "other" / "notes.md").write_text("mine")  # in the way of the last folder that has to be moved
    with pytest.raises(DataError, match="DATA009"), staged(out, overwrite=False) as work:
        shutil.copytree(prepared, work, dirs_exist_ok=True)
        (work / "other").mkdir()
    with pytest.raises(DataError, match="DATA006"):
        load(out)
    assert run("digits", out) == load(out)
    assert (out / "other" / "notes.md").exists()


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EROFS, "where you may write"), (errno.ENOSPC, "free some space")]
)
def test_folder_that_cannot_be_written_has_a_remedy_that_fits(tmp_path: Path, number: int, remedy: str) -> None:
    with pytest.raises(DataError, match=f"DATA009.*{remedy}"), staged(tmp_path / "out", overwrite=False):
        raise OSError(number, os.strerror(number))


def test_failed_preparation_leaves_the_old_dataset_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = run("digits", out)
    names = {path.name for path in out.iterdir()}
    with pytest.raises(DataError, match="DATA030"):
        run(tmp_path / "missing.txt", out, overwrite=True)
    assert load(out) == before
    assert {path.name for path in out.iterdir()} == names


def test_failed_preparation_of_a_new_folder_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{')
    with pytest.raises(DataError, match="line 2"):
        run(tmp_path / "a.jsonl", tmp_path / "new" / "out")
    assert not (tmp_path / "new" / "out").exists()


def test_full_disk_is_reported_as_such(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(DataError, match=r"DATA009.*can't be written.*too large"):
            run("digits", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match=r"PREP003.*is a file"):
        run("digits", tmp_path / "out")
