"""Whether Ray's control service is still there, asked of a real socket."""

from __future__ import annotations

import socket

import pytest

from hypha_ray.driver import ray_cluster as cluster
from hypha_ray.driver.ray_cluster import ControlService
from hypha_ray.errors import ClusterError


class Clock:
    """Time that passes when it is told to, or when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cluster, "time", clock)
    return clock


def listening(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def test_control_service_that_is_back_in_time_is_forgiven(clock: Clock) -> None:
    server = listening()
    port = server.getsockname()[1]
    service = ControlService(f"127.0.0.1:{port}")
    for _ in range(3):
        clock.sleep(cluster.KNOCK_S)
        assert service.check()
        server.close()
        for _ in range(14):
            clock.sleep(cluster.KNOCK_S)
            assert not service.check()
        server = listening(port)
        clock.sleep(cluster.KNOCK_S)
        assert service.check()
    server.close()


def test_control_service_that_stays_away_is_given_up(clock: Clock) -> None:
    with listening() as server:
        port = server.getsockname()[1]
        service = ControlService(f"127.0.0.1:{port}")
    clock.sleep(cluster.KNOCK_S)
    assert not service.check()
    clock.sleep(cluster.GONE_S)
    with pytest.raises(ClusterError, match=rf"NET009.*127\.0\.0\.1:{port}.*the same command"):
        service.check()


def test_control_service_wait_returns_at_once_or_gives_up(clock: Clock) -> None:
    with listening() as server:
        service = ControlService(f"127.0.0.1:{server.getsockname()[1]}")
        service.wait()
        assert clock.now == 1000.0
    with pytest.raises(ClusterError, match="NET009"):
        service.wait()
    assert clock.now == 1000.0 + cluster.GONE_S


def test_control_service_is_not_blamed_for_the_time_that_the_driver_itself_was_stopped(clock: Clock) -> None:
    with listening() as server:
        service = ControlService(f"127.0.0.1:{server.getsockname()[1]}")
        clock.sleep(3600)
        assert service.check()
    clock.sleep(3600)
    assert not service.check()
