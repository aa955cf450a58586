"""Adapters on weights that bitsandbytes has quantized: what is trained, proved and saved."""

from __future__ import annotations

import importlib.util
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from hypha_ray.config.schema import Job, Model
from hypha_ray.driver.preflight.checks import check_job
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of, views
from hypha_ray.model.lora import build_trained, sketch_trained
from hypha_ray.model.saved_model import export
from hypha_ray.types import Samples
from hypha_ray.worker.supervised import SupervisedTrainer

LLAMA = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "pad_token_id": 0}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 2}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
OPTIONS: dict[str, dict[str, Any]] = {"nf4": NF4, "int8": {"load_in_8bit": True}}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")
installed = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="it is an extra")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build_model(Model(config=LLAMA), seed=1).save_pretrained(folder)
    return folder


def job(base: Path, kind: str | None) -> Job:
    model = {"repository": str(base), "quantization": kind, "lora": {"rank": 4}}
    optimizer = {"learning_rate": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.0, "clip_norm": None}
    return Job.model_validate({"model": model, "worker": {"device": "cpu"}, "inner_optimizer": optimizer})


def batch() -> Samples:
    return Samples({"input_ids": np.random.default_rng(0).integers(3, 300, (4, 16))}, np.zeros((4, 3), np.int64))


def plain_loss(network: Any) -> torch.Tensor:
    ids = torch.from_numpy(batch().arrays["input_ids"])
    loss: torch.Tensor = network(input_ids=ids, labels=ids).loss
    return loss


def test_weights_are_quantized_on_the_device_that_they_are_used_on(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a GPU nor the package is needed to see which device transformers is told: it loads nothing here."""
    told: list[dict[str, str]] = []

    def note(cls: Any, *arguments: Any, **options: Any) -> Any:
        told.append(options["device_map"])
        raise OSError("loads nothing")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", classmethod(note))
    for device in (torch.device("cuda", 1), None):
        with pytest.raises(CheckpointError, match="loads nothing"):
            build_trained(job(base, "int8"), device)
    assert told == [{"": "cuda:1"}, {"": "cpu"}]


@installed
def test_steps_on_nf4_are_those_of_plain_torch_on_the_values_it_stands_for(base: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    trainer = SupervisedTrainer(job(base, "nf4"))
    network = transformers.AutoModelForCausalLM.from_pretrained(base)
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = dequantize_4bit(*quantize_4bit(module.weight.data, quant_type="nf4"))
    peft.LoraModel(network, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), "default")
    ours = {name: one for name, one in trainer.model.named_parameters() if one.requires_grad}
    theirs = {name: one for name, one in network.named_parameters() if one.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        one.data = ours[name].data.clone()
    optimizer = torch.optim.AdamW(theirs.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(4):
        loss = plain_loss(network)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(batch()).loss, loss.detach(), rtol=1e-5, atol=0)


@installed
def test_int8_has_a_byte_for_each_weight_and_trains_nearly_as_whole_weights_do(base: Path) -> None:
    whole, narrow = (SupervisedTrainer(job(base, kind)) for kind in (None, "int8"))
    layer = narrow.model.model.layers[0].mlp.up_proj.base_layer  # type: ignore[union-attr, index]
    assert layer.weight.dtype == torch.int8
    weight = transformers.AutoModelForCausalLM.from_pretrained(base).model.layers[0].mlp.up_proj.weight
    exact = 127 * weight / weight.abs().amax(1, keepdim=True)
    assert (layer.weight - exact).abs().max() < 0.6  # Weights are rounded to 16 bits before.
    losses = [[float(one.step(batch()).loss) for _ in range(6)] for one in (whole, narrow)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[1][-1] < losses[1][0] - 0.2


@installed
@pytest.mark.parametrize("kind", OPTIONS)
def test_layout_is_that_of_the_sketch_and_the_fingerprint_that_of_the_base_in_its_form(
    kind: str, base: Path, tmp_path: Path
) -> None:
    trained = [layout_of(SupervisedTrainer(job(base, one)).model) for one in (kind, kind, None)]
    sketched = layout_of(sketch_trained(job(base, kind)))
    assert [one.entries for one in trained] == [sketched.entries] * 3
    build_model(Model(config=LLAMA), seed=2).save_pretrained(tmp_path)
    other = layout_of(SupervisedTrainer(job(tmp_path, kind)).model)
    first, again, whole = (one.frozen_sha256 for one in trained)
    assert first == again and len({first, whole, other.frozen_sha256}) == 3


@installed
@pytest.mark.parametrize("kind", OPTIONS)
def test_exported_adapter_gives_the_logged_loss_on_quantized_weights_and_is_merged_into_whole_ones(
    kind: str, base: Path, tmp_path: Path
) -> None:
    trainer = SupervisedTrainer(job(base, kind))
    for _ in range(4):
        trainer.step(batch())
    logged, count = trainer.evaluate([batch()])["val_loss"]
    layout = layout_of(trainer.model)
    export(job(base, kind), None, views(layout, [gather(trainer.model, layout, 0)]), tmp_path / "model")
    options = transformers.BitsAndBytesConfig(**OPTIONS[kind])
    load, adapter = transformers.AutoModelForCausalLM.from_pretrained, tmp_path / "model/adapter"
    quantized = load(base, quantization_config=options, device_map={"": "cpu"})
    merged = load(tmp_path / "model")
    assert not hasattr(merged.config, "quantization_config")
    with torch.no_grad():
        found = plain_loss(peft.PeftModel.from_pretrained(quantized, adapter).eval())
        whole = plain_loss(peft.PeftModel.from_pretrained(load(base), adapter).eval())
        assert float(found) == pytest.approx(logged / count, rel=1e-5)
        assert float(plain_loss(merged.eval())) == pytest.approx(float(whole), rel=1e-5)


def test_quantization_without_its_package_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = r"MODEL008.*model\.quantization needs bitsandbytes — got it isn't installed.*hypha_ray\[quantized\]"
    with pytest.raises(ConfigError, match=words):
        check_job(job(base, "nf4"))
