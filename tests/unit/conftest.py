"""Options of the simulated runs in test_simulation.py."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--walks", type=int, default=None, help="simulated runs, one for each seed")
    parser.addoption("--seed", type=int, default=None, help="seed of the first simulated run; alone: of the only one")
