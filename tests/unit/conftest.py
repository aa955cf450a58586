"""Options of the simulated runs in test_simulation.py, and what tests of server and workers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hypha_ray.kernels import LEAST


@pytest.fixture(scope="class")
def compiled_steps() -> Iterator[None]:
    """Outer steps are what numba compiles however small the arrays are, wherever they can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LEAST, "outer", 1)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are made in the same order in all threads."""
    import torch  # Most tests here do without.

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--walks", type=int, default=None, help="simulated runs, one for each seed")
    parser.addoption("--seed", type=int, default=None, help="seed of the first simulated run; alone: of the only one")
    parser.addoption("--rounds", type=int, default=None, help="rounds of the run in test_long_run.py")
