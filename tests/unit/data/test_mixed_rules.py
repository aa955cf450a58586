"""Decisions about tokens of datasets that are mixed."""

from __future__ import annotations

import pytest

from hypha_ray.data.mixture import joined_rules
from hypha_ray.errors import DataError
from hypha_ray.types import TokenRules

TEMPLATE = "a" * 64


def test_mixed_datasets_end_at_the_ends_of_each() -> None:
    texts, chats = TokenRules((1,), (2,), 10), TokenRules((1,), (7, 2), 12, TEMPLATE)

    assert joined_rules([("texts", texts), ("chats", chats)]) == TokenRules((1,), (2, 7), 12, TEMPLATE)


def test_mixed_datasets_of_an_earlier_release_alone_have_no_rules() -> None:
    assert joined_rules([("one", None), ("other", None)]) is None


@pytest.mark.parametrize("other", [TokenRules((3,), (2,)), TokenRules((), (2,)), None])
def test_mixed_datasets_whose_texts_begin_differently_are_refused_with_a_remedy(other: TokenRules | None) -> None:
    with pytest.raises(DataError, match=r"DATA062.*'texts' and 'old'.*begin with different tokens.*prepare both again"):
        joined_rules([("texts", TokenRules((1,), (2,))), ("old", other)])


def test_mixed_chats_begin_as_their_template_writes() -> None:
    chats = TokenRules((), (7,), 12, TEMPLATE)

    assert joined_rules([("chats", chats), ("texts", TokenRules((1,), (2,)))]) == TokenRules((1,), (7, 2), 12, TEMPLATE)
