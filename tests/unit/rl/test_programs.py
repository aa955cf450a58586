"""Reward function `code`: verdicts that a program can't give itself, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hypha_ray.rl.rewards import registered
from hypha_ray.rl.rewards.response import Response

READS_ALL_FRAMES = """
import os, sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        for number in range(16):
            try:
                os.write(number, str(value).encode())
            except OSError:
                pass
    frame = frame.f_back
"""
SESSION_OF_ITS_OWN = """
import os, time
if os.fork() == 0:
    os.setsid()
    until = time.monotonic() + 60
    number = 0
    while time.monotonic() < until:
        number += 1
        try:
            open(f"f{number}", "w").close()
        except OSError:
            break
    os._exit(0)
time.sleep(0.3)
"""

SECRET = "secret-of-worker"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def passes(program: str, tests: str) -> float | None:
    text = f"```python\n{program}\n```"
    return registered.passes(Response("?", text, (), True, {"answer": tests}, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "import atexit\natexit.register(print, 'bye')\ndef f(): return 1",
        "import threading, time\nlate = lambda: (time.sleep(0.2), print('late'))\n"
        "threading.Thread(target=late).start()\nf = lambda: 1",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nf = lambda: 1",
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n    x: int\n"
        "f = lambda: pickle.loads(pickle.dumps(A(1))).x",
        "import sys\nsys.stdout = None\ndef f(): return 1",
        "import os\nos.close(1)\nos.closerange(3, 64)\ndef f(): return 1",
    ],
)
def test_a_right_program_gets_its_reward_whatever_it_prints_or_closes(program: str, folder: Path) -> None:
    assert passes(program, "assert f() == 1") == 1
    assert passes(program, "assert f() == 2") == 0
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "program",
    [
        READS_ALL_FRAMES + "os._exit(0)",
        READS_ALL_FRAMES,
        "def f():\n" + "".join(f"    {line}\n" for line in READS_ALL_FRAMES.splitlines()) + "    os._exit(0)",
        "import os\nos.execv('/bin/true', ['true'])",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *_, **__: None",
        "if 0: \\",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nos._exit(0)",
        "import os\nif os.fork():\n    os._exit(0)",
        "raise SystemExit(0)",
    ],
)
def test_a_program_that_only_claims_success_gets_nothing(program: str, folder: Path) -> None:
    assert passes(program, "f()\nassert False") == 0
    assert not list(folder.iterdir())


def test_tests_are_not_to_be_seen_by_the_program() -> None:
    program = "import os\nthere = {name for _, _, files in os.walk('..') for name in files}"

    assert passes(program, "assert there == {'program.py'}") == 1


@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor _ in range(1200):\n    os.mkdir('a'); os.chdir('a')",
        "import os\nos.mkdir('a')\nos.chmod('a', 0)\nos.symlink('/', 'b')\nos.chmod('.', 0)",
        "import os\nup = os.path.dirname(os.getcwd())\nos.rename(up, up + '-else')",
    ],
)
def test_whatever_a_program_makes_in_its_folder_goes_with_it(program: str, folder: Path) -> None:
    assert passes(program, "pass") in (0, 1)
    assert not list(folder.iterdir())


def test_a_process_in_a_session_of_its_own_ends_with_the_program(folder: Path) -> None:
    assert passes(SESSION_OF_ITS_OWN, "pass") == 1
    assert not list(folder.iterdir())


def test_a_program_does_not_see_the_environment_of_its_worker() -> None:
    """The environment that the kernel shows is the one that a process started with."""
    program = "import os\nseen = open(f'/proc/{os.getppid()}/environ').read()"
    calls = f"print(passes({program!r}, f'assert {{SECRET!r}} in seen'))"
    worker = f"from tests.unit.rl.test_programs import SECRET, passes; {calls}"
    environment = os.environ | {"JUDGE_KEY": SECRET, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    output = subprocess.run([sys.executable, "-c", worker], env=environment, capture_output=True, text=True, check=True)

    assert output.stdout.strip() == "0.0"


def test_a_machine_without_room_for_the_program_gives_no_reward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "absent"))

    assert passes("f = 1", "assert f") is None
