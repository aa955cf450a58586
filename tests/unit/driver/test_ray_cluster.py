"""A Ray that can't be had is one clear error, and one whose control service is gone is noticed."""

from __future__ import annotations

import signal
import socket

import pytest
import ray
from ray._private import services

from hypha_ray.driver import ray_cluster as cluster
from hypha_ray.driver.ray_cluster import ControlService, connected
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


@pytest.mark.parametrize(
    ("ending", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["Ctrl-C", "SIGTERM"]
)
def test_signal_waits_until_ray_is_disconnected_and_a_second_one_does_not(
    ending: signal.Signals, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    expected_steps = iter([["disconnected"], ["half", "never reached"]])

    def shutdown() -> None:
        for step in next(expected_steps):
            signal.raise_signal(ending)
            steps.append(step)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray, "shutdown", shutdown)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for _ in range(2):
            with pytest.raises(raised), connected("tests"):
                pass
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert steps == ["disconnected", "half"]


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
