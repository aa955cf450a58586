"""Processes forked for a driver: workers as if started, plots, and by-products that fail without harm."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hypha_ray.driver import forks
from hypha_ray.driver.forks import PlotService, draw_plots, uses_gpu
from hypha_ray.driver.ray_worker import SOCKET
from tests.support.fleet import fleet_records

SERVER = """
    import fcntl, os, socket, sys, tempfile
    os.environ |= {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "1"}
    import hypha_ray.driver.launch
    from hypha_ray.config import Job
    from hypha_ray.driver.forks import fork_server
    from hypha_ray.driver.forks import load_libraries
    load_libraries(Job.model_validate({"model": {"config": {"model_type": "llama"}}}))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(sys.argv[1])
    listener.listen()
    server_end, end = os.pipe()
    folder = tempfile.TemporaryDirectory(dir=os.path.dirname(sys.argv[1]), prefix="own")
    lock = open(sys.argv[1] + ".lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    print(fork_server(listener, server_end), flush=True)
    sys.stdin.read()
"""
"""A driver that serves forks until its standard input ends."""
ASKING = """
    import os, sys
    from hypha_ray.driver.ray_worker import hand_over
    os._exit(0 if hand_over(sys.argv[1:]) else 3)
"""
"""A worker that is handed over; the exit code says whether it was."""
SCRIPT = """
    import json, os, sys, time
    import ray
    from ray._raylet import PlacementGroupID
    ids = [PlacementGroupID.of(ray.JobID.from_int(1)).hex() for _ in range(2)]
    LOADED = {"torch", "transformers.models.llama.modeling_llama", "hypha_ray.worker.loop"}
    told = {"argv": sys.argv[1:], "mine": os.environ["MINE"], "folder": os.getcwd(), "ids": ids, "pid": os.getpid()}
    print(json.dumps({**told, "loaded": LOADED <= sys.modules.keys(), "group": os.getpgid(0)}), flush=True)
    time.sleep(1000 if "stay" in sys.argv else 0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forks")
    for name, text in {"server": SERVER, "asking": ASKING, "script": SCRIPT}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command, pipe = [sys.executable, folder / "server.py", folder / "socket"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        yield process
        process.kill()


def handed_over(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A worker's output once that is complete, which is after the process that was handed over has ended."""
    own = {**os.environ, SOCKET: str(folder / "socket"), "RAY_JOB_ID": "01000000", "MINE": "1", **environment}
    command = [sys.executable, folder / "asking.py", folder / "script.py", *arguments]
    return subprocess.run(command, check=False, env=own, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=100)


@pytest.mark.slow
def test_forked_workers_have_libraries_and_all_else_of_the_processes_they_replace(
    folder: Path, driver: subprocess.Popen[str]
) -> None:
    told = [handed_over(folder, "--one=1", MINE=name) for name in ("a", "b")]
    assert [done.returncode for done in told] == [0, 0]
    first, second = (json.loads(done.stdout) for done in told)
    assert (first["argv"], first["mine"], second["mine"]) == (["--one=1"], "a", "b")
    assert first["folder"] == str(folder) and first["loaded"]
    assert first["group"] == first["pid"] != second["pid"]
    assert len({*first["ids"], *second["ids"]}) == 4
    assert len(list(folder.glob("own*"))) == 1  # The driver's, which removes it itself.


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"HF_HOME": "/elsewhere"}, {"RAY_JOB_ID": "02000000"}])
def test_worker_that_libraries_were_not_loaded_for_starts_by_itself(
    folder: Path, driver: subprocess.Popen[str], variables: dict[str, str]
) -> None:
    assert handed_over(folder, **variables).returncode == 3


# The last one, since it ends the driver.
@pytest.mark.slow
def test_workers_end_with_the_driver_even_if_that_is_killed(folder: Path, driver: subprocess.Popen[str]) -> None:
    own = {**os.environ, SOCKET: str(folder / "socket"), "RAY_JOB_ID": "01000000", "MINE": "1"}
    command = [sys.executable, folder / "asking.py", folder / "script.py", "stay"]
    with subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        pid = json.loads(asking.stdout.readline())["pid"]
        driver.send_signal(signal.SIGKILL)
        with (folder / "socket.lock").open() as lock:
            driver.wait()
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Though the worker may still run.
        assert asking.stdout.read() == ""  # The worker's end of it is closed.
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}/exe").exists()


def test_process_with_a_gpu_open_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "3").symlink_to("/dev/null")
    assert not uses_gpu(tmp_path)
    (tmp_path / "4").symlink_to("/dev/nvidiactl")
    assert uses_gpu(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with rounds to plot."""
    lines = "".join(f"{json.dumps(record)}\n" for record in fleet_records())
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlotService]:
    """A process; this one can't draw until it is undone."""
    monkeypatch.setattr(forks, "is_forkable", lambda: True)
    with closing(PlotService()) as process:
        yield process


def drawn(run: Path) -> set[str]:
    return {path.name for path in (run / "plots").iterdir()}


@pytest.mark.slow
def test_plots_are_drawn_by_the_other_process_once(
    run: Path, plots: PlotService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(forks, "draw_plots")
    plots.load()
    plots.draw(run)
    plots.draw(run)
    assert plots.notes(run) == []
    assert {"loss.png", "batches.png", "utilisation.png"} <= drawn(run)


@pytest.mark.slow
def test_plots_are_drawn_here_if_the_other_process_has_died(run: Path, plots: PlotService) -> None:
    assert plots.pid is not None
    os.kill(plots.pid, signal.SIGKILL)
    plots.load()
    assert plots.notes(run) == []
    assert "loss.png" in drawn(run)


@pytest.mark.slow
@pytest.mark.parametrize(("may_fork", "is_forkable"), [(True, False), (False, True)])
def test_plots_are_drawn_here_if_this_process_may_not_be_forked(
    run: Path, monkeypatch: pytest.MonkeyPatch, may_fork: bool, is_forkable: bool
) -> None:
    monkeypatch.setattr(forks, "is_forkable", lambda: is_forkable)
    with closing(PlotService(may_fork)) as plots:
        assert plots.pid is None
        plots.draw(run)
        assert not (run / "plots").exists()
        assert plots.notes(run) == []
    assert "loss.png" in drawn(run)


def test_note_of_the_other_process_is_returned(plots: PlotService, tmp_path: Path) -> None:
    (note,) = plots.notes(tmp_path)
    assert note.startswith("the plots were not drawn: error[DATA044]")


def test_process_ends_by_itself_once_its_driver_is_gone(plots: PlotService) -> None:
    assert plots.pid is not None and plots._socket is not None
    plots._socket.close()
    assert os.waitpid(plots.pid, 0) == (plots.pid, 0)


def test_closed_process_is_gone(plots: PlotService) -> None:
    pid = plots.pid
    plots.close()
    assert pid is not None and not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("rounds", [True, False])
def test_plots_that_cannot_be_drawn_are_told_and_end_no_run(rounds: bool, tmp_path: Path) -> None:
    records = fleet_records() if rounds else []
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records), encoding="utf-8")
    (tmp_path / "plots").touch()

    (note,) = draw_plots(tmp_path)

    assert note.startswith("the plots were not drawn: error[DATA044]")
