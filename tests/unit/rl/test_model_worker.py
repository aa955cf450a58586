"""Reasons why a model worker can't be built."""

from __future__ import annotations

import pytest
import torch

from hypha_ray.errors import AuthenticationError, ConfigError
from hypha_ray.rl.dataflow.actor import error_for_user


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named 'my_rewards'"), "lacks a package.*No module named 'my_rewards'"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "don't fit.*Tried to allocate"),
        (RuntimeError("first line\nsecond line"), "can't be built.*RuntimeError: first line second line"),
    ],
)
def test_a_reason_of_other_libraries_is_one_clear_error(error: Exception, told: str) -> None:
    with pytest.raises(ConfigError, match=f"RL028.*{told}") as raised:
        raise error_for_user(error)
    assert raised.value.exit_code == 2


def test_a_reason_of_ours_keeps_its_code() -> None:
    own = AuthenticationError("RWD006", "the judge's key isn't in the environment")
    assert error_for_user(own) is own and own.exit_code == 4
