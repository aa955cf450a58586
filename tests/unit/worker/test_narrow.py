"""Weights and gradients of 16 bits: what rounding does is nothing that was learned, and overflows are no damage."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.codec import upward_codec
from hypha_ray.config import Job
from hypha_ray.config.conflicts import conflicts
from hypha_ray.config.schema import Sync
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.driver.preflight.compatibility import Case, check_scaled_loss
from hypha_ray.errors import ConfigError
from hypha_ray.optim import torch_extras as module
from hypha_ray.optim.torch_extras import LossScale
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, initial_momentum, reduce
from hypha_ray.types import Damaged, Delta, Flat, FragmentUpdate, Plan, Samples, Span
from hypha_ray.worker.group.actor import GroupTrainer
from hypha_ray.worker.supervised import SupervisedTrainer
from hypha_ray.worker.trainer import export_inner_state, import_inner_state
from tests.support.followers import Forks
from tests.support.slow_device import use_slow_device
from tests.support.small_models import VIT
from tests.support.worker_bench import CONFIG, Bench, plan_of
from tests.unit.worker.test_damage import bench_of

GROUP = "parameters/float32"
STILL = {"learning_rate": 1e-12, "weight_decay": 0.0}
"""A rate by which no weight of 16 bits moves."""
FP16 = {"worker": {"autocast": "fp16", "device": "cpu"}}
HIGH = 2.0**26
"""Scale at which gradients of the tiny model overflow."""


def narrow_bench(dtype: str, **tables: Any) -> Bench:
    """A worker whose global weights lie between those of 16 bits, as they do after any outer step."""
    bench = Bench(model={"config": {**CONFIG, "dtype": dtype}}, **tables)
    for theta in bench.thetas:
        noise = np.random.default_rng(0).uniform(-(2**-9), 2**-9, theta[GROUP].size)
        there = np.where(np.abs(theta[GROUP]) < 1e-4, 0.01, theta[GROUP])  # A zero would move by any step.
        theta[GROUP] = (there * (1 + noise)).astype(np.float32)
    bench.theta = bench.thetas[0]
    assert not np.array_equal(rounded(bench.theta[GROUP], dtype), bench.theta[GROUP])
    return bench


def rounded(weights: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(weights).to(getattr(torch, dtype)).float().numpy()


def step(bench: Bench, payload: Flat) -> tuple[Flat, float]:
    """The server's step of one payload: new weights, and the norm of the delta."""
    rules = ReduceSpec(bench.layout, 0, OuterOptimizer(), bench.job.sync, upward_codec(bench.job.sync))
    new, _, verdict = reduce(0, bench.theta, initial_momentum(bench.layout, 0), [Received(0, 1, 8, payload)], rules)
    return new, verdict.accepted[0].norm


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "topk", "visible"])
@pytest.mark.parametrize("strategy", ["diloco", "async"])
def test_nothing_learned_is_no_delta_at_all(dtype: str, codec: str, strategy: str) -> None:
    bench = narrow_bench(dtype, inner_optimizer=STILL, sync={"codec": codec, "strategy": strategy}).run(plan_of(16))
    new, norm = step(bench, bench.of(dict)[0])
    assert norm == 0.0
    assert np.array_equal(new[GROUP], bench.theta[GROUP])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_delta_is_what_the_weights_of_the_model_have_moved_by(dtype: str) -> None:
    bench = narrow_bench(dtype).run(plan_of(16))
    moved = bench.weights - bench.theta[GROUP]
    plain = Bench(model={"config": {**CONFIG, "dtype": dtype}})
    plain.thetas = [{**theta, GROUP: rounded(theta[GROUP], dtype)} for theta in bench.thetas]
    plain.theta = plain.thetas[0]
    plain.run(plan_of(16))
    expected = plain.weights - plain.theta[GROUP]
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(moved, expected, atol=1e-6)


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_nothing_learned_is_no_delta_after_results_were_mixed_in(mixing: float) -> None:
    bench = narrow_bench("bfloat16", inner_optimizer=STILL, sync={"mixing": mixing})
    bench.parts = 2

    def answer(event: Any) -> None:
        if isinstance(event, Delta) and event.round == 0:
            bench.inbox.assign(plan_of(16, number=1))
            bench.inbox.merge(FragmentUpdate(1, 0, whole=False), bench.theta)

    bench.on_event = answer
    bench.run(plan_of(16))
    first, second = bench.of(dict)
    assert np.array_equal(first[GROUP], bench.theta[GROUP])
    np.testing.assert_allclose(second[GROUP], bench.theta[GROUP], rtol=1e-6)


def test_weights_of_32_bits_are_handed_over_as_they_are() -> None:
    bench = Bench(sync=Sync().model_dump(include={"codec"})).run(plan_of(16))
    assert not np.array_equal(bench.weights, bench.theta[GROUP])
    assert np.array_equal(Bench().run(plan_of(16)).weights, bench.weights)


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


def test_fused_loss_is_scaled_as_that_of_logits(high: None) -> None:
    tables: dict[str, Any] = {"model": {"config": CONFIG}, "inner_optimizer": {"learning_rate": 1e-2}}
    fused_worker = {"worker": {**FP16["worker"], "fused_loss": True}}
    plain, fused = (SupervisedTrainer(Job.model_validate({**tables, **worker})) for worker in (FP16, fused_worker))
    scales = []
    for batch in batches(10):
        expected, found = plain.step(batch), fused.step(batch)
        assert found.scored == expected.scored
        if found.scored:
            assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-3)
            assert float(found.norm) == pytest.approx(float(expected.norm), rel=2e-2)
        assert plain.loss_scale is not None and fused.loss_scale is not None
        scales.append(float(fused.loss_scale.scale))
        assert scales[-1] == float(plain.loss_scale.scale)
    assert scales[-1] < HIGH and expected.scored


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


def test_gradients_of_other_model_workers_are_refused_as_they_are_not_scaled() -> None:
    rl = {"algorithm": "grpo", "model_workers": 2, "data_parallel": True}
    job = Job.model_validate({"rl": rl, "worker": {"autocast": "fp16"}})
    assert any(one.first == 'worker.autocast = "fp16"' for one in conflicts(job))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_16_bits_are_refused(dtype: str) -> None:
    unused: Any = None
    network: Any = torch.nn.Linear(2, 2, dtype=getattr(torch, dtype))
    with pytest.raises(ConfigError, match=f"CFG011.*{dtype}"):
        check_scaled_loss(Case(Job.model_validate(FP16), unused, network, unused, unused))
