"""Members that users bring and that fail while a run trains: one error of the job, which names them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.codec import upward_codec
from hypha_ray.config.schema import Sync
from hypha_ray.config.training import InnerOptimizer, OuterOptimizer
from hypha_ray.errors import ConfigError, place_of, reason_of
from hypha_ray.families import FAMILIES
from hypha_ray.optim.schedules import build_schedule
from hypha_ray.plugins import attempt
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, initial_momentum, reduce
from hypha_ray.types import Entry, Flat, Layout
from tests.support.plugins import Written

GROUP = "parameters/float32"
SIZE = 200
LAYOUT = Layout((Entry("w", "float32", (SIZE,), 0, GROUP, 0, SIZE),))
MEMBERS = """
import sys
import torch
from hypha_ray.codec.formats.chunked import Chunked

def fail_if_long(array):
    if len(array) > 100:
        RAISE

class Outer:
    slots = ()
    def step(self, theta, delta, state, rate, round):
        fail_if_long(theta)
        return theta + delta, []

def merge(deltas, weights):
    fail_if_long(deltas[0])
    return torch.nn.Parameter(sum(deltas) / len(deltas))

def weigh(samples):
    fail_if_long(range(200))
    return samples

class Plain(Chunked):
    name, chunk, arrays = "plain", 1, {"values": ("float32", 1)}
    def compress(self, values):
        return {"values": values}
    def expand(self, parts):
        fail_if_long(parts["values"])
        return parts["values"]

def schedule(step, total_steps, warmup_steps):
    fail_if_long(range(100 + step))
    return 1.0
"""


def step(outer: OuterOptimizer | None = None, **settings: str) -> Flat:
    """New weights after a step on two workers' values, of which one moves by 1, the other one by 3."""
    outer, sync = outer or OuterOptimizer(name="average"), Sync.model_validate(settings)
    spec = ReduceSpec(LAYOUT, 0, outer, sync, upward_codec(sync), rounds=10)
    received = []
    for worker, value in enumerate((1.0, 3.0)):
        values = np.full(SIZE, value, np.float32)
        payload = {GROUP: values} if sync.codec == "fp32" else {f"{GROUP}/values": values}
        received.append(Received(worker, 0, 1, payload))
    zeros = {GROUP: np.zeros(SIZE, np.float32)}
    return reduce(1, zeros, initial_momentum(LAYOUT, 0, outer.name), received, spec)[0]


@pytest.mark.parametrize("raised", ["raise KeyError('odd')", "sys.exit(3)"])
@pytest.mark.parametrize(
    ("noun", "key", "member"),
    [
        ("outer optimizer", "name", "Outer"),
        ("merge rule", "merge", "merge"),
        ("weighting", "weighting", "weigh"),
        ("codec", "codec", "Plain"),
    ],
)
def test_member_that_raises_at_the_server_is_one_error_with_its_place(
    written: Written, noun: str, key: str, member: str, raised: str
) -> None:
    module = written(MEMBERS.replace("RAISE", raised))
    name = f"{module}:{member}"
    with pytest.raises(ConfigError) as caught:
        step(OuterOptimizer(name=name)) if key == "name" else step(**{key: name})
    line = str(caught.value)
    assert caught.value.code == "PLG004" and line.startswith(f"error[PLG004]: {noun} {name} fails in the run")
    assert f"({module}.py, line " in line and ("KeyError: 'odd'" in line or "SystemExit: 3" in line)


def test_member_may_give_tensors_with_a_gradient(written: Written) -> None:
    name = f"{written(MEMBERS.replace('RAISE', 'pass'))}:merge"
    assert np.array_equal(step(merge=name)[GROUP], np.full(SIZE, 2, np.float32))


def test_schedule_that_raises_at_a_later_step_is_one_error(written: Written) -> None:
    name = f"{written(MEMBERS.replace('RAISE', 'raise ZeroDivisionError'))}:schedule"
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = build_schedule(optimizer, InnerOptimizer(schedule=name), 20)
    (curve,) = schedule.lr_lambdas
    assert curve(0) == 1.0
    with pytest.raises(ConfigError, match=rf"PLG004.*schedule {name} fails in the run.*ZeroDivisionError"):
        curve(1)


def test_error_without_a_text_has_a_reason() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert reason_of(Odd()) == "Odd: its text can't be had (RuntimeError)"


def test_place_of_an_error_is_that_of_users_code() -> None:
    with pytest.raises(ConfigError) as caught:
        step(merge="not_here:merge")
    assert place_of(caught.value).startswith("(test_failing_members.py, line ")


def test_place_of_an_error_is_none_of_pythons_own_modules() -> None:
    """What is raised in one of them has the place of the code that called it."""
    with pytest.raises(ValueError) as caught:
        json.loads("no JSON")
    trace = caught.value.__traceback__
    assert trace is not None
    assert place_of(caught.value.with_traceback(trace.tb_next)) == ""
    assert place_of(caught.value.with_traceback(trace)).startswith("(test_failing_members.py, line ")


class Failing(torch.optim.SGD):
    """Steps of its own, which torch's schedules wrap."""

    def step(self, closure: Any = None) -> None:
        raise ValueError(closure)


def test_place_of_an_error_is_that_of_users_code_which_a_library_calls() -> None:
    optimizer = Failing([torch.zeros(1, requires_grad=True)], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    trace = caught.value.__traceback__
    assert trace is not None and trace.tb_next is not None
    assert "lr_scheduler.py" in trace.tb_next.tb_frame.f_code.co_filename
    assert place_of(caught.value.with_traceback(trace.tb_next)).startswith("(test_failing_members.py, line ")


TRIED = """
from __future__ import annotations
import torch
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.plugins import Options
from pydantic import field_validator

class Counting(Chunked):
    name, chunk, arrays, calls = "counting", 4, {"values": ("float32", 4)}, 0
    def compress(self, values):
        self.calls += 1
        return {"values": values * self.calls}
    def expand(self, parts):
        return parts["values"] / self.calls

class Copying(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__([torch.nn.Parameter(parameter.clone()) for parameter in params], lr)

class Computed:
    @property
    def slots(self):
        return ("velocity",)
    def step(self, theta, delta, state, rate, round):
        return theta, state

def table(step, total_steps, warmup_steps):
    return [1.0, 0.5][step * 0]

class Unknown:
    class Options(Options):
        times: Nowhere = 3
    def __call__(self, samples):
        return samples

class Raising(Unknown):
    class Options(Options):
        times: int = 3
        @field_validator("times")
        @classmethod
        def lookup(cls, times):
            return {3: 3}[times]

class Bounded(Unknown):
    class Options(Options):
        times: int = 3
        @field_validator("times")
        @classmethod
        def check_it(cls, times):
            raise ValueError("up to 5 times")
"""


@pytest.mark.parametrize(
    ("family", "member", "options", "text"),
    [
        ("codecs", "Counting", None, "PLG003.*finite values are decoded to some that aren't"),
        ("inner_optimizers", "Copying", None, "PLG003.*other parameters than those of the model"),
        ("outer_optimizers", "Computed", None, "PLG003.*'property' object is not iterable"),
        ("schedules", "table", None, "PLG003.*list indices must be integers"),
        ("weightings", "Unknown", None, r"PLG002.*the Options of weighting \S+:Unknown fail.*Nowhere"),
        ("weightings", "Raising", {"times": 4}, r"PLG002.*the Options of weighting \S+:Raising fail.*KeyError: 4"),
        ("weightings", "Bounded", {"times": 9}, r"CFG003.*times is out of range — got 9, allowed up to 5 times\."),
    ],
)
def test_member_that_a_run_could_not_use_is_refused_before_it(
    written: Written, family: str, member: str, options: dict[str, int] | None, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        attempt(FAMILIES[family].key, family, f"{written(TRIED)}:{member}", options, None)
