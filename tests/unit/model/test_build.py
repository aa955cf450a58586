import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file

from hypha_ray.config.schema import Model
from hypha_ray.errors import AuthenticationError, CapacityError, CheckpointError, ConfigError, HyphaError
from hypha_ray.model.build import build_model, facts, infer_task, skeleton, task_of
from hypha_ray.model.layout import layout_of
from hypha_ray.model.task import Masking
from tests.support.small_models import BERT, VIT

GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 32}
T5 = {
    "model_type": "t5",
    "decoder_start_token_id": 0,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 8,
    "num_heads": 2,
    "num_layers": 1,
    "vocab_size": 32,
}
BART = {
    "model_type": "bart",
    "vocab_size": 32,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    build_model(Model(config=GPT2), seed=1).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit(folder: Path, **settings: Any) -> Model:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return Model(repository=str(folder))


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_build_config_same_seed_same_weights_other_seed_others() -> None:
    assert same(build_model(Model(config=GPT2), seed=3), build_model(Model(config=GPT2), seed=3))
    assert not same(build_model(Model(config=GPT2), seed=3), build_model(Model(config=GPT2), seed=4))


def test_build_config_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_model(Model(config=GPT2), seed=9)
    assert torch.equal(torch.rand(3), expected)


def test_build_config_dtype_is_respected() -> None:
    assert build_model(Model(config=GPT2 | {"dtype": "bfloat16"}), seed=0).dtype == torch.bfloat16


def test_build_config_pasted_from_a_saved_model_is_accepted(saved: Path) -> None:
    settings = json.loads((saved / "config.json").read_text())
    assert build_model(Model(config=settings), seed=0).config.n_embd == 8


def test_build_repository_loads_the_saved_weights(saved: Path) -> None:
    network = build_model(Model(repository=str(saved)), seed=0)
    assert same(network, build_model(Model(config=GPT2), seed=1))


def test_build_repository_in_bfloat16_is_held_in_float32(tmp_path: Path) -> None:
    build_model(Model(config=GPT2 | {"dtype": "bfloat16"}), seed=1).save_pretrained(tmp_path)
    model = Model(repository=str(tmp_path))
    assert build_model(model, seed=0).dtype == skeleton(model).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_build_repository_in_another_dtype_has_its_rounded_weights(saved: Path, dtype: str) -> None:
    model = Model(repository=str(saved), config={"dtype": dtype})
    network, wanted = build_model(model, seed=0), getattr(torch, dtype)
    assert network.dtype == skeleton(model).dtype == wanted
    for name, tensor in load_file(saved / "model.safetensors").items():
        assert torch.equal(network.state_dict()[name], tensor.to(wanted)), name


def test_build_repository_in_an_unknown_dtype_raises(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"MODEL004.*dtype is unknown — got 'bf16', allowed float32, "):
        build_model(Model(repository=str(saved), config={"dtype": "bf16"}), seed=0)


def test_build_repository_new_head_depends_on_the_seed_alone(saved: Path) -> None:
    model = Model(repository=str(saved), type="sequence-classification")
    one, other, third = (build_model(model, seed) for seed in (1, 1, 2))
    assert same(one, other)
    assert same(one.transformer, third.transformer)
    assert not torch.equal(one.score.weight, third.score.weight)


def test_build_model_is_in_training_mode(saved: Path) -> None:
    assert build_model(Model(config=GPT2), seed=0).training
    assert build_model(Model(repository=str(saved)), seed=0).training


def test_build_config_too_large_for_this_machine_raises() -> None:
    with pytest.raises(CapacityError, match=r"MODEL014.*too little memory") as caught:
        build_model(Model(config=GPT2 | {"vocab_size": 10**16}), seed=0)
    assert caught.value.exit_code == 75


def test_build_config_that_needs_another_package_names_it() -> None:
    with pytest.raises(ConfigError, match=r"MODEL008.*timm"):
        build_model(Model(config={"model_type": "timm_wrapper"}, type="image-classification"), seed=0)


@pytest.mark.parametrize(("model", "got"), [(Model(), "neither"), (Model(repository="x", config=GPT2), "both")])
def test_build_both_or_neither_source_raises(model: Model, got: str) -> None:
    with pytest.raises(ConfigError, match=rf"MODEL002.*got {got}"):
        build_model(model, seed=0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"n_layer": 1}, r"MODEL003.*got None"),
        ({"model_type": "gtp2"}, r"MODEL003.*did you mean 'gpt2'"),
        ({"model_type": "foo"}, r"MODEL003.*'foo'.*Fix: name one$"),
        (GPT2 | {"optimizer": "adam"}, r"MODEL004.*optimizer of a gpt2 model.*Fix: remove it$"),
        ({"model_type": 3}, r"MODEL003.*got 3"),
        (GPT2 | {"n_layers": 2}, r"MODEL004.*n_layers.*did you mean 'n_layer'"),
        (GPT2 | {"n_layer": "two"}, r"MODEL004.*n_layer.*expected int"),
        (GPT2 | {"n_embd": 7}, r"MODEL004.*divisible"),
        (GPT2 | {"vocab_size": -3}, r"MODEL004.*negative dimension"),
        (GPT2 | {"activation_function": "nope"}, r"MODEL004.*KeyError.*nope"),
        (GPT2 | {"dtype": "float7"}, r"MODEL004.*float7"),
        ({"model_type": "llama", "num_attention_heads": 0}, r"MODEL004.*ZeroDivisionError"),
    ],
)
def test_build_config_wrong_names_the_mistake(settings: dict[str, Any], text: str) -> None:
    for use in (lambda model: build_model(model, seed=0), facts):
        with pytest.raises(ConfigError, match=text) as caught:
            use(Model(config=settings))
        assert "\n" not in str(caught.value)


def test_build_unknown_task_raises() -> None:
    with pytest.raises(ConfigError, match="MODEL001"):
        build_model(Model(config=GPT2, type="casual-lm"), seed=0)


def test_build_task_that_the_model_cannot_do_names_those_it_can(saved: Path) -> None:
    for model in (
        Model(config=GPT2, type="image-classification"),
        Model(repository=str(saved), type="vision-classification"),
    ):
        with pytest.raises(ConfigError, match=r"HUB004.*gpt2.*got image-classification, allowed .*causal-lm"):
            build_model(model, seed=0)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_build_repository_with_damaged_configuration_raises(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"MODEL005.*config.json"):
        build_model(Model(repository=str(folder)), seed=0)


def test_build_repository_without_configuration_raises(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"MODEL005.*config.json"):
        build_model(Model(repository=str(folder)), seed=0)


def test_build_repository_of_unknown_kind_raises(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"MODEL003.*config.json.*got 'gpt9'"):
        build_model(edit(folder, model_type="gpt9"), seed=0)


def test_build_repository_with_truncated_weights_raises(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="MODEL006"):
        build_model(Model(repository=str(folder)), seed=0)


def test_build_repository_with_weights_of_another_shape_raises(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="MODEL006"):
        build_model(edit(folder, vocab_size=33), seed=0)


def test_build_repository_with_pickled_weights_only_raises(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"SEC003.*pytorch_model.bin"):
        build_model(Model(repository=str(folder)), seed=0)


CODE = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
Path(__file__).with_name("ran").touch()
class OwnConfig(GPT2Config):
    model_type = "own"
class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Model:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    (folder / "own.py").write_text(CODE)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    return edit(folder, model_type="own", auto_map=auto_map)


@pytest.mark.parametrize(("asked", "allowed"), [(False, None), (True, None), (False, "1"), (True, "0")])
def test_build_remote_code_not_trusted_by_both_sides_raises(
    own_code: Model, asked: bool, allowed: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if allowed is not None:
        monkeypatch.setenv("HYPHA_RAY_ALLOW_REMOTE_CODE", allowed)
    model = own_code.model_copy(update={"trust_remote_code": asked})
    for use in (lambda model: build_model(model, seed=0), facts):
        with pytest.raises(AuthenticationError, match=r"SEC004.*HYPHA_RAY_ALLOW_REMOTE_CODE=1") as caught:
            use(model)
        assert caught.value.exit_code == 4
    assert not list(tmp_path.rglob("ran"))


def test_build_remote_code_trusted_by_both_sides_runs(own_code: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPHA_RAY_ALLOW_REMOTE_CODE", "1")
    network = build_model(own_code.model_copy(update={"trust_remote_code": True}), seed=0)
    assert type(network).__name__ == "OwnModel"


def test_build_remote_code_that_transformers_can_do_without_is_not_run(folder: Path) -> None:
    (folder / "own.py").write_text("raise SystemError('ran')")
    network = build_model(edit(folder, auto_map={"AutoModelForCausalLM": "own.OwnModel"}), seed=0)
    assert type(network).__name__ == "GPT2LMHeadModel"


def test_build_remote_code_for_a_task_only_raises(folder: Path) -> None:
    model = edit(folder, auto_map={"AutoModelForMaskedLM": "own.OwnModel"}).model_copy(update={"type": "masked-lm"})
    with pytest.raises(AuthenticationError, match="SEC004"):
        build_model(model, seed=0)


def test_facts_agree_with_the_built_model(saved: Path) -> None:
    for model in (Model(config=GPT2), Model(repository=str(saved))):
        known = facts(model)
        built = build_model(model, seed=0)
        assert known.parameters == sum(parameter.numel() for parameter in built.parameters())
        assert (known.task, known.architecture) == ("causal-lm", "GPT2LMHeadModel")
        assert (known.vocab_size, known.positions) == (32, 16)
        assert (known.num_labels, known.image_size, known.channels) == (None, None, None)


def test_skeleton_is_laid_out_like_the_built_model(saved: Path) -> None:
    for model in (Model(config=GPT2), Model(repository=str(saved))):
        for cut in ((1, "contiguous"), (3, "contiguous"), (1, "strided")):
            assert layout_of(skeleton(model), *cut) == layout_of(build_model(model, seed=0), *cut)


def test_facts_image_classifier_has_labels_and_image_size() -> None:
    known = facts(Model(config=VIT, type="vision-classification"))
    assert (known.num_labels, known.image_size, known.channels, known.vocab_size) == (10, (8, 8), 1, None)


def test_facts_large_model_needs_no_memory_for_weights() -> None:
    size = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    assert facts(Model(config={"model_type": "llama"} | size)).parameters > 60e9


def test_facts_missing_weights_do_not_matter(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert facts(Model(repository=str(folder))).vocab_size == 32


def test_task_of_masked_model_takes_mask_from_tokenizer_then_configuration() -> None:
    model = Model(config=BERT | {"mask_token_id": 4}, type="masked-lm")
    network = build_model(model, seed=0)

    class Tokenizer:
        mask_token_id = 5
        all_special_ids = (0, 5)

    assert task_of(model, network, Tokenizer()).masking == Masking(5, 32, (0, 5))
    assert task_of(model, network).masking == Masking(4, 32, (0, 4))


def test_task_of_masked_model_without_mask_token_raises_on_use() -> None:
    model = Model(config=BERT, type="masked-lm")
    with pytest.raises(HyphaError, match="MODEL007"):
        task_of(model, build_model(model, seed=0)).inputs({"input_ids": torch.ones(1, 2, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("settings", "task"),
    [
        (GPT2, "causal-lm"),
        (BERT, "masked-lm"),
        (VIT, "image-classification"),
        (GPT2, "sequence-classification"),
        (GPT2, "auto"),
        (BART, "seq2seq-lm"),
        (BART | {"model_type": "mbart"}, "seq2seq-lm"),
    ],
)
def test_infer_task_saved_model_leads_back_to_its_task(settings: dict[str, Any], task: str, tmp_path: Path) -> None:
    build_model(Model(config=settings, type=task), seed=0).save_pretrained(tmp_path)
    assert infer_task(tmp_path).name == task


def test_infer_task_unknown_architecture_raises(folder: Path) -> None:
    edit(folder, architectures=["Mystery"])
    with pytest.raises(ConfigError, match=r"MODEL001.*got Mystery"):
        infer_task(folder)


@pytest.mark.parametrize(
    ("settings", "task"),
    [
        (
            {"model_type": "t5", "decoder_start_token_id": 0, "d_model": 8, "num_heads": 2, "num_layers": 1},
            "seq2seq-lm",
        ),
        (GPT2 | {"pad_token_id": 0, "is_decoder": True, "max_length": 20, "do_sample": True}, "causal-lm"),
        (BERT | {"decoder_start_token_id": 0, "sep_token_id": 2, "cls_token_id": 1}, "masked-lm"),
        (BERT | {"num_labels": 3, "problem_type": "single_label_classification"}, "sequence-classification"),
        (BERT | {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}, "token-classification"),
        (GPT2 | {"torch_dtype": "float32", "tie_word_embeddings": False, "attn_implementation": "eager"}, "causal-lm"),
        (GPT2 | {"use_cache": False, "output_attentions": False, "tokenizer_class": "GPT2Tokenizer"}, "causal-lm"),
    ],
)
def test_build_config_keys_that_transformers_reads_are_accepted(settings: dict[str, Any], task: str) -> None:
    model = Model(config=settings, type=task)
    config = build_model(model, seed=0).config
    facts(model)
    for key in settings.keys() & {"decoder_start_token_id", "pad_token_id", "num_labels", "tie_word_embeddings"}:
        assert getattr(config, key) == settings[key]


@pytest.mark.parametrize(
    ("key", "near"), [("decoder_start_tokens_id", "decoder_start_token_id"), ("num_label", "num_labels")]
)
def test_build_config_mistyped_key_names_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"MODEL004.*{key}.*did you mean '{near}'"):
        facts(Model(config={"model_type": "t5", key: 0}, type="seq2seq-lm"))
