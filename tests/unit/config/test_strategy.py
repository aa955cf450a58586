"""Every strategy that a job file may name has its properties in one table, and nothing else asks for its name."""

import re
from pathlib import Path
from typing import get_args

from hypha_ray.config.schema import STRATEGIES, StrategyName

PACKAGE = Path(__file__).parents[3] / "hypha_ray"


def test_strategies_table_has_every_name():
    assert set(STRATEGIES) == set(get_args(StrategyName))


def test_strategies_no_two_have_the_same_properties():
    assert len(set(STRATEGIES.values())) == len(STRATEGIES)


def test_package_compares_no_strategy_by_its_name():
    comparison = re.compile(r"(?<!resources\.)strategy\s*(==|!=|in)\s*[\"'(\[{]|[\"']\s*(==|!=)\s*\S*strategy\b")
    assert [path for path in PACKAGE.rglob("*.py") if comparison.search(path.read_text())] == []
