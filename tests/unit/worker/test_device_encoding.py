"""Payloads that are made where the model is, against those of the host, over rounds of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.codec import Encoder, encoder
from hypha_ray.config.load import load
from hypha_ray.model.layout import LiveGroup, gather, layout_of, scatter
from hypha_ray.optim.step import WholeModel
from hypha_ray.types import Flat
from hypha_ray.worker.device_encoding import DeviceEncoding, device_encoding

FRAGMENTS = 2
PLENTY = 1 << 40


class Trainer(WholeModel):
    """A model with normalization, in memory that stands for a GPU's."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 17)
        self.model = torch.nn.Sequential(*layers)
        self.device = torch.device(device)

    @torch.no_grad()
    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=1e-3)


@dataclass
class Pair:
    """A worker's encodings on both sides, and what both go on from."""

    trainer: Any
    device: DeviceEncoding
    beside: list[Encoder]
    host: list[Encoder]


def pair(codec: str, decay: float, free_bytes: int = PLENTY) -> Pair:
    trainer = Trainer()
    layout = layout_of(trainer.model, FRAGMENTS)
    beside, host = ([encoder(codec, decay) for _ in range(FRAGMENTS)] for _ in range(2))
    made: Any = trainer
    return Pair(trainer, DeviceEncoding(made, layout, beside, codec, decay, lambda: free_bytes), beside, host)


def hand_over(both: Pair, fragment: int, theta: Flat) -> bool:
    """Compare a fragment's payloads; return whether the device has made one."""
    layout = layout_of(both.trainer.model, FRAGMENTS)
    expected, quality = both.host[fragment].encode(gather(both.trainer.model, layout, fragment), theta)
    made = both.device.payload(fragment)
    on_device = made is not None
    payload, own = made or both.beside[fragment].encode(gather(both.trainer.model, layout, fragment), theta)
    assert payload.keys() == expected.keys()
    for name, array in expected.items():
        assert payload[name].dtype == array.dtype and np.array_equal(payload[name], array), name
    assert own.error == pytest.approx(quality.error, rel=1e-4)
    return on_device


@pytest.mark.parametrize("mixing", [0.0, 0.5])
@pytest.mark.parametrize(("codec", "decay"), [("int8", 1.0), ("bf16", 0.0), ("int4", 0.9), ("e3m0", 1.0)])
def test_rounds_are_encoded_on_the_device_from_the_second_one_on(codec: str, decay: float, mixing: float) -> None:
    both = pair(codec, decay)
    model, layout = both.trainer.model, layout_of(both.trainer.model, FRAGMENTS)
    on_device: list[bool] = []
    for number in range(4):
        fragments = {each: gather(model, layout, each) for each in range(FRAGMENTS)}
        for fragment, theta in fragments.items():
            theta["parameters/float32"] *= np.float32(0.99)
            scatter(model, layout, fragment, theta, mixing)
        both.device.take(fragments, mixed=mixing > 0)
        both.trainer.train(number)
        on_device += [hand_over(both, fragment, theta) for fragment, theta in fragments.items()]
    assert on_device == [False, False, *[True] * 6]


def test_arrays_of_results_of_the_host_are_not_kept_once_the_device_encodes() -> None:
    """Nor is memory pinned for them, as `gather` does without arrays."""
    both = pair("int8", 1.0)
    layout = layout_of(both.trainer.model, FRAGMENTS)
    results: dict[int, Flat] = {}
    assert both.device.payload(0, results) is None
    shapes = {group: array.shape for group, array in gather(both.trainer.model, layout, 0, results[0]).items()}
    assert shapes == {group: (elements,) for group, elements in layout.groups(0).items()}
    both.device.take({0: gather(both.trainer.model, layout, 0)}, mixed=False)
    assert both.device.payload(0, results) is not None and not results


def test_what_was_left_out_is_forgotten_with_a_rejected_delta() -> None:
    both = pair("int4", 1.0)
    layout = layout_of(both.trainer.model, FRAGMENTS)
    for number in range(3):
        theta = gather(both.trainer.model, layout, 0)
        both.device.take({0: theta}, mixed=False)
        both.trainer.train(number)
        if number == 2:
            both.device.forget()
            both.host[0].residual.clear()
        assert hand_over(both, 0, theta) == (number > 0)


def test_without_enough_memory_the_host_encodes() -> None:
    both = pair("int8", 1.0, free_bytes=1 << 20)
    layout = layout_of(both.trainer.model, FRAGMENTS)
    for number in range(2):
        theta = gather(both.trainer.model, layout, 0)
        both.device.take({0: theta}, mixed=False)
        both.trainer.train(number)
        assert not hand_over(both, 0, theta)


def test_memory_that_runs_out_later_leaves_the_rest_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair("int4", 1.0)
    layout = layout_of(both.trainer.model, FRAGMENTS)

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError

    for number in range(4):
        fragments = {each: gather(both.trainer.model, layout, each) for each in range(FRAGMENTS)}
        if number == 2:
            monkeypatch.setattr(DeviceEncoding, "_copy_from_model", run_out)
        both.device.take(fragments, mixed=False)
        both.trainer.train(number)
        for fragment, theta in fragments.items():
            assert hand_over(both, fragment, theta) == (number == 1)


@pytest.mark.parametrize("block", [7, 64, 5000])
def test_elements_of_a_group_are_those_of_its_flat_array(block: int) -> None:
    model = Trainer().model
    layout = layout_of(model, FRAGMENTS)
    for fragment in range(FRAGMENTS):
        flat = gather(model, layout, fragment)["parameters/float32"]
        live = LiveGroup(model, layout, fragment, "parameters/float32")
        parts = [live.block(slice(start, min(start + block, live.size))) for start in range(0, live.size, block)]
        assert torch.cat(parts).tolist() == flat.tolist()


@pytest.mark.parametrize(
    ("flags", "device", "narrow", "possible"),
    [
        (["--sync.codec=int8"], "cuda", False, True),
        (["--sync.codec=int8"], "cpu", False, False),
        (["--sync.codec=int8"], "cuda", True, False),
        (["--sync.codec=int8", "--run.mode=replay"], "cuda", False, False),
        (["--sync.codec=int8", "--sync.strategy=sync"], "cuda", False, False),
        (["--sync.codec=topk"], "cuda", False, False),
        (["--sync.codec=fp32"], "cuda", False, False),
    ],
)
def test_the_device_encodes_where_payloads_are_the_same(
    flags: list[str], device: str, narrow: bool, possible: bool
) -> None:
    job = load(["--dataset.path", "unused", "--model.repository", "unused", *flags]).job
    trainer: Any = Trainer(device)
    model = trainer.model.bfloat16() if narrow else trainer.model
    assert (device_encoding(job, trainer, layout_of(model), []) is not None) == possible
