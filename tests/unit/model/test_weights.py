"""Weights of a repository are those of its model, or the model isn't built from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import BertForPreTraining, GPT2Config, GPT2LMHeadModel, GPT2Model

from hypha_ray.config.schema import Model
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.model.build import build_model, compare_weights
from hypha_ray.model.saved_model import open_saved

Tensors = dict[str, torch.Tensor]
SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 32}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": False, **SMALL}
BERT = {"model_type": "bert", **SMALL}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def saved(folder: Path, config: dict[str, object], task: str = "causal-lm") -> Path:
    build_model(Model(config=config, type=task), seed=1).save_pretrained(folder)
    return folder


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def configure(folder: Path, **settings: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def refusals(folder: Path, task: str = "causal-lm") -> set[str]:
    """What is said before a start, at a worker, and by evaluation."""
    model, said = Model(repository=str(folder), type=task), set()
    for use in (compare_weights, lambda one: build_model(one, 0), lambda _: open_saved(folder, task)):
        with pytest.raises(CheckpointError, match="MODEL006") as caught:
            use(model)
        assert caught.value.exit_code == 5 and "\n" not in str(caught.value)
        said.add(str(caught.value))
    return said


DAMAGE: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "prefix of a wrapper for parallel training": (
        lambda tensors: {f"module.{name}": tensor for name, tensor in tensors.items()},
        "take the prefix 'module.' off",
    ),
    "prefix of a compiled model": (
        lambda tensors: {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()},
        "take the prefix '_orig_mod.' off",
    ),
    "no MLP in one layer": (
        lambda tensors: {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name},
        "3 missing (model.layers.1.mlp.down_proj.weight",
    ),
    "one layer missing": (
        lambda tensors: {name: tensor for name, tensor in tensors.items() if "layers.1." not in name},
        "9 missing (model.layers.1.input_layernorm.weight",
    ),
    "no head": (
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"},
        "1 missing (lm_head.weight)",
    ),
    "one tensor under another name": (
        lambda tensors: {name.replace("0.self_attn.q_proj", "0.attn.q_proj"): one for name, one in tensors.items()},
        "1 missing (model.layers.0.self_attn.q_proj.weight); 1 unknown (model.layers.0.attn.q_proj.weight)",
    ),
    "a bias that the configuration denies": (
        lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(8)},
        "1 unknown (model.layers.0.self_attn.q_proj.bias)",
    ),
    "another shape": (
        lambda tensors: tensors | {"model.layers.0.mlp.up_proj.weight": torch.zeros(17, 8)},
        "1 of another shape (model.layers.0.mlp.up_proj.weight [17, 8] for [16, 8])",
    ),
    "a transposed tensor": (
        lambda tensors: tensors | {"model.layers.1.mlp.up_proj.weight": torch.zeros(8, 16)},
        "[8, 16] for [16, 8]",
    ),
    "nothing": (lambda _: {"x": torch.zeros(1)}, "21 missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_weights_that_are_not_the_models_are_refused_everywhere(tmp_path: Path, kind: str) -> None:
    change, words = DAMAGE[kind]
    rewrite(saved(tmp_path, LLAMA), change)
    said = refusals(tmp_path)
    assert len(said) == 1 and words in said.pop()


@pytest.mark.parametrize(("layers", "words"), [(1, "9 unknown (model.layers.1."), (3, "9 missing (model.layers.2.")])
def test_configuration_with_another_number_of_layers_than_the_file_is_refused(
    tmp_path: Path, layers: int, words: str
) -> None:
    configure(saved(tmp_path, LLAMA), num_hidden_layers=layers)
    assert all(words in text for text in refusals(tmp_path))


def test_extra_layers_are_refused_in_a_file_without_the_base_models_prefix(tmp_path: Path) -> None:
    GPT2Model(GPT2Config(**GPT2)).save_pretrained(tmp_path)
    configure(tmp_path, n_layer=1)
    assert all("unknown (h.1.attn" in text for text in refusals(tmp_path))


def sharded(folder: Path) -> list[Path]:
    build_model(Model(config=LLAMA), seed=1).save_pretrained(folder, max_shard_size="2KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 3
    return shards


def test_sharded_weights_fit(tmp_path: Path) -> None:
    sharded(tmp_path)
    assert compare_weights(Model(repository=str(tmp_path)), needs_all=True) == []


@pytest.mark.parametrize("half", [False, True])
def test_index_that_names_files_which_are_not_there_is_refused(tmp_path: Path, half: bool) -> None:
    shards = sharded(tmp_path)
    gone = shards[1::2] if half else shards[-1:]
    for file in gone:
        file.unlink()
    assert all(f"{len(gone)} of {len(shards)} files" in text and gone[0].name in text for text in refusals(tmp_path))


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert all("model-00001-of-" in text and "index.json" in text for text in refusals(tmp_path))


def test_shard_that_lacks_what_the_index_says_is_refused(tmp_path: Path) -> None:
    shards = sharded(tmp_path)
    save_file({"x": torch.zeros(1)}, shards[0], metadata={"format": "pt"})
    assert all("missing (" in text for text in refusals(tmp_path))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": []}', '{"weight_map": {}}'])
def test_damaged_index_is_refused(tmp_path: Path, content: str) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert all("model.safetensors.index.json" in text for text in refusals(tmp_path))


def test_folder_of_a_model_with_weights_of_an_adapter_only_says_what_to_do(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/model"}')
    assert all("an adapter without its model" in text and "merge it" in text for text in refusals(tmp_path))


def notes(folder: Path, task: str) -> list[str]:
    model = Model(repository=str(folder), type=task)
    build_model(model, seed=0)
    return [note.replace(str(folder), "REPO") for note in compare_weights(model)]


def test_tied_head_need_not_be_in_the_file(tmp_path: Path) -> None:
    saved(tmp_path, GPT2)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert notes(tmp_path, "causal-lm") == []
    open_saved(tmp_path)


def test_file_of_the_base_model_has_no_prefix_and_fits(tmp_path: Path) -> None:
    base = GPT2Model(GPT2Config(**GPT2))
    base.save_pretrained(tmp_path)
    configure(tmp_path, architectures=["GPT2LMHeadModel"])
    assert notes(tmp_path, "causal-lm") == []
    network, _ = open_saved(tmp_path, "causal-lm")
    assert torch.equal(network.transformer.h[1].mlp.c_fc.weight, base.h[1].mlp.c_fc.weight)


def test_buffers_that_old_files_have_are_no_weights(tmp_path: Path) -> None:
    mask = {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 16, 16) for layer in range(2)}
    masked = {f"transformer.h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    rewrite(saved(tmp_path / "gpt2", GPT2), lambda tensors: tensors | mask | masked)
    assert notes(tmp_path / "gpt2", "causal-lm") == []
    positions = {"bert.embeddings.position_ids": torch.arange(512)[None]}
    rewrite(saved(tmp_path / "bert", BERT, "masked-lm"), lambda tensors: tensors | positions)
    assert notes(tmp_path / "bert", "masked-lm") == []
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    rewrite(saved(tmp_path / "llama", LLAMA), lambda tensors: tensors | frequencies)
    assert notes(tmp_path / "llama", "causal-lm") == []


def test_new_head_is_told_and_evaluation_refuses_it(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA)
    assert notes(tmp_path, "sequence-classification") == [
        "weights of REPO lack the head, which begins with random numbers (score.weight)",
        "weights of REPO are more than this model has; left out (lm_head.weight)",
    ]
    with pytest.raises(CheckpointError, match=r"1 missing \(score.weight\)"):
        open_saved(tmp_path, "sequence-classification")


def test_head_of_a_masked_model_gives_way_to_a_classifiers_and_its_pooler(tmp_path: Path) -> None:
    saved(tmp_path, BERT, "masked-lm")
    new, old = notes(tmp_path, "sequence-classification")
    assert "(bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias and 1 more)" in new
    assert "(cls.predictions." in old


def test_file_with_heads_for_other_tasks_beside_the_models_own_fits(tmp_path: Path) -> None:
    config = build_model(Model(config=BERT, type="masked-lm"), seed=1).config
    BertForPreTraining(config).save_pretrained(tmp_path)
    configure(tmp_path, architectures=["BertForMaskedLM"])
    (note,) = notes(tmp_path, "masked-lm")
    assert "bert.pooler.dense.bias" in note and "left out" in note
    open_saved(tmp_path)


def test_classifier_that_lacks_half_of_its_head_is_damaged(tmp_path: Path) -> None:
    saved(tmp_path, BERT, "sequence-classification")
    rewrite(tmp_path, lambda tensors: {name: one for name, one in tensors.items() if name != "classifier.bias"})
    assert all("1 missing (classifier.bias)" in text for text in refusals(tmp_path, "sequence-classification"))
    configure(tmp_path, architectures=None)
    assert all("1 missing (classifier.bias)" in text for text in refusals(tmp_path, "sequence-classification"))


LABELLED: dict[str, dict[str, object]] = {
    "number": {"num_labels": 5},
    "names": {"id2label": {str(number): f"class {number}" for number in range(5)}},
    "numbers": {"label2id": {f"class {number}": number for number in range(5)}, "num_labels": 5},
}


@pytest.mark.parametrize("told", LABELLED)
@pytest.mark.parametrize("before", ["causal-lm", "sequence-classification"])
def test_labels_beside_a_repository_make_a_new_head(tmp_path: Path, told: str, before: str) -> None:
    saved(tmp_path, LLAMA, before)
    model = Model(repository=str(tmp_path), type="sequence-classification", config=LABELLED[told])
    assert build_model(model, seed=0).score.out_features == 5
    assert "lack the head" in compare_weights(model)[0]


def test_labels_do_not_excuse_a_damaged_trunk(tmp_path: Path) -> None:
    change, _ = DAMAGE["no MLP in one layer"]
    rewrite(saved(tmp_path, LLAMA), change)
    model = Model(repository=str(tmp_path), type="sequence-classification", config={"num_labels": 5})
    with pytest.raises(CheckpointError, match="3 missing"):
        compare_weights(model)


def test_other_settings_beside_a_repository_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA)
    with pytest.raises(ConfigError, match="MODEL002"):
        build_model(Model(repository=str(tmp_path), config={"num_labels": 5, "hidden_size": 4}), seed=0)


def test_padding_token_beside_a_repository_is_taken(tmp_path: Path) -> None:
    saved(tmp_path, GPT2)
    model = Model(repository=str(tmp_path), type="sequence-classification", config={"pad_token_id": 3})
    assert build_model(model, seed=0).config.pad_token_id == 3


def test_base_models_file_gets_a_language_models_head_if_it_never_had_one(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA, "auto")
    (note,) = notes(tmp_path, "causal-lm")
    assert "lack the head" in note and "(lm_head.weight)" in note


def test_renamed_tensors_of_old_files_are_known(tmp_path: Path) -> None:
    saved(tmp_path, BERT, "masked-lm")
    rewrite(
        tmp_path,
        lambda tensors: {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        },
    )
    assert notes(tmp_path, "masked-lm") == []


def test_weights_with_the_wrong_kind_of_model_are_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(**GPT2)).save_pretrained(tmp_path)
    configure(tmp_path, **LLAMA, architectures=["LlamaForCausalLM"])
    assert all("missing (lm_head.weight, model.embed_tokens" in text for text in refusals(tmp_path))


def test_nothing_but_our_own_words_is_said_of_a_loading(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, LLAMA)
    capfd.readouterr()
    notes(tmp_path, "sequence-classification")
    assert capfd.readouterr() == ("", "")
