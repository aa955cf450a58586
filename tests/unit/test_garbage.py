"""Libraries are loaded without a search for garbage, which goes on afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from hypha_ray.garbage import uncollected


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    gc.unfreeze()


class Ring:
    """Garbage that only a search finds."""

    def __init__(self) -> None:
        self.self = self


def test_nothing_is_searched_within_and_what_was_made_there_never() -> None:
    with uncollected():
        assert not gc.isenabled()
        kept = [Ring() for _ in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= len(kept)
    assert not any(isinstance(one, Ring) for one in gc.get_objects())


def test_garbage_made_afterwards_is_found() -> None:
    with uncollected():
        pass
    Ring()
    assert gc.collect() > 0


def test_one_within_another_one_leaves_it_to_that() -> None:
    before = gc.get_freeze_count()
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled() and gc.get_freeze_count() == before
    assert gc.isenabled() and gc.get_freeze_count() > before


def test_search_goes_on_after_an_error() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()
