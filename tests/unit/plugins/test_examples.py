"""The examples of docs/plugins.md, as they stand on the page, against values computed by hand."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hypha_ray.codec import codec, encoder
from hypha_ray.config import Job
from hypha_ray.config.checks import plugin_uses
from hypha_ray.config.load import from_tables
from hypha_ray.config.training import InnerOptimizer, OuterOptimizer
from hypha_ray.driver.preflight.checks import check_job, check_plugins
from hypha_ray.errors import ConfigError
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.optim.schedules import build_schedule
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, initial_momentum, is_whole, reduce
from hypha_ray.types import Entry, Flat, Layout
from tests.support.plugins import write_examples

GROUP = "parameters/float32"
LAYOUT = Layout((Entry("w", "float32", (4,), 0, GROUP, 0, 4),))
MODULES = ("signs", "heavy_ball", "signed_mean", "root", "lion", "steps", "lines")


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield write_examples(tmp_path)
    for name in MODULES:
        sys.modules.pop(name, None)


def weights(*values: float) -> Flat:
    return {GROUP: np.array(values, np.float32)}


def spec_of(job: Job, **more: object) -> ReduceSpec:
    return ReduceSpec(LAYOUT, 0, job.outer_optimizer, job.sync, **more)  # type: ignore[arg-type]


@pytest.mark.usefixtures("pieces")
def test_each_piece_of_a_job_file_passes_the_checks_before_a_start(pieces: list[str]) -> None:
    found = []
    for piece in pieces:
        job = from_tables(tomllib.loads(piece))
        check_job(job)
        check_plugins(job)
        found += [use.family for use in plugin_uses(job)]
    assert sorted(found) == sorted(
        ("codecs", "outer_optimizers", "merge_rules", "weightings", "inner_optimizers", "schedules", "sinks")
    )


@pytest.mark.usefixtures("pieces")
def test_outer_optimizer_takes_its_own_steps_and_keeps_its_state() -> None:
    outer = OuterOptimizer(name="heavy_ball:HeavyBall", learning_rate=0.5, name_options={"momentum": 0.5})
    spec = ReduceSpec(LAYOUT, 0, outer)
    theta, state = weights(1, 2, 3, 4), initial_momentum(LAYOUT, 0, outer.name)
    assert list(state) == [f"velocity/{GROUP}"]
    for _ in range(2):
        received = [Received(worker, 0, 1, {GROUP: theta[GROUP] + worker}) for worker in (1, 3)]
        theta, state, verdict = reduce(0, theta, state, received, spec)
        assert len(verdict.accepted) == 2 and is_whole(state, spec)
    # The mean delta is 2 each time: v = 2, then 0.5 · 2 + 2 = 3; θ grows by 1, then by 1.5.
    assert theta[GROUP].tolist() == [3.5, 4.5, 5.5, 6.5] and state[f"velocity/{GROUP}"].tolist() == [3.0] * 4


@pytest.mark.usefixtures("pieces")
def test_merge_rule_gets_deltas_and_weights() -> None:
    job = from_tables({"sync": {"merge": "signed_mean:agreeing"}, "outer_optimizer": {"name": "average"}})
    theta = weights(10, 10, 10, 10)
    rows = ((1, [1.0, 1, -1, 0]), (2, [4.0, -2, -4, 0]), (1, [-9.0, 3, -3, 0]))
    received = [
        Received(worker, 0, count, {GROUP: theta[GROUP] + np.array(row, np.float32)})
        for worker, (count, row) in enumerate(rows)
    ]
    new, _, _ = reduce(0, theta, {}, received, spec_of(job))
    # (1·1 + 2·4)/3; (1·1 + 1·3)/2; all three: (−1 − 8 − 3)/4; none.
    assert new[GROUP].tolist() == pytest.approx([13.0, 12.0, 7.0, 10.0])


@pytest.mark.usefixtures("pieces")
def test_weighting_gives_the_weights_of_the_mean() -> None:
    job = from_tables({"sync": {"weighting": "root:of_samples"}, "outer_optimizer": {"name": "average"}})
    received = [Received(0, 0, 1, weights(0, 0, 0, 0)), Received(1, 0, 9, weights(4, 8, 0, -4))]
    new, _, verdict = reduce(0, weights(0, 0, 0, 0), {}, received, spec_of(job))
    assert new[GROUP].tolist() == pytest.approx([3.0, 6.0, 0.0, -3.0])  # weights 1 and 3
    assert [contribution.samples for contribution in verdict.accepted] == [1, 9]


@pytest.mark.usefixtures("pieces")
def test_codec_makes_up_for_its_errors_and_is_read_by_the_server() -> None:
    size = 100
    layout = Layout((Entry("w", "float32", (size,), 0, GROUP, 0, size),))
    theta = {GROUP: np.zeros(size, np.float32)}
    trained = {GROUP: np.linspace(-1, 1, size, dtype=np.float32)}
    sender, sent = encoder("signs:Signs", 1.0), np.zeros(size, np.float32)
    for _ in range(2):
        payload, _ = sender.encode(trained, theta)
        spec = ReduceSpec(layout, 0, OuterOptimizer(name="average"), codec=codec("signs:Signs"))
        new, _, verdict = reduce(0, theta, {}, [Received(0, 0, 1, payload)], spec)
        assert verdict.rejected == ()
        sent += new[GROUP]
    mean = np.abs(trained[GROUP][:64]).mean()
    first = np.sign(trained[GROUP][0]) * mean
    assert sum(array.nbytes for array in payload.values()) == 2 * 64 + 2 * 4
    assert np.allclose(sent + sender.residual[GROUP], 2 * trained[GROUP], atol=1e-5)
    assert np.isclose(encoder("signs:Signs", 0.0).encode(trained, theta)[1].decoded, (mean**2) * 64, rtol=0.5)
    assert np.isfinite(first)


@pytest.mark.usefixtures("pieces")
def test_inner_optimizer_has_the_settings_of_the_job_file() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    config = InnerOptimizer(
        name="lion:Lion", learning_rate=0.1, weight_decay=0.5, clip_norm=None, name_options={"fresh": 0.3}
    )
    inner = build_optimizer(model, config)
    assert inner.optimizers[0].param_groups[0]["fresh"] == 0.3
    model.weight.grad = torch.tensor([[2.0, -3.0]])
    inner.step()
    assert model.weight.tolist() == [pytest.approx([0.85, 1.05])]  # 1 − 0.1 · 0.5, ∓ 0.1


@pytest.mark.usefixtures("pieces")
def test_schedule_sets_the_rates_of_the_steps() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=8.0)
    config = InnerOptimizer(
        schedule="steps:Halving", warmup_steps=2, total_steps=8, schedule_options={"times": 2}, min_lr_rate=0.0
    )
    schedule = build_schedule(optimizer, config)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == [0.0, 4.0, 8.0, 8.0, 4.0, 4.0, 4.0, 4.0, 2.0, 2.0]


CODEC = """
import torch
from hypha_ray.codec.formats.chunked import Chunked

class X(Chunked):
    name = "X"
    chunk = 64
    arrays = {{"signs": ("int8", 64), "sizes": ("float32", 1)}}

    def compress(self, v):
        return {{"signs": v.sign().to(torch.int8), "sizes": v.abs().mean(1, keepdim=True){sizes}}}

    def expand(self, p):
        return p["signs"] * p["sizes"]{scale}
"""
STEP = "class X:\n    slots = {slots}\n    def step(self, t, d, s, r, n): return {theta}, s"


@pytest.mark.parametrize(
    ("key", "module", "text"),
    [
        ("sync.codec", "from hypha_ray.codec.formats.chunked import Chunked as X", r"PLG002.*without chunk"),
        ("sync.codec", "class X: pass", r"PLG002.*without the method compress"),
        ("sync.codec", CODEC.format(sizes="/ v.abs().amax(1, keepdim=True)", scale=""), r"PLG003.*chunk of zeros"),
        ("sync.codec", CODEC.format(sizes="", scale=" / p['sizes'].sum()"), r"PLG003.*by itself than beside others"),
        ("outer_optimizer.name", "class X:\n    slots = ()\n    def step(self, a): pass", r"PLG002.*with 5 arguments"),
        ("outer_optimizer.name", STEP.format(slots="'ab'", theta="t"), r"PLG003.*slots are 'ab', not different names"),
        ("outer_optimizer.name", STEP.format(slots="('a', 'a')", theta="t"), r"PLG003.*slots are \('a', 'a'\)"),
        ("outer_optimizer.name", STEP.format(slots="(1,)", theta="t"), r"PLG003.*slots are \(1,\)"),
        ("outer_optimizer.name", STEP.format(slots="('a',)", theta="t * 1j"), r"PLG003.*complex numbers"),
        (
            "outer_optimizer.name",
            "class X:\n    slots = ()\n    def step(self, t, d, s, r, n): return t + d.mean(), s",
            r"PLG003.*depends on other elements",
        ),
        ("outer_optimizer.name", "class X:\n    slots = ()\n    def step(self, t, d, s, r, n): return t", r"PLG003"),
        ("sync.merge", "def X(deltas): pass", r"PLG002.*2 arguments"),
        ("sync.merge", "def X(deltas, weights): return deltas[1]", r"PLG003.*IndexError"),
        ("sync.merge", "def X(deltas, weights): return deltas[0] * float('nan')", r"PLG003.*finite"),
        ("sync.merge", "def X(deltas, weights): return deltas[0] * 1j", r"PLG003.*complex numbers"),
        ("sync.merge", "def X(deltas, weights): return None", r"PLG003.*gave NoneType, not a tensor"),
        ("sync.weighting", "def X(samples): return [1e308 for _ in samples]", r"PLG003.*no weights from 0"),
        ("sync.weighting", "def X(samples): return [-1.0 for _ in samples]", r"PLG003.*no weights from 0"),
        ("inner_optimizer.name", "class X:\n    pass", r"PLG002.*without the method step"),
        ("inner_optimizer.schedule", "def X(step, total, warmup): return -1.0", r"PLG003.*factor -1.0 at step 0"),
        ("inner_optimizer.schedule", "def X(step): return 1.0", r"PLG002.*3 arguments"),
    ],
)
def test_member_that_breaks_its_familys_contract_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, module: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "breaks_its_contract", raising=False)
    (tmp_path / "breaks_its_contract.py").write_text(module, encoding="utf-8")
    table, name = key.split(".")
    job = from_tables({table: {name: "breaks_its_contract:X"}})
    with pytest.raises(ConfigError, match=text):
        check_plugins(job)
    sys.modules.pop("breaks_its_contract")
