"""One verdict of those that the servers of several fragments give."""

from __future__ import annotations

from hypha_ray.scheduler.runtime.global_weights import _join_verdicts
from hypha_ray.types import Contribution, Rejection, Verdict


def test_norms_of_fragments_add_up_in_squares_as_those_of_parts_of_a_vector_do() -> None:
    first = Verdict(4, (Contribution(0, 1, 8, 3.0), Contribution(2, 5, 16, 2.0)), (), 6.0, 100)
    second = Verdict(4, (Contribution(0, 1, 8, 4.0), Contribution(2, 5, 16, 3.0)), (), 8.0, 50)
    third = Verdict(4, (Contribution(0, 1, 8, 12.0), Contribution(2, 5, 16, 6.0)), (), 0.0, 0)
    rejected = (Rejection(1, "a value that isn't finite"),)
    joined = _join_verdicts([first, second, third], rejected)
    assert joined == Verdict(4, (Contribution(0, 1, 8, 13.0), Contribution(2, 5, 16, 7.0)), rejected, 10.0, 150)
