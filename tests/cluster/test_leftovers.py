"""What a dead driver leaves in the cluster is ended before its run goes on; what a live one has is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.util import list_named_actors
from ray.util.placement_group import placement_group, placement_group_table

from hypha_ray.driver.attempts import end_leftovers
from hypha_ray.driver.start import TERMINATED, sigterm_restored
from hypha_ray.errors import ClusterError

pytestmark = pytest.mark.usefixtures("local_ray")

DRIVER = """
import sys, ray
from ray.util.placement_group import placement_group
ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)
group = placement_group([{"CPU": 1}], name=f"{sys.argv[2]}/worker-0")
ray.get(group.ready())

@ray.remote(num_cpus=0)
class Actor:
    def ping(self):
        return 1

actors = [Actor.options(name=name).remote() for name in ("scheduler", "worker-0")]
ray.get([actor.ping.remote() for actor in actors])
print("up", flush=True)
sys.stdin.read()
"""

Driver = Callable[[str], "subprocess.Popen[str]"]


@ray.remote(num_cpus=0)
class Actor:
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def driver() -> Iterator[Driver]:
    """Starts another driver, which has two actors and a lease under the name of a run."""
    started = []

    def start(run: str) -> subprocess.Popen[str]:
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-c", DRIVER, address, run]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def names(run: str) -> list[str]:
    return sorted(row["name"] for row in list_named_actors(all_namespaces=True) if row["namespace"] == run)


def groups(run: str) -> list[dict[str, Any]]:
    rows = placement_group_table().values()
    return [row for row in rows if row["name"].startswith(f"{run}/") and row["state"] != "REMOVED"]


def test_leftovers_of_a_killed_driver_are_gone_afterwards(driver: Driver) -> None:
    other = driver("killed")
    assert names("killed") == ["scheduler", "worker-0"] and len(groups("killed")) == 1
    other.kill()
    end_leftovers("killed")
    assert names("killed") == [] and groups("killed") == []


def test_leftovers_of_a_live_driver_are_refused_and_left_alone(driver: Driver) -> None:
    other = driver("alive")
    with pytest.raises(ClusterError, match=rf"NET006.*another driver.*'alive' — got pid {other.pid} on "):
        end_leftovers("alive", deadline_s=0.5)
    assert names("alive") == ["scheduler", "worker-0"] and len(groups("alive")) == 1


def test_leftovers_of_an_earlier_attempt_are_ended_even_if_stopped_and_other_runs_are_left_alone() -> None:
    group = placement_group([{"CPU": 1}], name="own/worker-0")
    ray.get(group.ready())
    stopped = Actor.options(name="scheduler", namespace="own").remote()
    bystander = Actor.options(name="scheduler", namespace="own-2").remote()
    os.kill(ray.get(stopped.pid.remote()), signal.SIGSTOP)
    end_leftovers("own")
    assert names("own") == [] and groups("own") == []
    assert names("own-2") == ["scheduler"] and ray.get(bystander.pid.remote())
    Actor.options(name="scheduler", namespace="own").remote()  # The name is free.


def test_leftovers_of_no_run_at_all_are_none() -> None:
    end_leftovers("never-seen", deadline_s=0.0)


def test_leftovers_that_are_to_be_kept_are_left_with_their_leases() -> None:
    group = placement_group([{"CPU": 1}], name="kept/worker-0")
    ray.get(group.ready())
    kept = Actor.options(name="worker-0", namespace="kept").remote()
    ended = Actor.options(name="scheduler", namespace="kept").remote()
    pid = ray.get(kept.pid.remote())
    assert ray.get(ended.pid.remote())
    end_leftovers("kept", spared_names={"worker-0", "worker-1"})
    assert names("kept") == ["worker-0"] and len(groups("kept")) == 1
    assert ray.get(kept.pid.remote()) == pid
    end_leftovers("kept")
    assert names("kept") == [] and groups("kept") == []


def test_sigterm_while_ray_waits_has_its_own_exit_status() -> None:
    """Ray's client turns the exception of the handler into one of status 1."""

    @ray.remote(num_cpus=0)
    def rests() -> None:
        time.sleep(600.0)

    old_handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    task = rests.remote()
    try:
        with pytest.raises(SystemExit) as raised, sigterm_restored() as restore:
            restore()
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            ray.wait([task], timeout=60.0)
        assert raised.value.code == TERMINATED
    finally:
        signal.signal(signal.SIGTERM, old_handler)
        ray.cancel(task, force=True)
