"""Muon with a call for each shape: the same as torch's, matrix by matrix."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hypha_ray.config.training import InnerOptimizer
from hypha_ray.members import muon
from hypha_ray.members.muon import Muon, muon_weights, orthogonal, shares
from hypha_ray.optim.optimizers import Inner, build_optimizer

SHAPES = [(6, 6), (4, 12), (12, 4), (6, 6), (4, 12), (4, 12)]


def matrices(seed: int) -> list[torch.nn.Parameter]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=drawn)) for shape in SHAPES]


def stepped(optimizer: type[torch.optim.Optimizer], missing: int | None = None) -> list[torch.nn.Parameter]:
    """Matrices after five steps; one of them may have no gradient in the third."""
    parameters = matrices(0)
    one = optimizer(parameters, lr=0.1, weight_decay=0.2)  # type: ignore[call-arg]
    for step in range(5):
        for place, (parameter, gradient) in enumerate(zip(parameters, matrices(1 + step), strict=True)):
            parameter.grad = None if step == 2 and place == missing else gradient.detach()
        one.step()
    return parameters


@pytest.mark.parametrize("missing", [None, 0, 4])
@pytest.mark.parametrize("together", [1, 2 * 48, 1 << 24])
def test_steps_are_those_of_torch(missing: int | None, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "TOGETHER", together)
    for ours, theirs in zip(stepped(Muon, missing), stepped(torch.optim.Muon, missing), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)  # Theirs computes in bfloat16.
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("shape", [(3, 8, 32), (3, 32, 8), (1, 16, 16)])
def test_singular_values_come_near_one_and_their_vectors_stay(shape: tuple[int, int, int]) -> None:
    before = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    left, _, right = torch.linalg.svd(before, full_matrices=False)
    turned = left.mT @ orthogonal(before) @ right.mT
    values = turned.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.6 and values.max() < 1.3
    torch.testing.assert_close(turned, torch.diag_embed(values), rtol=0, atol=1e-4)


def test_matrix_without_any_gradient_stays_finite() -> None:
    assert orthogonal(torch.zeros(2, 4, 6)).eq(0).all()


def test_state_goes_on_where_it_was() -> None:
    whole = stepped(Muon)
    parameters = matrices(0)
    optimizer = Muon(parameters, lr=0.1, weight_decay=0.2)
    for step in range(5):
        if step == 2:
            state = optimizer.state_dict()
            optimizer = Muon(parameters, lr=0.1, weight_decay=0.2)
            optimizer.load_state_dict(state)
        for parameter, gradient in zip(parameters, matrices(1 + step), strict=True):
            parameter.grad = gradient.detach()
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(whole, parameters, strict=True))


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_lengths_of_steps_are_those_of_torch(rule: Any) -> None:
    ours = stepped(partial(Muon, length=rule))  # type: ignore[arg-type]
    theirs = stepped(partial(torch.optim.Muon, adjust_lr_fn=rule))  # type: ignore[arg-type]
    starts = matrices(0)
    for one, other, start in zip(ours, theirs, starts, strict=True):
        assert (one - other).norm() < 0.01 * (other - start).norm()


def test_rule_of_the_job_file_reaches_muon() -> None:
    model = torch.nn.Linear(4, 16, bias=False)
    for rule, length in (("original", 2.0), ("match_rms_adamw", 0.8)):
        config = InnerOptimizer(name="muon", muon_step_length=rule, weight_decay=0.0, clip_norm=None)  # type: ignore[arg-type]
        before = model.weight.detach().clone()
        model.weight.grad = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        build_optimizer(model, config).step()
        values = torch.linalg.svdvals(model.weight.detach() - before) / config.muon_learning_rate
        assert 0.6 * length < values.min() and values.max() < 1.3 * length


@pytest.mark.parametrize("together", [1, 1 << 24])
@pytest.mark.parametrize("sideways", [False, True])
def test_each_expert_is_stepped_on_like_a_matrix_of_its_own(
    sideways: bool, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "TOGETHER", together)
    drawn = torch.Generator().manual_seed(0)
    experts = torch.nn.Parameter(torch.randn(3, 12, 4, generator=drawn))
    alone = [torch.nn.Parameter(one.clone()) for one in experts.detach()]
    of_all = Muon([{"params": [experts], "sideways": sideways}], lr=0.1, weight_decay=0.2)
    of_each = Muon([{"params": alone, "sideways": sideways}], lr=0.1, weight_decay=0.2)
    for _ in range(3):
        experts.grad = torch.randn(3, 12, 4, generator=drawn)
        for parameter, gradient in zip(alone, experts.grad, strict=True):
            parameter.grad = gradient.clone()
        of_all.step()
        of_each.step()
    torch.testing.assert_close(experts.detach(), torch.stack([one.detach() for one in alone]), rtol=0, atol=1e-6)


TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}


def taken_of(kind: str, **own: int) -> tuple[Any, dict[str, bool]]:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY | own))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    prefix = "model.layers.0."
    return model, {names[one].removeprefix(prefix): sideways for one, sideways in muon_weights(model).items()}


ATTENTION = dict.fromkeys((f"self_attn.{letter}_proj.weight" for letter in "qkvo"), False)


def test_experts_of_mixtral_are_muons() -> None:
    model, taken = taken_of("mixtral")
    experts = {"mlp.experts.gate_up_proj": False, "mlp.experts.down_proj": False, "mlp.gate.weight": False}
    assert taken == ATTENTION | experts
    tables, gains = 2 * 32 * 16, 3 * 16
    total = model.num_parameters()
    assert shares(model) == {"matrices": total - tables - gains, "embeddings and head": tables, "vectors": gains}


def test_experts_with_inputs_for_rows_are_told_apart_and_their_biases_are_not_matrices() -> None:
    _, taken = taken_of("gpt_oss")
    experts = {"mlp.experts.gate_up_proj": True, "mlp.experts.down_proj": True, "mlp.router.weight": False}
    assert taken == ATTENTION | experts


LONGCAT = {
    "num_layers": 1,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "ffn_hidden_size": 24,
    "expert_ffn_hidden_size": 12,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}


def test_experts_without_a_number_are_known_by_the_name_of_their_class() -> None:
    """Of six experts two are no more than the identity, so the module's tensors have different lengths."""
    model, taken = taken_of("longcat_flash", **LONGCAT)
    names = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if "mlp.experts" in name}
    shapes = {name.removeprefix("model.layers.0."): shape for name, shape in names.items()}
    assert shapes == {"mlp.experts.gate_up_proj": (6, 24, 16), "mlp.experts.down_proj": (4, 16, 12)}
    assert [taken[name] for name in shapes] == [False, False]
    assert "other tensors" not in shares(model)


def test_head_of_a_classifier_is_counted_as_one() -> None:
    """Vectors of 16 and a bias for 3 classes; vectors of 32 tokens, 8 positions and 2 types."""
    sizes = {**TINY, "max_position_embeddings": 8, "num_labels": 3}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **sizes))
    assert shares(model)["embeddings and head"] == 17 * 3 + 16 * (32 + 8 + 2) and "other tensors" not in shares(model)


@pytest.fixture
def damaged_memory() -> Iterator[None]:
    """New memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


def fused(model: torch.nn.Module, config: InnerOptimizer) -> Inner:
    """What a worker has on a GPU."""
    if config.name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), config.learning_rate, momentum=config.momentum, fused=True)
        return Inner([optimizer], config, None)
    if config.name == "adam":
        return Inner([torch.optim.Adam(model.parameters(), config.learning_rate, fused=True)], config, None)
    return build_optimizer(model, config)


@pytest.mark.parametrize("name", ["adamw", "muon", "adam", "sgd"])
def test_step_that_is_left_out_on_the_device_changes_no_bit(name: str, damaged_memory: None) -> None:
    def trained(skips: bool) -> tuple[list[torch.Tensor], Any]:
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
        drawn = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=drawn))
        inner = fused(model, InnerOptimizer(name=name, clip_norm=None, momentum=0.9 if name == "sgd" else 0.0))
        assert inner.skips
        for step in range(6):
            damaged = step % 2 == 0
            gradients = [torch.randn(one.shape, generator=drawn) for one in model.parameters()]
            if damaged and not skips:
                continue
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient / 0 if damaged else gradient
            inner.step(skipped=torch.tensor(float(damaged)) if skips else None)
        state = [value for one in inner.optimizers for values in one.state.values() for value in values.values()]
        return [one.detach() for one in model.parameters()], state

    for wanted, found in zip(trained(skips=False), trained(skips=True), strict=True):
        assert len(wanted) == len(found) > 0
        assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


class Halves:
    """Parts of two processes, which are threads here: the first has one row more of an odd number."""

    def __init__(self, rank: int, shared: dict[int, Any], barrier: threading.Barrier, shapes: list[torch.Size]) -> None:
        self._rank, self._shared, self._barrier, self._shapes = rank, shared, barrier, shapes
        self.pieces: list[torch.nn.Parameter] = []

    def shape_of(self, piece: torch.Tensor) -> torch.Size:
        (place,) = [place for place, one in enumerate(self.pieces) if one is piece]
        return self._shapes[place]

    def whole(self, part: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        self._shared[self._rank] = part
        self._barrier.wait(10)
        found = torch.cat([self._shared[0], self._shared[1]])
        self._barrier.wait(10)
        return found

    def part(self, whole: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        return half(whole, self._rank)


def half(whole: torch.Tensor, rank: int) -> torch.Tensor:
    return whole.split(-(-len(whole) // 2))[rank] if len(whole) > rank else whole[:0]


def test_matrices_in_parts_take_the_steps_of_whole_ones_to_the_bit() -> None:
    shapes = [torch.Size(shape) for shape in [(5, 4), (4, 5), (5, 4), (1, 3), (3, 2, 4)]]
    drawn = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=drawn) for shape in shapes]
    gradients = [[torch.randn(shape, generator=drawn) for shape in shapes] for _ in range(3)]
    whole = [torch.nn.Parameter(start.clone()) for start in starts]
    shared: dict[int, Any] = {}
    barrier = threading.Barrier(2)
    parts = [Halves(rank, shared, barrier, shapes) for rank in range(2)]

    def train(parameters: list[torch.nn.Parameter], of: Any, assembly: Halves | None = None) -> None:
        optimizer = Muon(parameters, lr=0.1, weight_decay=0.2, assembly=assembly)
        for each in gradients:
            for parameter, gradient in zip(parameters, each, strict=True):
                parameter.grad = of(gradient).clone()
            optimizer.step()

    train(whole, lambda gradient: gradient)
    threads = []
    for rank, own in enumerate(parts):
        own.pieces = [torch.nn.Parameter(half(start, rank).clone()) for start in starts]
        of = partial(half, rank=rank)
        threads.append(threading.Thread(target=train, args=(own.pieces, of, own)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, one in enumerate(whole):
        assert torch.equal(one, torch.cat([own.pieces[place].detach() for own in parts])), place
