"""A Ray that can't be had is one clear error, whatever Ray says it with."""

from __future__ import annotations

import socket

import pytest
import ray
from ray._private import services

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


def test_address_that_a_killed_ray_left_behind_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, port = server.getsockname()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: f"127.0.0.1:{port}")
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray would try for minutes"))
    with pytest.raises(ClusterError, match=r"NET002.*no node of a running Ray cluster"), connected("test", "auto"):
        pass
