"""The tests of poisoned deltas find every defect that is planted."""

from __future__ import annotations

import pytest
import test_server_poison as poison
from mutants_server import MUTANTS, planted


def checks() -> list[tuple[str, object]]:
    """Every test of poisoned deltas with its arguments."""
    rules = list(poison.RULES)
    unusable = poison.test_unusable_delta_is_as_absent_to_the_bit
    huge = poison.test_huge_delta_is_rejected_by_its_norm_and_as_absent_to_the_bit
    sign = poison.test_delta_of_the_wrong_sign_is_borne_by_the_robust_rules_alone
    middle = poison.test_median_is_what_numpy_makes_of_it_and_what_is_left_of_two
    return [
        *((f"{kind}/{rule}", lambda k=kind, r=rule: unusable(k, r)) for kind in ("nan", "shape") for rule in rules),
        *((rule, lambda r=rule: huge(r)) for rule in ("mean", "median")),
        ("clipped", poison.test_huge_delta_is_clipped_to_the_median_norm_where_that_is_asked_for),
        ("sign", lambda: sign("trimmed_mean", 0, 0.15)),
        *((rule, lambda r=rule: poison.test_zero_delta_is_taken(r)) for rule in rules),
        *((rule, lambda r=rule: poison.test_all_zero_deltas_are_no_strangers_to_each_other(r)) for rule in rules),
        ("zeros", poison.test_most_deltas_being_zero_makes_no_stranger_of_the_others),
        ("two", poison.test_two_deltas_never_judge_each_other),
        ("trimmed", poison.test_trimmed_mean_is_what_numpy_makes_of_it),
        *((str(n), lambda n=n: middle("median", n)) for n in (2, 7, 8)),
        ("short", poison.test_clipping_leaves_what_is_short_enough_alone),
    ]


@pytest.mark.parametrize("name", MUTANTS)
def test_checks_find_the_defect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(name, monkeypatch)
    assert any(fails(check) for _, check in checks()), f"nobody noticed: {name}"


def test_checks_pass_without_a_defect() -> None:
    assert not any(fails(check) for _, check in checks())


def fails(check: object) -> bool:
    try:
        check()  # type: ignore[operator]
    except Exception:
        return True
    return False
