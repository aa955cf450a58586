"""Training with float16: steps and scales of torch's own `GradScaler`, and overflows that are nobody's damage."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.config.conflicts import conflicts
from hypha_ray.driver.preflight.compatibility import Case, check_scaled_loss
from hypha_ray.errors import ConfigError
from hypha_ray.optim import torch_extras as module
from hypha_ray.optim.torch_extras import LossScale
from hypha_ray.types import Damaged, Delta, FragmentUpdate, Plan, Samples, Span
from hypha_ray.worker.group.actor import GroupTrainer
from hypha_ray.worker.supervised import SupervisedTrainer
from hypha_ray.worker.trainer import export_inner_state, import_inner_state
from tests.support.followers import Forks
from tests.support.slow_device import use_slow_device
from tests.support.worker_bench import CONFIG, Bench, plan_of
from tests.unit.worker.test_damage import VIT, bench_of

FP16 = {"worker": {"autocast": "fp16", "device": "cpu"}}
HIGH = 2.0**26
"""Scale at which gradients of the tiny model overflow."""


@pytest.fixture
def high(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INITIAL", HIGH)
    monkeypatch.setattr(module, "INTERVAL", 3)


def test_scale_goes_as_that_of_torch() -> None:
    drawn = np.random.default_rng(0)
    ours, theirs = LossScale(torch.device("cpu")), torch.amp.GradScaler("cpu", growth_interval=3)
    ours.interval = 3
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], 0.1)
    seen = set()
    for _ in range(60):
        gradient = torch.randn(4) * float(drawn.choice([1.0, 1.0, 1.0, np.inf, np.nan]))
        theirs.scale(torch.zeros(()))
        parameter.grad = gradient.clone()
        theirs.unscale_(optimizer)
        unscaled = parameter.grad
        parameter.grad = gradient.clone()
        ours.unscale([parameter])
        assert torch.equal(parameter.grad.nan_to_num(), unscaled.nan_to_num())
        ours.update(parameter.grad.isfinite().all().logical_not().float())
        theirs.step(optimizer)
        theirs.update()
        seen.add(float(ours.scale))
        assert float(ours.scale) == theirs.get_scale()
    assert len(seen) > 3


def batches(count: int) -> list[Samples]:
    ids = np.random.default_rng(0).integers(0, 50, (count, 4, 16)).astype(np.int64)
    return [Samples({"input_ids": one, "attention_mask": np.ones_like(one)}, np.zeros((4, 3), np.int64)) for one in ids]


def test_steps_are_those_of_plain_torch_with_its_scaler(high: None) -> None:
    job = Job.model_validate({"model": {"config": CONFIG}, "inner_optimizer": {"learning_rate": 1e-2}, **FP16})
    ours = SupervisedTrainer(job)
    theirs = SupervisedTrainer(job)
    model, (optimizer,), scaler = (
        theirs.model,
        theirs.optimizer.optimizers,
        torch.amp.GradScaler("cpu", HIGH, growth_interval=3),
    )
    scales, skipped = [], 0
    for batch in batches(14):
        skipped += not ours.step(batch).scored
        optimizer.zero_grad()
        ids = torch.from_numpy(batch.arrays["input_ids"])
        with torch.autocast("cpu", torch.float16):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            following = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), following.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert ours.loss_scale is not None
        scales.append(scaler.get_scale())
        assert float(ours.loss_scale.scale) == scales[-1]
    assert 0 < skipped < 14 and min(scales) < HIGH and any(after > before for before, after in pairwise(scales))
    assert all(torch.equal(*pair) for pair in zip(ours.model.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("inner", [{"name": "adamw"}, {"name": "sgd"}], ids=["left out there", "waited for"])
def test_overflow_is_no_damage_and_training_goes_on(
    high: None, monkeypatch: pytest.MonkeyPatch, inner: dict[str, Any]
) -> None:
    at_once = Bench(inner_optimizer=inner, **FP16).run(plan_of(48, batch=4))
    use_slow_device(monkeypatch)
    late = Bench(inner_optimizer=inner, **FP16).run(plan_of(48, batch=4))
    for bench in (at_once, late):
        delta = bench.of(Delta)[0]
        assert not bench.of(Damaged) and (delta.samples, delta.batches) == (48, 12) and 0 < delta.scored < 48 * 15
        assert np.isfinite(bench.weights).all() and delta.loss is not None and np.isfinite(delta.loss)
    assert np.array_equal(at_once.weights, late.weights)


def test_accumulated_and_summed_gradients_are_those_of_float16_without_a_scale() -> None:
    ours = Bench(sync={"strategy": "sync"}, rounds={"accumulation": 2}, **FP16).run(plan_of(24)).weights
    plain = Bench(sync={"strategy": "sync"}, rounds={"accumulation": 2}).run(plan_of(24)).weights
    assert 0 < np.abs(ours - plain).max() < 5e-3 * np.abs(plain).max()


def test_damaged_sample_is_named_though_losses_are_scaled() -> None:
    bench = bench_of(VIT, np.nan, **FP16, dataset={"allow_quarantine": True}).run(plan_of(24))
    (event,) = bench.of(Damaged)
    assert len(event.samples) == 1 and not event.whole and bench.of(Delta)[0].scored == 23


def test_gradient_that_overflows_without_a_scale_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the batches can't be anything but steps on the way down to a scale of 1."""
    monkeypatch.setattr(module, "INITIAL", 4.0)

    def spoilt(trainer: SupervisedTrainer) -> None:
        for parameter in trainer.model.parameters():
            parameter.register_hook(lambda gradient: gradient * float("inf"))

    built = SupervisedTrainer.__init__

    def build(self: SupervisedTrainer, *arguments: Any, **named: Any) -> None:
        built(self, *arguments, **named)
        spoilt(self)

    monkeypatch.setattr(SupervisedTrainer, "__init__", build)
    bench = Bench(**FP16)
    with pytest.raises(ConfigError, match="TRN002"):
        bench.run(plan_of(60, batch=4))
    assert len(bench.of(Damaged)) == 10


def test_scale_travels_with_the_inner_state(high: None) -> None:
    job = Job.model_validate({"model": {"config": CONFIG}, "run": {"mode": "replay"}, **FP16})
    first, heir = SupervisedTrainer(job), SupervisedTrainer(job)
    for batch in batches(5):
        first.step(batch)
    state = export_inner_state(first, [])
    import_inner_state(heir, [], state)
    assert first.loss_scale is not None and heir.loss_scale is not None
    assert float(heir.loss_scale.scale) == float(first.loss_scale.scale) != HIGH
    assert export_inner_state(heir, []).keys() == state.keys()
    assert all(np.array_equal(array, state[name]) for name, array in export_inner_state(heir, []).items())


def test_replay_hands_the_scale_over(high: None) -> None:
    def second_round(successor: bool) -> np.ndarray[Any, Any]:
        bench = Bench(run={"mode": "replay"}, **FP16)
        bench.parts = 4
        spans = (Span(0, 0, 16, 32),)

        def next_round(event: Any) -> None:
            if isinstance(event, Delta) and event.round == 0:
                bench.inbox.assign(Plan(1, 0, spans, 8, keep=frozenset({0})))
                bench.inbox.merge(FragmentUpdate(1, 0), bench.theta)

        bench.on_event = next_round
        bench.run(plan_of(16))
        weights, state = bench.of(dict)[2:] if not successor else (None, bench.of(dict)[1])
        if weights is not None:
            flat: np.ndarray[Any, Any] = weights["parameters/float32"]
            return flat
        heir = Bench(run={"mode": "replay"}, **FP16)
        heir.parts = 2
        heir.inbox.restore(state)
        return heir.run(Plan(1, 0, spans, 8, keep=frozenset({0}), restores=True)).weights

    assert np.array_equal(second_round(False), second_round(True))


@pytest.mark.slow
def test_processes_of_a_worker_share_the_scale(high: None) -> None:
    tables: dict[str, Any] = {"model": {"config": CONFIG}, "inner_optimizer": {"learning_rate": 1e-2}}
    one = SupervisedTrainer(Job.model_validate({**tables, **FP16}))
    job = Job.model_validate({**tables, "worker": {**FP16["worker"], "processes": 2}})
    two = GroupTrainer(job, None, Forks(job, None))
    try:
        for batch in batches(8):
            expected, found = one.step(batch), two.step(batch)
            assert found.scored == expected.scored
            assert float(found.norm) == pytest.approx(float(expected.norm), rel=1e-2)
            assert one.loss_scale is not None and two.loss_scale is not None
            assert float(two.loss_scale.scale) == float(one.loss_scale.scale)
        assert float(one.loss_scale.scale) < HIGH
    finally:
        two.close()


@pytest.mark.parametrize(
    "tables",
    [
        {"rl": {"algorithm": "grpo"}},
        {"worker": {"sharding": "full"}},
        {"worker": {"fused_loss": True}},
    ],
    ids=["rl", "sharding", "fused"],
)
def test_what_scales_no_losses_is_refused(tables: dict[str, Any]) -> None:
    worker = {"autocast": "fp16", **tables.get("worker", {})}
    job = Job.model_validate({**tables, "worker": worker})
    assert any(one.first == 'worker.autocast = "fp16"' for one in conflicts(job))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_16_bits_are_refused(dtype: str) -> None:
    unused: Any = None
    network: Any = torch.nn.Linear(2, 2, dtype=getattr(torch, dtype))
    with pytest.raises(ConfigError, match=f"CFG011.*{dtype}"):
        check_scaled_loss(Case(Job.model_validate(FP16), unused, network, unused, unused))
