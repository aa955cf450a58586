"""Job scripts, in processes forked from one that has loaded what all of them load, and with their variables.

A start of a command takes half a second of a processor, and seconds with heavy libraries; its work next to nothing.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).parents[2]
COMMON = ("hypha_ray.config.entry_point", "hypha_ray.config.load", "hypha_ray.config.options")


class Ended(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str
    modules: frozenset[str]
    """Names of all modules that its process has loaded, packages' own parts left out."""


class LightCommands:
    """Runs job scripts, one at a time."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder

    def __call__(self, script: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> Ended:
        """Run `jobs/SCRIPT.py` in a folder, with further variables."""
        assert self._process.stdin is not None and self._process.stdout is not None
        command = [str(ROOT / "jobs" / f"{script}.py"), *arguments]
        request = {"command": command, "cwd": str(cwd), "environment": environment, "files": str(self._folder)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        output, errors, modules = (
            (self._folder / name).read_text(encoding="utf-8", errors="surrogateescape")
            for name in ("stdout", "stderr", "modules")
        )
        return Ended(code, output, errors, frozenset(modules.split()))


@contextmanager
def light_commands(*modules: str, **variables: str) -> Iterator[LightCommands]:
    """`LightCommands` whose processes begin with these modules loaded, beside those that all commands load.

    The modules are loaded with further variables.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}", "RAY_ADDRESS": "", **variables}
    line, pipe = [sys.executable, "-m", __name__, *COMMON, *modules], subprocess.PIPE
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(line, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process,
    ):
        yield LightCommands(process, Path(folder))
        process.communicate()  # It ends when its standard input does.


def become(request: dict[str, Any]) -> NoReturn:
    """Be a process as the shell would have started it, up to the end of the script.

    It ends without taking libraries apart. That takes the best part of a second, as all memory that it writes to is
    copied first.
    """
    files = Path(request["files"])
    streams = [os.open(os.devnull, os.O_RDONLY)]
    streams += [os.open(files / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("stdout", "stderr")]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    atexit.register(lambda: (files / "modules").write_text("\n".join({name.split(".")[0] for name in sys.modules})))
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = request["command"]
    sys.path.insert(0, str(ROOT / "jobs"))
    code: Any = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # As an interpreter does it before it calls these functions.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


def fork_commands(modules: Sequence[str]) -> None:
    """Fork for each request on standard input, and answer with the exit code."""
    for name in modules:
        import_module(name)
    for line in sys.stdin:
        command = os.fork()
        if command == 0:
            become(json.loads(line))
        _, status = os.waitpid(command, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    fork_commands(sys.argv[1:])
