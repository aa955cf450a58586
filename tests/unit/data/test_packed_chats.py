"""Packed chats: their losses together are those of each chat by itself, and models that mix them up are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from hypha_ray.config.schema import Model
from hypha_ray.data.kinds.chats import pack_chats, write_packed
from hypha_ray.data.kinds.kind import SliceWriter
from hypha_ray.data.kinds.scored_tokens import ScoredTokens
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.report import lengths_of, marked, sample_of
from hypha_ray.errors import ConfigError
from hypha_ray.model.build import build_model
from hypha_ray.model.configuration import resolve_task
from hypha_ray.model.loss_check import check_loss_of
from hypha_ray.model.losses import compute_losses
from hypha_ray.model.tasks import find_task
from hypha_ray.types import Samples
from tests.support.prepared import arrays_of, prepared, table

COLUMNS = {"prompt_column": "q", "completion_column": "a", "validation_fraction": 0.0}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "vocab_size": 384, "intermediate_size": 32, **SIZES}
GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 16, "n_layer": 2, "n_head": 2}
OPT = {"model_type": "opt", "vocab_size": 384, "ffn_dim": 32, "word_embed_proj_dim": 16, **SIZES}
MAMBA = {"model_type": "mamba", "vocab_size": 384, "hidden_size": 16, "num_hidden_layers": 2}


def both(tmp_path: Path) -> tuple[Manifest, Manifest]:
    """The same pairs, packed in samples of 32 tokens, and each by itself."""
    rows = ({"q": "?" * (1 + n % 5), "a": "yes" * (1 + n % 3)} for n in range(20))
    source = table(tmp_path / "a.jsonl", *rows)
    packed = prepared(source, tmp_path / "packed", pack=True, seq_len=32, **COLUMNS)
    return packed, prepared(source, tmp_path / "apart", seq_len=32, **COLUMNS)


def model_of(config: dict[str, Any], attention: str) -> Any:
    network = build_model(Model(config=config), seed=0).eval()
    network.set_attn_implementation(attention)
    return network


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_loss_of_packed_chats_is_that_of_the_chats_apart(
    tmp_path: Path, config: dict[str, Any], attention: str
) -> None:
    both(tmp_path)
    network = model_of(config, attention)
    task = resolve_task(find_task("causal-lm"), network, None, explicit=False)
    sums = []
    for name in ("packed", "apart"):
        batch = {key: torch.from_numpy(array) for key, array in arrays_of(tmp_path / name).items()}
        inputs = task.inputs(batch)
        with torch.no_grad():
            sums.append((float(compute_losses(task, network, inputs).reported), task.count(inputs)))
            own = float(network(**{key: tensor.long() for key, tensor in batch.items()}, use_cache=False).loss)
        assert sums[-1][0] == pytest.approx(own, abs=1e-6), "transformers alone, on the same batch"
    assert sums[0][1] == sums[1][1] == sum(3 * (1 + n % 3) + 1 for n in range(20))
    assert sums[0][0] == pytest.approx(sums[1][0], abs=1e-6)


def test_packed_samples_have_all_chats_and_are_fewer(tmp_path: Path) -> None:
    packed, apart = both(tmp_path)
    assert packed.shapes == dict.fromkeys(("input_ids", "position_ids", "labels"), (32,))
    assert packed.samples("train") <= apart.samples("train") // 2
    found, wanted = (lengths_of(tmp_path / name, manifest) for name, manifest in (("packed", packed), ("apart", apart)))
    assert (found.tokens, found.scored) == (wanted.tokens, wanted.scored)
    assert marked(sample_of(tmp_path / "packed", packed), coloured=False).plain.count("</s>»") > 1


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_model_that_keeps_chats_apart_passes_the_check(tmp_path: Path, config: dict[str, Any]) -> None:
    both(tmp_path)
    check(tmp_path, model_of(config, "sdpa"))


@pytest.mark.parametrize("config", [OPT, MAMBA], ids=["opt", "mamba"])
def test_model_that_mixes_chats_up_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    both(tmp_path)
    with pytest.raises(ConfigError, match=r"MODEL020.*doesn't keep the packed sequences .* apart.*without --pack"):
        check(tmp_path, model_of(config, "eager"))


def check(folder: Path, network: Any) -> None:
    task = resolve_task(find_task("causal-lm"), network, None, explicit=False)
    arrays = arrays_of(folder / "packed")
    keys = np.stack([np.zeros(len(arrays["labels"]), np.int64)] * 2 + [np.arange(len(arrays["labels"]))], axis=1)
    check_loss_of(task, network, Samples(arrays, keys))


@given(st.lists(st.integers(2, 20), max_size=60))
def test_packing_keeps_every_chat_whole_and_none_is_too_long(lengths: list[int]) -> None:
    chats = [
        ScoredTokens(np.full(length, place, np.int32), np.ones(length, np.bool_))
        for place, length in enumerate(lengths)
    ]
    packed = pack_chats(chats, 20)
    found = sorted((int(chat.ids[0]), len(chat.ids)) for parts in packed for chat in parts)
    assert found == list(enumerate(lengths))
    assert all(0 < sum(len(chat.ids) for chat in parts) <= 20 for parts in packed)
    halves = sum(sum(len(chat.ids) for chat in parts) <= 10 for parts in packed)
    assert halves <= 1, "two half-empty samples would have gone into one"


def test_pack_without_chats_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PREP007.*--pack has no effect on documents"):
        prepared("stdlib", tmp_path / "out", pack=True)


def test_first_token_of_a_chat_has_no_label_though_it_is_scored(tmp_path: Path) -> None:
    """Transformers shifts labels: it would be predicted from the last token of the chat before."""
    chats = [ScoredTokens([7, 8, 9], np.array([True, True, True])), ScoredTokens([5, 6], np.array([True, False]))]
    writer = SliceWriter(tmp_path, 1, lambda what, number: None)
    write_packed(chats, ([0, 1], []), PrepareOptions("", "", seq_len=6, samples_per_slice=1), 0, writer)
    arrays = load_file(tmp_path / writer.slices[0].file)
    assert arrays["input_ids"].tolist() == [[7, 8, 9, 5, 6, 0]]
    assert arrays["labels"].tolist() == [[-100, 8, 9, -100, -100, -100]]
