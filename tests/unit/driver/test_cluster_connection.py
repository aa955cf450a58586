"""A Ray that can't be had is one clear error, whatever Ray says it with."""

from __future__ import annotations

import pytest
import ray

from hypha_ray.driver.ray_cluster import connected
from hypha_ray.errors import ClusterError


@pytest.mark.parametrize("kind", [Exception, ConnectionError, RuntimeError, ValueError])
def test_ray_that_does_not_come_up_is_worth_another_try(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise kind("The current node timed out during startup.\nMore of it.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", fails)
    with pytest.raises(ClusterError, match=r"NET002.*timed out during startup") as raised, connected("tests"):
        pass
    assert raised.value.exit_code == 75 and "\n" not in str(raised.value)
