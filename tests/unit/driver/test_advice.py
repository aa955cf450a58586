"""What the driver says of a job that can run, but will hardly do what is wanted."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.driver.preflight.checks import advice


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


@pytest.mark.parametrize(
    ("rounds", "sync", "told"),
    [
        ({"update_rounds": 60}, {"fragments": 4}, "and each of 4 fragments has 15: 0.66 would do"),
        ({"update_rounds": 200}, {"fragments": 4}, None),
        ({"update_rounds": 60}, {"fragments": 4, "stagger": False}, None),
        ({"update_rounds": 30}, {"strategy": "async"}, "and there are 30: 0.83 would do"),
        ({"update_rounds": 30}, {"strategy": "async", "delayed_nesterov": False}, None),
        ({"update_rounds": 60, "warmup_rounds": 20}, {}, "and there are 40: 0.87 would do"),
        ({"update_rounds": 60, "warmup_rounds": 60}, {}, None),
    ],
)
def test_momentum_is_held_against_the_steps_that_it_has(
    rounds: dict[str, Any], sync: dict[str, Any], told: str | None
) -> None:
    notes = list(advice(Job.model_validate({"rounds": rounds, "sync": sync})))
    assert len(notes) == (told is not None) and all(str(told) in note for note in notes)


@pytest.mark.parametrize(
    ("sync", "told"),
    [
        ({"delay_steps": 8}, "results come 8 batches late, and are exchanged every 8 or so"),
        ({"delay_steps": 4}, None),
        ({"delay_steps": 8, "mixing": 0.5}, None),
        ({"delay_steps": 8, "fragments": 2}, None),
        (
            {"delay_steps": 8, "fragments": 2, "in_flight": 2},
            "results come 16 batches late, and are exchanged every 16",
        ),
        ({"delay_steps": 8, "fragments": 2, "stagger": False}, "results come 8 batches late"),
    ],
)
def test_delay_that_leaves_little_of_a_round_is_told(sync: dict[str, Any], told: str | None) -> None:
    rounds = {"update_rounds": 500, "samples_between_updates": 64, "max_batch_size": 4}
    notes = list(advice(Job.model_validate({"rounds": rounds, "sync": sync, "resources": {"num_workers": 2}})))
    assert len(notes) == (told is not None) and all(str(told) in note for note in notes)


@pytest.mark.parametrize(("codec", "inner", "warned"), [("topk", "adamw", 1), ("topk", "sgd", 0), ("int8", "adamw", 0)])
def test_adam_on_sparse_gradients_is_warned_of(codec: str, inner: str, warned: int) -> None:
    tables = {"sync": {"strategy": "sync", "codec": codec}, "inner_optimizer": {"name": inner}}
    assert len(list(advice(Job.model_validate(tables)))) == warned


def test_gpus_that_no_worker_leases_are_told() -> None:
    job = Job.model_validate({"outer_optimizer": {"momentum": 0.0}})
    assert [note for note in advice(job, gpus=2) if "none leases a GPU, and there are 2" in note]
    for settings in ({"resources": {"worker": {"gpu": 1}}}, {"worker": {"device": "cpu"}}):
        assert not list(advice(Job.model_validate({"outer_optimizer": {"momentum": 0.0}} | settings), gpus=2))
    assert not list(advice(job))
