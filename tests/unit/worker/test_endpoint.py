"""Addresses, tokens and certificates of places that wait for trainers from elsewhere."""

from __future__ import annotations

import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.errors import ConfigError
from hypha_ray.market.requirements import needs, worker_needs
from hypha_ray.worker.bridged.process import address_of, check, listen_for_trainer, tls, token_of


def job(tmp_path: Path, *commands: str, **bridge: Any) -> Job:
    (tmp_path / "run").mkdir(exist_ok=True)
    tables = {"run": {"name": "run", "dir": str(tmp_path)}, "resources": {"num_workers": 4}}
    return Job.model_validate({**tables, "bridge": {"commands": list(commands), **bridge}})


def test_places_that_wait_have_ports_one_after_the_other(tmp_path: Path) -> None:
    one = job(tmp_path, "", "python x.py", " ", listen="127.0.0.1:6000")
    assert [one.group_of(worker).bridged for worker in range(4)] == [False, True, True, True]
    assert [one.group_of(worker).dials_in for worker in range(4)] == [False, True, False, True]
    assert address_of(one, 1) == "127.0.0.1:6000" and address_of(one, 3) == "127.0.0.1:6001"
    free = job(tmp_path, "", "", listen="[::1]:0")
    assert address_of(free, 2) == address_of(free, 3) == "[::1]:0"


def test_place_that_waits_needs_nothing_of_the_cluster(tmp_path: Path) -> None:
    one = job(tmp_path, "")
    assert worker_needs(one)[3].bundle() == {} and worker_needs(one)[2].bundle() == {"CPU": 1.0}
    assert {need.cpu: count for need, count in needs(one, 4).items() if need.role == "worker"} == {1.0: 3, 0.0: 1}


def test_token_of_a_place_stays_the_same_and_is_its_owners_alone(tmp_path: Path) -> None:
    one = job(tmp_path, "")
    assert token_of(one, 3) == token_of(one, 3)
    assert stat.S_IMODE((tmp_path / "run/bridge").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "run/bridge/worker-3.token").stat().st_mode) == 0o600


def test_free_port_of_a_place_stays_the_same_until_somebody_else_has_it(tmp_path: Path) -> None:
    one, file = job(tmp_path, ""), tmp_path / "run/bridge/worker-3.address"
    first = listen_for_trainer(one, 3)
    trainer = socket.create_connection(("127.0.0.1", int(first.address.rpartition(":")[2])))
    first.close()
    again = listen_for_trainer(one, 3)
    assert again.address == first.address == file.read_text().strip()
    other = listen_for_trainer(one, 3)
    assert other.address != first.address and other.address == file.read_text().strip()
    trainer.close()
    again.close()
    other.close()
    file.write_text("nothing\n")
    last = listen_for_trainer(one, 3)
    assert last.address == file.read_text().strip()
    last.close()


@pytest.mark.parametrize(
    ("bridge", "message"),
    [
        ({"listen": "0.0.0.0:6000"}, "SEC001.*only by TLS"),
        ({"listen": "6000"}, "CFG020"),
        ({"listen": "unix:/tmp/x"}, "CFG020.*no address to dial"),
        ({"certificate": "a.pem"}, "CFG012.*but not both"),
        ({"key": "a.pem"}, "CFG012.*but not both"),
        ({"listen": "0.0.0.0:6000", "certificate": "absent.pem", "key": "absent.pem"}, "SEC005"),
    ],
)
def test_door_that_cannot_be_opened_is_refused_before_anything_starts(
    bridge: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(job(tmp_path, "", **bridge))
    check(job(tmp_path, "python x.py", **bridge))  # Nobody listens there.


def test_door_without_certificate_speaks_no_tls(tmp_path: Path) -> None:
    assert tls(job(tmp_path, "")) is None
