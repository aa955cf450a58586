"""Examination of a machine: what is ok, what is worth a note, what fails, and with which exit code."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hypha_ray.driver.preflight import doctor
from hypha_ray.driver.preflight.doctor import (
    CheckReport,
    CheckState,
    disk_report,
    error_of,
    fail,
    google_report,
    gpu_report,
    machine_reports,
    note,
    ok,
    rows,
    store_reports,
    token_report,
    version_report,
)
from hypha_ray.driver.ray_cluster import clock_report, compared_versions, link_report, ports_report, size_report
from hypha_ray.driver.run_provenance import versions
from hypha_ray.errors import AuthenticationError, ClusterError, TryAgainError
from tests.support.hub import TOKEN, hub_of
from tests.support.refusing_store import Store, refusing_store

SECRET = "s3cret-key-of-the-store"


def test_this_machine_has_what_jobs_need() -> None:
    reports = {report.check: report for report in machine_reports()}
    assert reports.keys() == {"versions", "gpu", "/dev/shm", "open files"}
    installed = versions()
    assert reports["versions"].state is CheckState.OK
    for name in ("python", "ray", "torch", "transformers", "hypha_ray"):
        assert f"{name} {installed[name]}" in reports["versions"].value
    assert all(report.remedy for report in reports.values() if report.state is not CheckState.OK)


def test_missing_library_fails() -> None:
    report = version_report({"python": "3.11.2", "ray": "2.60.0", "transformers": "5.0"})
    assert (report.state, "torch missing" in report.value) == (CheckState.FAIL, True)
    assert report.remedy.startswith("install torch")


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Program of that name, which comes first."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


@pytest.mark.parametrize(
    ("script", "state", "text"),
    [
        ("exit 9", CheckState.FAIL, "nvidia-smi fails"),
        ("true", CheckState.OK, "none"),
    ],
)
def test_driver_that_fails_is_told(nvidia_smi: Path, script: str, state: CheckState, text: str) -> None:
    nvidia_smi.write_text(f"#!/bin/sh\n{script}\n")
    nvidia_smi.chmod(0o755)
    report = gpu_report()
    assert report.state is state and report.value.startswith(text)


def test_gpus_that_torch_cannot_use_fail(nvidia_smi: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    nvidia_smi.write_text("#!/bin/sh\nfor n in 1 2; do echo 'NVIDIA T4, 570.1, 15360 MiB'; done\n")
    nvidia_smi.chmod(0o755)
    report = gpu_report()
    assert report.state is CheckState.FAIL and report.value.startswith("2 × NVIDIA T4, 570.1, 15360 MiB, and torch")


def test_disk_of_runs_is_measured_also_before_the_first_run(tmp_path: Path) -> None:
    report = disk_report(tmp_path / "not" / "yet")
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert report.state is (CheckState.OK if free >= 10 << 30 else CheckState.NOTE)
    assert str(tmp_path) in report.value and not (tmp_path / "not").exists()
    (tmp_path / "file").touch()
    assert disk_report(tmp_path / "file").state is CheckState.FAIL
    assert disk_report(Path("/proc/runs")).state is CheckState.FAIL


@pytest.mark.parametrize(
    ("variables", "mode", "state", "text"),
    [
        ({}, None, CheckState.OK, "none yet"),
        ({}, 0o600, CheckState.OK, "mode 0600"),
        ({}, 0o644, CheckState.FAIL, "mode 0644"),
        ({"RAY_AUTH_MODE": "token", "RAY_ADDRESS": "h:1"}, None, CheckState.FAIL, "there is none at"),
        ({"RAY_AUTH_MODE": "token", "RAY_ADDRESS": "h:1"}, 0o600, CheckState.OK, "mode 0600"),
        ({"RAY_ADDRESS": "h:1"}, 0o600, CheckState.NOTE, "RAY_AUTH_MODE is not set"),
        ({"RAY_AUTH_MODE": "disabled"}, 0o600, CheckState.NOTE, "RAY_AUTH_MODE is disabled"),
        ({"RAY_AUTH_TOKEN": SECRET}, 0o644, CheckState.OK, "in RAY_AUTH_TOKEN"),
    ],
)
def test_token_is_its_owners_alone(
    variables: dict[str, str], mode: int | None, state: CheckState, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "auth_token"
    if mode is not None:
        file.write_text(SECRET)
        file.chmod(mode)
    report = token_report(variables, file)
    assert report.state is state and text in report.value
    assert SECRET not in repr(report)
    if state is CheckState.FAIL:
        assert report.error is AuthenticationError and report.remedy
    named = token_report({**variables, "RAY_AUTH_TOKEN_PATH": str(file)}, tmp_path / "another")
    assert named.state is state


def test_environment_without_credentials_has_no_store() -> None:
    assert list(store_reports({})) == []


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store that the environment leads to, with keys for it."""
    with refusing_store(monkeypatch) as store:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield store


def s3() -> CheckReport:
    """Report about the keys in the environment."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    (report,) = store_reports({name: os.environ[name] for name in names})
    assert SECRET not in repr(report)
    return report


@pytest.mark.parametrize(
    ("refusal", "state", "text"),
    [
        ("", CheckState.OK, "the store accepts them"),
        ("expired as 403", CheckState.FAIL, "the credentials have expired"),
        ("unknown key", CheckState.FAIL, "the store doesn't know the access key"),
        ("wrong secret", CheckState.FAIL, "the secret key doesn't belong to the access key"),
        ("denied", CheckState.OK, "known to the store"),
    ],
)
def test_keys_of_s3_are_tried_and_not_shown(refusal: str, state: CheckState, text: str, store: Store) -> None:
    store.refuses = refusal
    report = s3()
    assert report.state is state and text in report.value, report
    if state is CheckState.FAIL:
        assert report.error is AuthenticationError and report.remedy


def test_keys_of_s3_that_lack_a_part_fail_and_a_store_that_is_away_is_a_note(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (report,) = store_reports({"AWS_ACCESS_KEY_ID": "key"})
    assert report.state is CheckState.FAIL and "AWS_SECRET_ACCESS_KEY isn't" in report.value
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    report = s3()
    assert report.state is CheckState.NOTE and "the store can't be asked" in report.value


def test_file_with_credentials_of_google_is_looked_into(tmp_path: Path) -> None:
    file = tmp_path / "google.json"
    assert google_report(file).state is CheckState.FAIL
    file.write_text("[]")
    assert google_report(file).state is CheckState.FAIL
    file.write_text(json.dumps({"type": "service_account", "private_key": SECRET}))
    report = google_report(file)
    assert report.state is not CheckState.FAIL and "service_account" in report.value
    assert SECRET not in repr(report)


def test_token_of_the_hub_is_tried_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_of() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        (accepted,) = store_reports({"HF_TOKEN": TOKEN})
        (refused,) = store_reports({"HF_TOKEN": SECRET})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    (away,) = store_reports({"HF_TOKEN": SECRET})
    assert [report.state for report in (accepted, refused, away)] == [CheckState.OK, CheckState.FAIL, CheckState.NOTE]
    assert refused.error is AuthenticationError and "HTTP 401" in refused.value
    assert TOKEN not in repr(accepted) and SECRET not in repr((refused, away))


def test_hub_whose_answer_comes_bit_by_bit_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(doctor, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Padding: ")
            while not is_over.wait(0.05):
                connection.sendall(b"x")
            connection.close()

        thread = threading.Thread(target=drip)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        (report,) = store_reports({"HF_TOKEN": TOKEN})
        is_over.set()
        thread.join()
    assert report.state is CheckState.NOTE and "can't be reached (TimeoutError)" in report.value


def test_versions_of_a_node_that_differ_are_told() -> None:
    here = {"python": "3.11.2", "ray": "2.60.0", "torch": "2.13.0", "transformers": "5.0", "hypha_ray": "0.1.0"}
    assert compared_versions(here, dict(here)).state is CheckState.OK
    report = compared_versions(here, here | {"torch": "2.12.0"})
    assert (report.state, report.value) == (CheckState.NOTE, "torch 2.12.0 there and 2.13.0 here")
    for name in ("python", "ray", "hypha_ray"):
        assert compared_versions(here, here | {name: "0"}).state is CheckState.FAIL
    assert compared_versions(here, {"python": "3.11.2"}).value.count("missing there") == 4


def test_clocks_links_and_ports_are_judged_by_what_they_cost() -> None:
    assert clock_report(0.4, 0.01).state is CheckState.OK
    assert clock_report(-2.0, 0.01).state is CheckState.NOTE
    assert clock_report(-2.0, 1.5).state is CheckState.OK
    assert clock_report(400.0, 0.01).state is CheckState.FAIL
    assert link_report(1e9, 2e9, 0.001) == ok("link", "1.00Gbit/s from it, 2.00Gbit/s to it, 1.0 ms a call")
    assert link_report(1e9, 5e6, 0.05).state is CheckState.NOTE
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ports_report("127.0.0.1", {"node manager": port}) == ok("ports", f"node manager {port}")
    report = ports_report("127.0.0.1", {"node manager": port})
    assert (report.state, report.error) == (CheckState.FAIL, ClusterError)
    assert report.value == f"no answer of node manager {port}"


def test_exit_code_is_that_of_the_failure_to_mend_first() -> None:
    calm = [ok("gpu", "none"), note("disk", "full soon", "make room")]
    busy = fail("disk", "full", "make room", TryAgainError)
    refused = fail("token", "none", "copy it", AuthenticationError)
    wrong = fail("versions", "torch missing", "install it")
    assert error_of(calm) is None
    for failures, code in (([busy], 75), ([busy, refused], 4), ([busy, refused, wrong], 2)):
        error = error_of([*calm, *failures])
        assert error is not None and error.exit_code == code
        assert error.got == ", ".join(report.check for report in failures)


def test_lines_have_nodes_if_there_are_any_and_no_secret_of_a_url() -> None:
    here = note("disk", "at s3://key:s3cret@store/runs", "make room")
    assert list(rows([here])) == [("note", "disk", "at s3://key:***@store/runs. Fix: make room")]
    there = CheckReport("link", CheckState.OK, "fast", node="10.0.0.7")
    assert [row[2] for row in rows([here, there])] == ["-", "10.0.0.7"]
    assert there.as_json() == {"check": "link", "state": "ok", "value": "fast", "remedy": None, "node": "10.0.0.7"}
    assert "s3cret" not in json.dumps(here.as_json())


def test_cluster_of_one_node_has_singular_nouns() -> None:
    node = {"Resources": {"CPU": 1.0, "memory": 1e9, "object_store_memory": 5e8}}
    assert size_report([node], "10.0.0.1:6379").value.startswith("1 node, 1 CPU, 0 GPUs, ")
    two = size_report([node, node], "10.0.0.1:6379").value
    assert two.startswith("2 nodes, 2 CPUs, 0 GPUs, ") and two.endswith(", at 10.0.0.1:6379")
