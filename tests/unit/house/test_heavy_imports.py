"""Libraries are loaded without a search for garbage, which goes on afterwards."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from hypha_ray.files import uncollected


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    gc.unfreeze()


class Ring:
    """Garbage that only a search finds."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Loads one."""
    (tmp_path / "large_library.py").write_text("made = [[n] for n in range(1000)]")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "large_library", raising=False)
    return lambda: import_module("large_library").made


def test_nothing_is_searched_within_and_what_is_made_there_never(library: Callable[[], object]) -> None:
    with uncollected():
        assert not gc.isenabled()
        made = library()
    assert gc.isenabled() and gc.get_freeze_count() >= 1000
    assert not any(one is made for one in gc.get_objects())


def test_garbage_is_found_afterwards_and_where_nothing_was_loaded(library: Callable[[], object]) -> None:
    with uncollected():
        library()
    count = gc.get_freeze_count()
    with uncollected():
        ring = weakref.ref(Ring())
    assert gc.get_freeze_count() == count
    gc.collect()
    assert ring() is None


def test_one_within_another_one_leaves_it_to_that(library: Callable[[], object]) -> None:
    before = gc.get_freeze_count()
    with uncollected():
        with uncollected():
            library()
        assert not gc.isenabled() and gc.get_freeze_count() == before
    assert gc.isenabled() and gc.get_freeze_count() > before


def test_search_goes_on_after_an_error() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()
