"""Errors of an inner loop on their way to the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.errors import ConfigError
from hypha_ray.types import Failed, Source
from hypha_ray.worker.incarnation import Incarnation


class Loop:
    """An inner loop that calls an operation of torch which has no reproducible kernel."""

    def run(self) -> None:
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)


@pytest.fixture
def reproducible() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("reproducible")
def test_operation_that_is_not_reproducible_is_refused_by_its_name() -> None:
    def loop(*_: Any) -> Loop:
        return Loop()

    (said,) = Incarnation(Job(), Source("run", 0, 1), loop).run()
    assert isinstance(said, Failed) and isinstance(said.error, ConfigError)
    assert said.error.code == "TRN005" and "put_ isn't reproducible" in said.error.what
