"""Saved models: what is exported loads again, settings of older releases included."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as torch_file
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    ByT5Tokenizer,
    Gemma3TextConfig,
    LlamaConfig,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from hypha_ray.config.schema import Job, Model, Preprocessor
from hypha_ray.config.training import Checkpoint
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of, views
from hypha_ray.model.lora import build_trained
from hypha_ray.model.saved_model import export, make_compatible, open_saved
from hypha_ray.model.tokenizers import load_preprocessor
from tests.support import small_tokenizers as tokenizers
from tests.support.small_models import RESNET

GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 384}
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def job_of(model: Model, **checkpoint: Any) -> Job:
    return Job(model=model, checkpoint=Checkpoint(**checkpoint))


def trained(model: Model) -> torch.nn.Module:
    network = build_model(model, seed=7)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.25)
    return network


def snapshot(network: torch.nn.Module, folder: Path) -> dict[str, np.ndarray]:
    """Tensors as a snapshot has them: written to safetensors and read again."""
    layout = layout_of(network, 2)
    file = folder / "snapshot.safetensors"
    save_file(views(layout, [gather(network, layout, fragment) for fragment in range(2)]), file)
    return load_file(file)


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_export_language_model_and_tokenizer_load_again(tmp_path: Path) -> None:
    model = Model(config=GPT2)
    network = trained(model)
    export(job_of(model), ByT5Tokenizer(), snapshot(network, tmp_path), tmp_path / "run" / "model", round=4)
    assert json.loads((tmp_path / "run" / "model" / "task.json").read_text()) == {"type": "causal-lm", "round": 4}
    folder = tmp_path / "run" / "model"
    assert equal(AutoModelForCausalLM.from_pretrained(folder), network)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer) is ByT5Tokenizer
    assert tokenizer.decode(tokenizer("hypha")["input_ids"], skip_special_tokens=True) == "hypha"
    assert (folder / "model.safetensors").is_file()
    assert not list(folder.glob("*.bin"))
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_export_vision_model_with_buffers_and_image_processor_loads_again(tmp_path: Path) -> None:
    model = Model(config=RESNET, type="image-classification")
    network = trained(model)
    network.train()
    network(pixel_values=torch.rand(4, 1, 32, 32))
    export(
        job_of(model),
        ViTImageProcessorPil(size={"height": 8, "width": 8}),
        snapshot(network, tmp_path),
        tmp_path / "model",
    )
    assert equal(AutoModelForImageClassification.from_pretrained(tmp_path / "model"), network)
    assert AutoImageProcessor.from_pretrained(tmp_path / "model").size == {"height": 8, "width": 8}


def test_export_model_of_a_repository_keeps_its_configuration(tmp_path: Path) -> None:
    build_model(Model(config=GPT2), seed=1).save_pretrained(tmp_path / "base")
    model = Model(repository=str(tmp_path / "base"))
    network = trained(model)
    export(job_of(model), None, snapshot(network, tmp_path), tmp_path / "model")
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), network)


def test_export_bfloat16_model_is_saved_in_bfloat16(tmp_path: Path) -> None:
    model = Model(config=GPT2 | {"dtype": "bfloat16"})
    network = trained(model)
    export(job_of(model), None, snapshot(network, tmp_path), tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.bfloat16
    assert equal(loaded, network)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("told", [True, False])
def test_export_of_a_repository_has_the_dtype_of_its_weights(tmp_path: Path, dtype: str, told: bool) -> None:
    base = tmp_path / "base"
    build_model(Model(config=GPT2), seed=1).to(getattr(torch, dtype)).save_pretrained(base)
    if not told:
        settings = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "dtype"}))
    model = Model(repository=str(base))
    network = trained(model)
    export(job_of(model), None, snapshot(network, tmp_path), tmp_path / "model")
    assert {str(tensor.dtype) for tensor in torch_file(tmp_path / "model" / "model.safetensors").values()} == {
        f"torch.{dtype}"
    }
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == dtype
    expected = {name: tensor.to(getattr(torch, dtype)).float() for name, tensor in network.state_dict().items()}
    opened, _ = open_saved(tmp_path / "model")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in opened.state_dict().items())


@pytest.mark.parametrize("original", ["bfloat16", "float32"])
@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32"])
def test_export_dtype_may_be_chosen_and_rounds_once(tmp_path: Path, original: str, wanted: str) -> None:
    network = trained(Model(config=GPT2))
    model = Model(config=GPT2 | {"dtype": original})
    export(job_of(model, export_dtype=wanted), None, snapshot(network, tmp_path), tmp_path / "model")
    found = torch_file(tmp_path / "model" / "model.safetensors")
    exact = network.state_dict()
    assert all(torch.equal(found[name], exact[name].to(getattr(torch, wanted))) for name in found)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == getattr(torch, wanted)


def test_export_replaces_an_older_folder_whole(tmp_path: Path) -> None:
    model = Model(config=GPT2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "stale.txt").write_text("old")
    export(job_of(model), None, snapshot(trained(model), tmp_path), tmp_path / "model")
    assert not (tmp_path / "model" / "stale.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "snapshot.safetensors"]


def test_export_removes_what_a_killed_one_left_and_leaves_that_of_others(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = socket.gethostname()
    of_killed = f".model-{host}-{ended.pid}-x"
    of_others = [f".model-{host}-{os.getpid()}-x", f".model-elsewhere-{ended.pid}-x", f".models-{host}-{ended.pid}-x"]
    for name in (of_killed, *of_others):
        (tmp_path / name / "new").mkdir(parents=True)
    model = Model(config=GPT2)
    export(job_of(model), None, snapshot(trained(model), tmp_path), tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*of_others, "model", "snapshot.safetensors"])


def test_export_tensors_of_another_model_raise_and_leave_no_folder(tmp_path: Path) -> None:
    tensors = snapshot(trained(Model(config=GPT2)), tmp_path)
    tensors.pop("transformer.ln_f.bias")
    with pytest.raises(CheckpointError, match=r"MODEL010.*1 missing \(transformer.ln_f.bias\)"):
        export(job_of(Model(config=GPT2)), None, tensors, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot.safetensors"]


def test_export_where_nothing_can_be_written_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model = Model(config=GPT2)
    with pytest.raises(CheckpointError, match="MODEL013"):
        export(job_of(model), None, snapshot(trained(model), tmp_path), tmp_path / "file" / "model")


def test_open_saved_exported_model_has_task_and_weights(tmp_path: Path) -> None:
    model = Model(config=GPT2)
    network = trained(model)
    export(job_of(model), ByT5Tokenizer(), snapshot(network, tmp_path), tmp_path / "model")
    opened, task = open_saved(tmp_path / "model")
    assert equal(opened, network)
    assert task.name == "causal-lm"


def save(tokenizer: Any, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    return folder


def test_load_preprocessor_own_repository_comes_first(tmp_path: Path) -> None:
    own, beside = save(ByT5Tokenizer(extra_ids=7), tmp_path / "own"), save(ByT5Tokenizer(), tmp_path / "data")
    loaded = load_preprocessor(Preprocessor(repository=str(own)), beside, Model(config=GPT2))
    assert len(loaded) == len(ByT5Tokenizer(extra_ids=7))


@pytest.mark.parametrize("place", ["data", "data/tokenizer"])
def test_load_preprocessor_without_repository_is_that_of_the_dataset(tmp_path: Path, place: str) -> None:
    save(ByT5Tokenizer(), tmp_path / place)
    save(ViTImageProcessorPil(), tmp_path / "model")
    model = Model(repository=str(tmp_path / "model"))
    assert type(load_preprocessor(Preprocessor(), tmp_path / "data", model)) is ByT5Tokenizer


def test_load_preprocessor_else_is_that_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    model = Model(repository=str(save(ViTImageProcessorPil(), tmp_path / "model")))
    assert type(load_preprocessor(Preprocessor(), tmp_path / "data", model)) is ViTImageProcessorPil


def test_load_preprocessor_nowhere_is_none(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert load_preprocessor(Preprocessor(), tmp_path / "data", Model(config=GPT2)) is None
    assert load_preprocessor(Preprocessor(), None, Model(repository=str(tmp_path))) is None
    assert load_preprocessor(Preprocessor(), tmp_path / "elsewhere", Model(config=GPT2)) is None


def test_load_preprocessor_damaged_raises(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="MODEL011"):
        load_preprocessor(Preprocessor(repository=str(tmp_path)), None, Model(config=GPT2))


def test_load_preprocessor_empty_repository_raises(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="MODEL011"):
        load_preprocessor(Preprocessor(repository=str(tmp_path)), None, Model(config=GPT2))


def test_load_preprocessor_missing_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HUB001"):
        load_preprocessor(Preprocessor(repository=str(tmp_path / "none")), None, Model(config=GPT2))


def read(file: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(file.read_text())
    return settings


def test_export_for_an_older_release_has_its_names_and_is_read_as_before(tmp_path: Path) -> None:
    tokenizers.chatml().save_pretrained(tmp_path / "own")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "own", local_files_only=True)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500_000.0}
    config = {"model_type": "llama", "vocab_size": len(tokenizer), "rope_parameters": rope, **SIZES}
    job = Job.model_validate({"model": {"config": config}, "dataset": {"path": "unused"}})
    trained = build_trained(job)
    layout = layout_of(trained)
    tensors = views(layout, [gather(trained, layout, 0)])
    folder = tmp_path / "model"

    export(job, tokenizer, tensors, folder, compatible=4)

    settings, described = read(folder / "config.json"), read(folder / "tokenizer_config.json")
    assert settings["rope_theta"] == 500_000.0 and settings["torch_dtype"] == "float32"
    assert settings["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert described["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert described["additional_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert not {"is_local", "local_files_only", "name_or_path", "extra_special_tokens"} & described.keys()
    assert AutoConfig.from_pretrained(folder).rope_parameters == LlamaConfig(**config).rope_parameters
    assert (
        AutoTokenizer.from_pretrained(folder)("<|im_end|> red")["input_ids"] == tokenizer("<|im_end|> red")["input_ids"]
    )
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all((state[name].numpy() == array).all() for name, array in tensors.items())


def test_positions_of_two_kinds_of_attention_have_their_older_names(tmp_path: Path) -> None:
    Gemma3TextConfig(**SIZES).save_pretrained(tmp_path)
    rope = read(tmp_path / "config.json")["rope_parameters"]

    make_compatible(tmp_path)

    settings = read(tmp_path / "config.json")
    assert settings["rope_theta"] == rope["full_attention"]["rope_theta"] != settings["rope_local_base_freq"]
    assert settings["rope_local_base_freq"] == rope["sliding_attention"]["rope_theta"]
    assert settings["rope_scaling"] is None


@pytest.mark.parametrize("compatible", [None, 4])
def test_saved_tokenizer_tells_no_place_of_the_machine(tmp_path: Path, compatible: int | None) -> None:
    tokenizers.bare().save_pretrained(tmp_path / "secret-place")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "secret-place")
    config = {"model_type": "llama", "vocab_size": len(tokenizer), **SIZES}
    job = Job.model_validate({"model": {"config": config}, "dataset": {"path": "unused"}})
    trained = build_trained(job)
    layout = layout_of(trained)

    export(job, tokenizer, views(layout, [gather(trained, layout, 0)]), tmp_path / "model", compatible)

    texts = [file.read_bytes() for file in (tmp_path / "model").iterdir() if file.suffix != ".safetensors"]
    assert texts and not any(b"secret-place" in text or b"is_local" in text for text in texts)
