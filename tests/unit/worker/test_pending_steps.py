"""A device whose figures come late: the same weights and words as one that is waited for in each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import masking_utils

from hypha_ray.config import Job
from hypha_ray.errors import ConfigError
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.types import Damaged, Delta, Report
from hypha_ray.worker.incarnation import epoch_order
from hypha_ray.worker.loop import MAX_PENDING_STEPS
from hypha_ray.worker.supervised import SupervisedTrainer
from tests.support import truth_samples
from tests.support.jobs import MODEL
from tests.support.slow_device import use_slow_device, use_unreadable_device
from tests.support.small_models import VIT
from tests.support.truth_cases import ACCEPTED, Case
from tests.support.truth_samples import text, tokens
from tests.support.worker_bench import Bench, plan_of
from tests.unit.worker.test_damage import BAD, RESNET, bench_of, places
from tests.unit.worker.test_processes import model_of, samples_of

LLAMA = MODEL | {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
ADAMW = {"learning_rate": 1e-2, "clip_norm": 0.5}
MUON = {"name": "muon", "learning_rate": 1e-2}


def facts(bench: Bench) -> tuple[Any, ...]:
    """All of a round that doesn't depend on clocks."""
    delta = bench.of(Delta)[0]
    counts = delta.samples, delta.scored, delta.batches, delta.tokens, delta.loss
    reports = bench.of(Report)
    sums = sum(one.batches for one in reports), sum(one.samples for one in reports), reports[-1].gradient_norm
    return counts, sums, [(event.round, event.samples, event.whole) for event in bench.of(Damaged)]


@pytest.mark.slow
@pytest.mark.parametrize("inner", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("config", [VIT, RESNET], ids=["vit", "resnet"])
@pytest.mark.parametrize("damaged", [(), (0, 13, 30, 31)], ids=["clean", "damaged"])
def test_late_figures_change_no_bit_and_no_word(
    monkeypatch: pytest.MonkeyPatch, damaged: tuple[int, ...], config: dict[str, Any], inner: dict[str, Any]
) -> None:
    at_once = bench_of(config, np.nan, damaged, inner_optimizer=inner).run(plan_of(40, batch=4))
    device = use_slow_device(monkeypatch)
    late = bench_of(config, np.nan, damaged, inner_optimizer=inner).run(plan_of(40, batch=4))
    assert device.begun == 10 and facts(late) == facts(at_once)
    assert len(late.of(Damaged)) == len({place // 4 for place in damaged})
    ours, theirs = late.of(dict)[0], at_once.of(dict)[0]
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_damage_is_told_a_bounded_number_of_steps_later(monkeypatch: pytest.MonkeyPatch) -> None:
    device, told = use_slow_device(monkeypatch), list[int]()
    bench = bench_of(VIT, np.nan, (4,), inner_optimizer=ADAMW)
    bench.on_event = lambda event: told.append(device.begun) if isinstance(event, Damaged) else None
    bench.run(plan_of(40, batch=4))
    assert told == [2 + MAX_PENDING_STEPS]


def test_others_of_a_damaged_batch_are_trained_on_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    use_slow_device(monkeypatch)
    bench = bench_of(RESNET, np.nan, inner_optimizer=ADAMW, dataset={"allow_quarantine": True})
    bench.run(plan_of(24))
    (event,), delta = bench.of(Damaged), bench.of(Delta)[0]
    assert (event.samples, event.whole) == (((0, epoch_order(0, 0, 0, 64)[BAD]),), False)
    assert (delta.samples, delta.scored) == (24, 23)
    model, rows = build_model(bench.job.model, 0).train(), epoch_order(0, 0, 0, 64)
    optimizer = build_optimizer(model, bench.job.inner_optimizer, 3)
    for chosen in (places(0), places(16), places(8, BAD)):
        pixels, labels = (torch.from_numpy(bench.slice[name][rows[chosen]]) for name in ("images", "labels"))
        optimizer.zero_grad()
        model(pixel_values=pixels, labels=labels).loss.backward()
        optimizer.step()
    wanted, found = gather(model, layout_of(model), 0), bench.of(dict)[0]
    assert all(np.abs(found[group] - wanted[group]).max() < 1e-6 for group in wanted)


def test_late_step_on_the_others_has_the_rate_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of the damaged batch, the only one to be trained on, isn't that of the batches after it."""
    use_slow_device(monkeypatch)
    inner = {**ADAMW, "weight_decay": 0.0, "schedule": "linear", "total_steps": 3}
    everything = tuple(place for place in range(24) if place not in (9, 10))
    tables = {"rounds": {"samples_between_updates": 24, "max_batch_size": 8}, "dataset": {"allow_quarantine": True}}
    bench = bench_of(VIT, np.nan, everything, inner_optimizer=inner, **tables).run(plan_of(24))
    assert bench.of(Delta)[0].scored == 2
    step = np.abs(bench.weights - bench.theta["parameters/float32"]).max()
    assert step == pytest.approx(1e-2 * 2 / 3, rel=1e-3)


def test_many_damaged_batches_in_a_row_end_the_run_though_figures_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    use_slow_device(monkeypatch)
    with pytest.raises(ConfigError, match=r"TRN002.*10 batches in a row.*sample \d+ of slice 0"):
        bench_of(VIT, np.nan, tuple(range(20)), inner_optimizer=ADAMW).run(plan_of(40, batch=2))


@pytest.mark.parametrize(
    "tables",
    [{"run": {"mode": "replay"}}, {"inner_optimizer": {"k_aware": True}}, {"inner_optimizer": {"name": "adafactor"}}],
    ids=["replay", "k-aware", "adafactor"],
)
def test_figures_are_waited_for_if_a_step_cannot_be_left_out_on_the_device(
    monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any]
) -> None:
    device = use_slow_device(monkeypatch)
    assert Bench(**tables).run(plan_of(8)).of(Delta)[0].batches == 1 and device.begun == 0


@pytest.mark.parametrize("padded", [False, True])
def test_mask_of_the_host_changes_no_bit(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Bench:
        bench = Bench(model={"config": LLAMA})
        bench.slice["attention_mask"][::3, 11:] = 0 if padded else 1
        return bench.run(plan_of(24))

    before = dict(vars(masking_utils))
    at_once = run()
    use_slow_device(monkeypatch)
    late = run()
    assert np.array_equal(late.weights, at_once.weights)
    assert dict(vars(masking_utils)) == before


TWO_LAYERS = truth_samples.LLAMA | {"num_hidden_layers": 2}
JAMBA = TWO_LAYERS | {"num_experts": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}
JAMBA |= {"attn_layer_offset": 0, "attn_layer_period": 2}
LFM2 = TWO_LAYERS | {"layer_types": ["conv", "full_attention"]}
FULL = text(attention_mask=np.ones_like(text()["attention_mask"]))
ASKING = {
    ("causal-lm", "llama"),
    ("masked-lm", "bert"),
    ("sequence-classification", "bert"),
    ("seq2seq-lm", "t5"),
    ("seq2seq-lm", "bart"),
    ("seq2seq-lm", "marian"),
    ("speech-seq2seq", "whisper"),
}
"""Tasks and models that look for padding in each forward pass."""
OTHERS = [
    Case("causal-lm", "jamba", JAMBA, text()),
    Case("causal-lm", "jamba", JAMBA, FULL),
    Case("causal-lm", "lfm2", LFM2, text()),
    Case("causal-lm", "lfm2", LFM2, FULL),
    Case("causal-lm", "llama", TWO_LAYERS, tokens()),
]
"""Models with layers of recurrence, on batches with and without padding, and a batch without a mask."""
CASES = [case for case in ACCEPTED if (case.task, case.model_type) in ASKING] + OTHERS


def trainer_of(case: Case) -> SupervisedTrainer:
    torch.manual_seed(0)
    return SupervisedTrainer(Job.model_validate({"model": model_of(case), "inner_optimizer": ADAMW}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_is_begun_without_a_look_at_the_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    use_unreadable_device(monkeypatch)
    assert not trainer_of(case).begin_step(samples_of(case)).ready


@pytest.mark.parametrize("case", [case for case in CASES if case.task != "masked-lm"], ids=str)
def test_answers_of_the_host_change_no_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = trainer_of(case)
    use_slow_device(monkeypatch)
    late = trainer_of(case)
    for trainer in (at_once, late):
        trainer.seed(0)
        trainer.begin_step(samples_of(case)).result()
    assert at_once._known_masks is None and late._known_masks is not None
    assert all(map(torch.equal, at_once.tensors, late.tensors))
