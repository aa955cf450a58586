"""Inner optimizers: torch's own numbers, the right one for each parameter, and a state to go on from."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    EncoderDecoderConfig,
    LlamaConfig,
)
from transformers.pytorch_utils import Conv1D

from hypha_ray.config import Job
from hypha_ray.config.training import InnerOptimizer
from hypha_ray.driver.preflight.checks import check_job
from hypha_ray.errors import ConfigError
from hypha_ray.optim import optimizers
from hypha_ray.optim.optimizers import Inner, build_optimizer, eight_bits_bytes

LLAMA = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    pad_token_id=0,
)


def network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    torch.set_num_threads(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def backward(model: torch.nn.Module, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16, 6, generator=generator)
    loss = (model(inputs) - inputs[:, :2].sin()).square().mean()
    loss.backward()
    return loss.item()


def train(model: torch.nn.Module, inner: Inner, seeds: range) -> None:
    for seed in seeds:
        inner.zero_grad()
        backward(model, seed)
        inner.step()


def values(model: torch.nn.Module) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def test_adamw_is_torchs_and_decays_matrices_only() -> None:
    ours, theirs = network(), network()
    inner = build_optimizer(ours, InnerOptimizer(clip_norm=None, learning_rate=0.01))
    parameters = list(theirs.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim == 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True)
    train(ours, inner, range(5))
    for seed in range(5):
        adamw.zero_grad()
        backward(theirs, seed)
        adamw.step()
    assert values(ours) == values(theirs)


def test_k_aware_adamw_of_one_worker_is_torchs() -> None:
    ours, theirs = network(), network()
    for model, k_aware in ((ours, True), (theirs, False)):
        train(model, build_optimizer(model, InnerOptimizer(learning_rate=0.01, k_aware=k_aware)), range(20))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("signal", [0.0, 0.3, 3.0])
def test_k_aware_steps_are_as_long_on_average_as_those_on_the_mean_gradient(signal: float) -> None:
    workers, steps, generator = 4, 60, torch.Generator().manual_seed(0)
    noise = torch.randn(steps, workers, 2000, generator=generator)

    def travelled(gradients: torch.Tensor, of: int, k_aware: bool) -> torch.Tensor:
        model = torch.nn.Linear(2000, 1, bias=False)
        start = model.weight.detach().clone()
        config = InnerOptimizer(learning_rate=0.01, weight_decay=0, clip_norm=None, k_aware=k_aware)
        inner = build_optimizer(model, config, workers=of)
        for gradient in gradients:
            model.weight.grad = gradient[None] + signal
            inner.step()
        return model.weight.detach() - start

    together = travelled(noise.mean(1), 1, False)
    apart, blind = (
        torch.stack([travelled(noise[:, worker], workers, k_aware) for worker in range(workers)]).mean(0)
        for k_aware in (True, False)
    )
    lengths = [float(way.norm()) for way in (apart, blind, together)]
    assert lengths[0] == pytest.approx(lengths[2], rel=0.2)
    if signal < 1:
        assert lengths[1] < 0.6 * lengths[2], "without K steps are shorter where there is noise"


def test_sgd_is_torchs() -> None:
    ours, theirs = network(), network()
    fields: dict[str, Any] = {"learning_rate": 0.1, "momentum": 0.5, "weight_decay": 0.01}
    inner = build_optimizer(ours, InnerOptimizer(name="sgd", clip_norm=None, **fields))
    sgd = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.5, weight_decay=0.01)
    train(ours, inner, range(5))
    for seed in range(5):
        sgd.zero_grad()
        backward(theirs, seed)
        sgd.step()
    assert values(ours) == values(theirs)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_optimizer_any_name_brings_the_loss_down(name: str) -> None:
    model = network()
    before = backward(model, 0)
    train(
        model, build_optimizer(model, InnerOptimizer.model_validate({"name": name, "learning_rate": 0.02})), range(60)
    )
    assert backward(model, 0) < before / 2


def wide() -> torch.nn.Sequential:
    """A network with matrices that are large enough for a state of 8 bits."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 2))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    return sum(storage.nbytes() for storage in {one.data_ptr(): one.untyped_storage() for one in tensors}.values())


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="it is an extra")
def test_8bit_adamw_is_that_of_bitsandbytes_and_nearly_torchs_in_less_memory() -> None:
    from bitsandbytes.optim import AdamW8bit

    settings = {"learning_rate": 0.01, "weight_decay": 0.1, "clip_norm": None}
    models = {name: wide() for name in ("adamw8bit", "adamw")}
    ours = {name: build_optimizer(m, InnerOptimizer(name=name, **settings)) for name, m in models.items()}
    plain = wide()
    matrices, vectors = ([p for p in plain.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = AdamW8bit(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for seed in range(40):
        theirs.zero_grad()
        backward(plain, seed)
        theirs.step()
    for name, model in models.items():
        train(model, ours[name], range(40))
    assert values(models["adamw8bit"]) == values(plain)
    eight, full = (backward(models[name], 0) for name in ("adamw8bit", "adamw"))
    assert eight == pytest.approx(full, rel=0.02) and eight < 0.5 * backward(wide(), 0)
    taken, tables = state_bytes(ours["adamw8bit"].optimizers[0]), 2 * 256 * 4  # What 8 bits mean, once for all tensors.
    assert taken < 0.6 * state_bytes(ours["adamw"].optimizers[0])
    assert eight_bits_bytes(models["adamw8bit"].parameters()) + tables == taken
    ours["adamw8bit"].reset()
    train(models["adamw8bit"], ours["adamw8bit"], range(1))


def test_state_of_8bit_adamw_has_a_byte_for_each_average_and_a_scale_for_each_block_of_large_tensors() -> None:
    sizes = {4096: 2 * (4096 + 4 * 16), 4097: 2 * (4097 + 4 * 17), 4095: 2 * 4 * 4095}
    for size, taken in sizes.items():
        assert eight_bits_bytes([torch.nn.Parameter(torch.zeros(size))]) == taken


def test_8bit_adamw_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers.importlib.util, "find_spec", lambda name: None)
    words = r"OPT007.*name = 'adamw8bit' needs bitsandbytes — got it isn't installed.*pip install bitsandbytes, or"
    with pytest.raises(ConfigError, match=words):
        check_job(Job.model_validate({"inner_optimizer": {"name": "adamw8bit"}}))
    with pytest.raises(ConfigError, match=words):
        build_optimizer(network(), InnerOptimizer(name="adamw8bit"))


def test_settings_reach_any_optimizer_that_takes_them() -> None:
    config = InnerOptimizer(name="nadam", learning_rate=0.02, betas=(0.8, 0.88), epsilon=1e-4, weight_decay=0.3)
    (optimizer,) = build_optimizer(network(), config).optimizers
    assert type(optimizer) is torch.optim.NAdam
    (group,) = optimizer.param_groups
    found = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
    assert found == (0.02, (0.8, 0.88), 1e-4, 0.3)


@pytest.mark.parametrize("order", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_adafactors_epsilon_is_that_of_each_weights_own_dtype(order: tuple[torch.dtype, ...]) -> None:
    """Torch 2.13 takes it from a group's first weight: 8e-3 of bfloat16 for gradients of float32 that are smaller."""

    def stepped(*dtypes: torch.dtype) -> list[torch.Tensor]:
        weights = torch.nn.ParameterList(torch.ones(4, 3, dtype=dtype) for dtype in dtypes)
        for weight in weights:
            weight.grad = torch.linspace(-1e-4, 1e-4, 12).reshape(4, 3).to(weight.dtype)
        build_optimizer(weights, InnerOptimizer(name="adafactor", learning_rate=0.1, clip_norm=None)).step()
        return [weight.detach() for weight in weights]

    together = stepped(*order)
    alone = [stepped(dtype)[0] for dtype in order]
    assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("name", ["adamv", "Optimizer", "LBFGS", "SparseAdam", "lr_scheduler"])
def test_name_of_no_optimizer_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=f"OPT006.*no such optimizer — got {name}, allowed adadelta, adafactor, "):
        build_optimizer(network(), InnerOptimizer(name=name))


@pytest.mark.parametrize("clip_norm", [None, 0.25, 1e6])
def test_step_clips_by_the_norm(clip_norm: float | None) -> None:
    model, untouched = network(), network()
    config = InnerOptimizer(name="sgd", learning_rate=1.0, weight_decay=0.0, clip_norm=clip_norm)
    inner = build_optimizer(model, config)
    backward(model, 0)
    backward(untouched, 0)
    gradients = torch.cat(
        [parameter.grad.flatten() for parameter in untouched.parameters() if parameter.grad is not None]
    )
    norm = inner.norm()
    inner.step()
    pairs = zip(model.parameters(), untouched.parameters(), strict=True)
    moved = torch.cat([(after - before).detach().flatten() for after, before in pairs])
    assert norm.item() == pytest.approx(gradients.norm().item(), rel=1e-5) and norm.item() > 0.25
    limit = min(norm.item(), clip_norm or norm.item())
    assert moved.norm().item() == pytest.approx(limit, rel=1e-4)


def changed_by_muon(model: Any, **inputs: torch.Tensor) -> set[str]:
    """Names of the parameters that move when AdamW's rate is next to nothing."""
    config = InnerOptimizer(name="muon", learning_rate=1e-12, muon_learning_rate=0.1, weight_decay=0.0)
    inner = build_optimizer(model, config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(input_ids=torch.arange(1, 9).reshape(1, 8), **inputs).logits.square().sum().backward()
    inner.step()
    return {
        name for name, parameter in model.named_parameters() if (parameter.detach() - before[name]).abs().max() > 1e-6
    }


MATRICES = {
    *(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_hidden_matrices_but_neither_embedding_nor_head(tied: bool) -> None:
    config = LlamaConfig.from_dict({**LLAMA.to_dict(), "tie_word_embeddings": tied})
    assert changed_by_muon(AutoModelForCausalLM.from_config(config)) == MATRICES


@pytest.mark.parametrize(("inputs", "outputs"), [(4, 12), (12, 4), (6, 6)])
def test_muon_steps_alike_whichever_way_a_weight_is_stored(inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    config = InnerOptimizer(name="muon", muon_learning_rate=0.1, weight_decay=0.3, schedule="constant", warmup_steps=0)
    upright, sideways = torch.nn.Linear(inputs, outputs, bias=False), Conv1D(outputs, inputs)
    sideways.weight.data = upright.weight.data.T.clone()
    gradients = [torch.randn(outputs, inputs) for _ in range(3)]
    for layer, turned in ((upright, False), (sideways, True)):
        inner = build_optimizer(torch.nn.Sequential(layer), config)
        for gradient in gradients:
            layer.weight.grad = gradient.T.clone() if turned else gradient.clone()
            inner.step()
    torch.testing.assert_close(sideways.weight.T, upright.weight)


def test_muon_leaves_a_classifiers_head_to_adamw() -> None:
    assert changed_by_muon(AutoModelForSequenceClassification.from_config(LLAMA)) == MATRICES


def test_muon_leaves_the_head_of_a_model_in_two_halves_to_adamw() -> None:
    halves = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    bert = BertConfig(num_attention_heads=2, tie_word_embeddings=False, **halves)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(bert, bert, decoder_start_token_id=1, pad_token_id=0)
    changed = changed_by_muon(AutoModelForSeq2SeqLM.from_config(config), decoder_input_ids=torch.ones(1, 4).long())
    assert "decoder.bert.encoder.layer.0.crossattention.self.query.weight" in changed
    assert "decoder.cls.predictions.decoder.weight" not in changed


def test_optimizer_frozen_parameters_stay() -> None:
    model = network()
    model[0].requires_grad_(False)
    frozen, trained = values(model[0]), values(model[3])
    train(model, build_optimizer(model, InnerOptimizer()), range(2))
    assert values(model[0]) == frozen and values(model[3]) != trained


def test_learning_rate_is_that_of_the_next_step() -> None:
    model = network()
    config = InnerOptimizer(name="muon", learning_rate=0.5, schedule="linear")
    inner = build_optimizer(model, config, 4)
    shown = []
    for seed in range(5):
        shown.append(inner.learning_rate)
        train(model, inner, range(seed, seed + 1))
    assert shown == [0.5, 0.375, 0.25, 0.125, 0.0]
