"""What the driver says of a job that can run, but will hardly do what is wanted."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.scheduler.launch import advice


@pytest.mark.parametrize(
    ("rounds", "outer", "expected"),
    [
        (20, {}, ["outer_optimizer.momentum 0.9 takes about 50 rounds to settle, and there are 20: 0.75 would do"]),
        (
            3,
            {"momentum": 0.5},
            ["outer_optimizer.momentum 0.5 takes about 10 rounds to settle, and there are 3"],
        ),
        (50, {}, []),
        (10, {"momentum": 0.5}, []),
        (1, {"momentum": 0.0}, []),
        (20, {"name": "adam"}, []),
    ],
)
def test_momentum_that_cannot_settle_is_told_with_one_that_can(
    rounds: int, outer: dict[str, Any], expected: list[str]
) -> None:
    job = Job.model_validate({"rounds": {"update_rounds": rounds}, "outer_optimizer": outer})
    assert [note[: len(text)] for note, text in zip(advice(job), expected, strict=True)] == expected
    steps = job.model_copy(update={"sync": job.sync.model_copy(update={"strategy": "sync"})})
    assert not list(advice(steps))


@pytest.mark.parametrize(("codec", "inner", "warned"), [("topk", "adamw", 1), ("topk", "sgd", 0), ("int8", "adamw", 0)])
def test_adam_on_sparse_gradients_is_warned_of(codec: str, inner: str, warned: int) -> None:
    tables = {"sync": {"strategy": "sync", "codec": codec}, "inner_optimizer": {"name": inner}}
    assert len(list(advice(Job.model_validate(tables)))) == warned
