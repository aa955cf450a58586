"""The inner state: with it another worker goes on to the bit, and without it it doesn't."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config.training import InnerOptimizer
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.optim.optimizers import Inner, build_optimizer
from hypha_ray.optim.step import export_state, load_state
from tests.unit.optim.test_optimizers import network, train, values


def built(name: str, dtype: torch.dtype = torch.float32, transposes: bool = False) -> tuple[torch.nn.Module, Inner]:
    name, _, k_aware = name.partition(" ")
    table = {"name": name, "momentum": 0.9, "schedule": "linear", "clip_norm": 1.0, "k_aware": bool(k_aware)}
    model = network().to(dtype)
    for parameter in model.parameters():
        if transposes and parameter.ndim == 2:
            parameter.data = parameter.data.t().contiguous().t()
    return model, build_optimizer(model, InnerOptimizer.model_validate(table), 10, 4)


def as_ray_gives_it(state: dict[str, Any]) -> dict[str, Any]:
    for array in state.values():
        array.flags.writeable = False
    return state


@pytest.mark.parametrize(
    "name", ["adamw", "adamw k_aware", "muon", "muon k_aware", "sgd", "nadam", "asgd", "adafactor"]
)
def test_state_loaded_elsewhere_goes_on_to_the_bit(name: str) -> None:
    (straight, inner), (first, before), (second, after) = built(name), built(name), built(name)
    train(straight, inner, range(8))
    train(first, before, range(5))
    state = as_ray_gives_it(export_state(before))
    kept = {key: array.copy() for key, array in state.items()}
    second.load_state_dict(first.state_dict())
    load_state(after, state)
    after.seek(5)
    train(second, after, range(5, 8))
    assert values(second) == values(straight) and after.learning_rate == inner.learning_rate
    assert all(np.array_equal(state[key], kept[key]) for key in kept), "the arrays were written to"


class Counting(torch.optim.Optimizer):
    """Momentum whose bias is corrected by a number of steps that is no tensor, as in many optimizers of others."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["scale"] = 0.9 ** state["step"]
            state["nothing"] = None
            mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
            parameter.add_(mean / (1 - state["scale"]), alpha=-self.param_groups[0]["lr"])


class Opaque(Counting):
    """An optimizer with a function in its state."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["curve"] = len


def test_numbers_of_a_users_optimizer_stay_numbers() -> None:
    (straight, inner), (first, before), (second, after) = (built(f"{__name__}:Counting") for _ in range(3))
    train(straight, inner, range(8))
    train(first, before, range(5))
    second.load_state_dict(first.state_dict())
    load_state(after, as_ray_gives_it(export_state(before)))
    after.seek(5)
    train(second, after, range(5, 8))
    assert values(second) == values(straight)
    assert {type(state["step"]) for state in after.optimizers[0].state.values()} == {int}


def test_state_that_cannot_be_saved_is_named() -> None:
    model, inner = built(f"{__name__}:Opaque")
    train(model, inner, range(1))
    with pytest.raises(ConfigError, match=r"OPT009.*the state curve of the optimizer can't be saved"):
        export_state(inner)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_gradients_and_averages_set_from_arrays_suit_weights_in_any_order_of_memory(name: str) -> None:
    plain, transposed = built(name), built(name, transposes=True)
    for model, inner in (plain, transposed):
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.numel(), generator=generator).view(parameter.shape)
            inner.step()
            load_state(inner, as_ray_gives_it(export_state(inner)))
    for one, other in zip(plain[0].parameters(), transposed[0].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_without_the_state_the_same_weights_go_another_way(name: str) -> None:
    (first, before), (second, after) = built(name), built(name)
    train(first, before, range(5))
    second.load_state_dict(first.state_dict())
    after.seek(5)
    train(first, before, range(5, 6))
    train(second, after, range(5, 6))
    assert values(second) != values(first)


def test_state_names_what_every_parameter_has() -> None:
    model, inner = built("adamw")
    assert export_state(inner) == {}
    train(model, inner, range(3))
    state = export_state(inner)
    assert {key.rpartition("/")[2] for key in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert {key.partition("/")[0] for key in state} == {"0"} and len(state) == 3 * len(list(model.parameters()))
    assert state["0/0/step"].shape == () and float(state["0/0/step"]) == 3.0


def test_state_of_muon_has_both_optimizers() -> None:
    model, inner = built("muon")
    train(model, inner, range(1))
    assert {key.partition("/")[0] for key in export_state(inner)} == {"0", "1"}


def test_exported_arrays_are_copies() -> None:
    model, inner = built("adamw")
    train(model, inner, range(1))
    state = export_state(inner)
    before = {key: array.copy() for key, array in state.items()}
    train(model, inner, range(1, 2))
    assert all(np.array_equal(state[key], before[key]) for key in state)


@pytest.mark.parametrize(
    "name", ["adamw", "adafactor", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop"]
)
def test_state_in_bfloat16_comes_back_to_the_bit(name: str) -> None:
    (model, inner), (_, other) = built(name, torch.bfloat16), built(name, torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.3)
    inner.step()
    state = export_state(inner)
    assert any(array.dtype == np.uint16 for array in state.values())
    load_state(other, state)
    back = export_state(other)
    assert {key: array.tobytes() for key, array in back.items()} == {key: a.tobytes() for key, a in state.items()}


@pytest.mark.parametrize(
    "damage", [{"0/0/exp_avg": np.zeros(5, np.float32)}, {"0/99/step": np.zeros(())}, {"3/0/x": np.zeros(1)}]
)
def test_state_of_another_model_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    model, inner = built("adamw")
    train(model, inner, range(1))
    before = export_state(inner)
    with pytest.raises(CheckpointError, match="inner state doesn't fit"):
        load_state(inner, {**before, **damage})
    assert all(np.array_equal(array, before[key]) for key, array in export_state(inner).items())
