"""The page of the Python interface is made from its docstrings."""

from __future__ import annotations

import hypha_ray
from tests.support.api_page import PAGE, renewed


def test_page_of_the_interface_is_that_of_its_docstrings() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert renewed(text) == text, "run: python -m tests.support.api_page"
    for name in set(hypha_ray.__all__) - {"__version__"}:
        assert f"\n## {name}\n" in text
    assert "### Run.frame" in text and "### Training.result" in text
