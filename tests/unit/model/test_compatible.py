"""Settings of a folder by their names of an older release of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig

from hypha_ray.config.schema import Job
from hypha_ray.model.layout import gather, layout_of, views
from hypha_ray.model.lora import build_trained
from hypha_ray.model.saved_model import export, make_compatible
from tests.support import small_tokenizers as tokenizers

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


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
