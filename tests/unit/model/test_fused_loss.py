"""A loss that is fused with the head is the plain one, and so are its gradients; other heads are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from hypha_ray.config.schema import Job, Model
from hypha_ray.errors import ConfigError
from hypha_ray.model import losses
from hypha_ray.model.build import build_model, random_model, skeleton, task_of
from hypha_ray.model.loss_check import check_fused_on_copy, head_of
from hypha_ray.types import Samples
from hypha_ray.worker.supervised import SupervisedTrainer

_SMALL = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
LLAMA = {**_SMALL, "model_type": "llama", "intermediate_size": 32}
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 320}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
PHI = {**_SMALL, "model_type": "phi", "intermediate_size": 32, "resid_pdrop": 0.0}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "output_router_logits": True}
MIXTRAL |= {"num_key_value_heads": 2}
COHERE = {**LLAMA, "model_type": "cohere", "logit_scale": 0.25}
GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "num_key_value_heads": 1, "final_logit_softcapping": 30.0}
ACCEPTED = {"untied": LLAMA, "tied": GPT2, "bias": PHI, "routers": MIXTRAL, "scaled": COHERE}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of seven positions, of which the last one is short."""
    monkeypatch.setattr(losses, "CHUNK", 7 * 320)


def batch() -> Samples:
    """Packed samples, of which each has another number of scored positions."""
    draws = np.random.default_rng(0)
    ids = draws.integers(3, 300, (5, 24))
    labels = np.where(np.arange(24) < np.array([[3], [20], [9], [23], [0]]), -100, ids)
    places = np.concatenate([np.arange(10), np.arange(14)])[None].repeat(5, 0)
    return Samples({"input_ids": ids, "labels": labels, "position_ids": places}, np.zeros((5, 3), np.int64))


def exact_weights(network: Any) -> None:
    """Have 64 bits: with 32, rounding by itself is 1.7e-6 of gradients on some processors."""
    if network.config.model_type == "mixtral":
        network.set_experts_implementation("eager")  # Torch's product of groups has no 64 bits.
    network.double()


def gradients(model: dict[str, Any], **worker: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
    tables = {"model": model, "worker": {"device": "cpu", **worker}, "rounds": {"accumulation": 2}}
    trainer = SupervisedTrainer(Job.model_validate(tables))
    with torch.no_grad():
        for seed, one in enumerate(trainer.model.parameters()):
            one.add_(torch.randn(one.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.1)
    exact_weights(trainer.model)
    evaluated = trainer.evaluate([batch()])
    step = trainer.backward(batch())
    found = {name: one.grad for name, one in trainer.model.named_parameters() if one.grad is not None}
    return step.loss, found, evaluated


def require_equal(model: dict[str, Any]) -> None:
    loss, expected, evaluated = gradients(model)
    found_loss, found, found_evaluated = gradients(model, fused_loss=True)
    assert float(found_loss) == pytest.approx(float(loss), rel=1e-6)
    assert found_evaluated["val_loss"] == pytest.approx(evaluated["val_loss"], rel=1e-6)
    assert expected.keys() == found.keys() and expected
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()), msg=name)


@pytest.mark.parametrize("kind", ACCEPTED)
def test_fused_loss_and_gradients_are_the_plain_ones(kind: str) -> None:
    require_equal({"config": ACCEPTED[kind]})


def test_fused_loss_below_an_adapter_trains_the_adapter_alike(tmp_path: Path) -> None:
    build_model(Model(config=LLAMA), seed=0).save_pretrained(tmp_path)
    require_equal({"repository": str(tmp_path), "lora": {"rank": 2}})


def test_fused_loss_never_makes_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = list[int]()
    plain = losses.linear

    def linear(states: torch.Tensor, *others: Any) -> torch.Tensor:
        shapes.append(len(states))
        return plain(states, *others)

    monkeypatch.setattr(losses, "linear", linear)
    hidden, head, labels = torch.randn(30, 16), torch.nn.Linear(16, 320), torch.randint(320, (30,))
    fused = losses.fused_cross_entropy(hidden, head, labels)
    assert shapes == [7, 7, 7, 7, 2]
    torch.testing.assert_close(fused, cross_entropy(head(hidden), labels), rtol=1e-6, atol=0)


def test_fused_loss_of_16_bits_is_as_close_to_that_of_32_as_the_plain_one() -> None:
    torch.manual_seed(0)
    hidden, head, labels = torch.randn(60, 16), torch.nn.Linear(16, 320), torch.randint(320, (60,))
    found = dict[str, list[torch.Tensor]]()
    for kind in ("exact", "plain", "fused"):
        states = hidden.clone().requires_grad_()
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind != "exact"):
            if kind == "fused":
                loss = losses.fused_cross_entropy(states, head, labels)
            else:
                loss = cross_entropy(head(states).float(), labels)
        loss.backward()
        assert loss.dtype == torch.float32 and states.grad is not None
        found[kind] = [loss.detach(), states.grad, head.weight.grad.clone(), head.bias.grad.clone()]  # type: ignore[union-attr]
    assert float(found["fused"][0]) == pytest.approx(float(found["plain"][0]), rel=1e-6)
    for exact, plain, ours in zip(*found.values(), strict=True):
        assert float((ours - exact).norm()) < 1.2 * float((plain - exact).norm()) + 1e-6


def test_fused_loss_of_float16_has_gradients_that_would_vanish_without_their_scale() -> None:
    """A position's share of a mean over 400 and of 40 000 classes is far below float16's smallest number."""
    torch.manual_seed(0)
    hidden, head, labels = torch.randn(400, 16), torch.nn.Linear(16, 40_000), torch.randint(40_000, (400,))
    found = dict[str, list[torch.Tensor]]()
    for kind in ("exact", "scaled", "vanishing"):
        states = hidden.clone().requires_grad_()
        head.zero_grad()
        scale = None if kind == "vanishing" else torch.tensor(2.0**16)
        with torch.autocast("cpu", torch.float16, enabled=kind != "exact"):
            loss = losses.fused_cross_entropy(states, head, labels, scale)
        (loss * 2.0**16 * 0.5).backward()  # Half of a batch.
        assert states.grad is not None
        gradients = [states.grad, head.weight.grad.clone(), head.bias.grad.clone()]  # type: ignore[union-attr]
        found[kind] = [loss.detach(), *(gradient / 2.0**15 for gradient in gradients)]
    for exact, scaled, vanishing in zip(*found.values(), strict=True):
        assert float((scaled - exact).norm()) < 2e-3 * float(exact.norm())
        if exact.ndim == 2:
            assert float((vanishing - exact).norm()) > 4 * float((scaled - exact).norm())
    plain = cross_entropy(head(hidden), labels).detach()
    assert float(found["exact"][0]) == pytest.approx(float(plain), rel=1e-5)


def check(config: dict[str, Any]) -> None:
    model = Model(config=config)
    network = skeleton(model)
    task, size = task_of(model, network), sum(one.numel() for one in network.parameters())
    assert check_fused_on_copy(task, batch(), network.config, partial(random_model, model, task), size)


@pytest.mark.parametrize("kind", ACCEPTED)
def test_logits_of_a_linear_head_are_accepted(kind: str) -> None:
    check(ACCEPTED[kind])


def test_logits_that_are_capped_are_refused() -> None:
    check({**GEMMA2, "final_logit_softcapping": None})
    with pytest.raises(ConfigError, match=r"MODEL020.*Gemma2ForCausalLM has no loss that can be.*those of its head"):
        check(GEMMA2)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"config": {"model_type": "bert", **_SMALL, "intermediate_size": 32}, "type": "masked-lm"}, "got masked-lm"),
        ({"config": {"model_type": "vit", "hidden_size": 8, "num_attention_heads": 2}, "type": "image-classification"},
         "got image-classification"),
    ],
)  # fmt: skip
def test_task_without_logits_of_the_next_token_is_refused(model: dict[str, Any], words: str) -> None:
    network = skeleton(Model(**model))
    with pytest.raises(ConfigError, match=rf"MODEL020.*{words}"):
        head_of(task_of(Model(**model), network), network)


def test_head_with_an_adapter_is_refused(tmp_path: Path) -> None:
    build_model(Model(config=LLAMA), seed=0).save_pretrained(tmp_path)
    tables = {"repository": str(tmp_path), "lora": {"rank": 2, "targets": ["lm_head"]}}
    with pytest.raises(ConfigError, match=r"MODEL020.*worker\.fused_loss.*causal-lm with Linear"):
        SupervisedTrainer(Job.model_validate({"model": tables, "worker": {"device": "cpu", "fused_loss": True}}))
