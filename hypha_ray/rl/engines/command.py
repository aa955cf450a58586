"""Server that a worker starts by a command: its process, its port, and its output."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from hypha_ray.bridge.paths import handed_on
from hypha_ray.errors import ConfigError
from hypha_ray.files import opener
from hypha_ray.rl.engines import guard
from hypha_ray.rl.http import Unreachable

_STARTED = "RL020"
_LAST_BYTES = 4000
_MOST_LOG_BYTES = 16 << 20
"""Size of a log that is put aside when the next server starts."""


class CommandServer:
    """Process of a server; it ends with this process, however that ends.

    Args:
        line: command line, with ``{model}`` and ``{port}``.
        model: folder of the model.
        environment: variables beside those that are handed on.
        log: file for the server's output; a temporary one if it is None or can't be opened. That one is removed at the
            end unless an error has named it.

    Raises:
        ConfigError: RL020, there is no such program.

    """

    def __init__(self, line: str, model: str, environment: Mapping[str, str], log: Path | None = None) -> None:
        port = _free_port()
        words: list[str] = []
        for word in shlex.split(line):
            with_model = word.replace("{model}", model)
            words.append(with_model.replace("{port}", str(port)))
        self.url = f"http://127.0.0.1:{port}"
        self.answered = False
        """Whether a server of this command has answered once."""
        self._program = words[0]
        program = shutil.which(self._program)
        if program is None:
            fix = "mend rl.generation.server.command; the program has to be on every node that may get a worker"
            raise ConfigError(_STARTED, "there is no such program for a server that generates", self._program, fix=fix)
        self._log_file = _open_log(log)
        self._is_log_kept = Path(self._log_file.name) == log
        self._process = subprocess.Popen(
            [sys.executable, "-m", guard.__name__, program, *words[1:]],
            env={**handed_on(os.environ), **environment},
            stdin=subprocess.PIPE,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def check_lives(self) -> None:
        """Refuse a server that has ended.

        Raises:
            ConfigError: RL020, it has ended, and no server of this command has answered yet.
            Unreachable: it has ended, and one has.

        """
        code = self._process.poll()
        if code is None:
            return
        if self.answered:
            raise Unreachable(f"the server has ended ({_exit_text(code)})")
        fix = f"run the command by hand; it printed at last: {self._last_line()}; all is in {self.log}"
        raise ConfigError(_STARTED, f"the server {self._program} has ended", _exit_text(code), fix=fix)

    @property
    def log(self) -> str:
        """File with the server's output, which stays from now on."""
        self._is_log_kept = True
        return str(self._log_file.name)

    @property
    def lives(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the server and all that it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(3 * guard.END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log_file.close()
        if not self._is_log_kept:
            Path(self._log_file.name).unlink(missing_ok=True)

    def _last_line(self) -> str:
        end = self._log_file.seek(0, os.SEEK_END)
        self._log_file.seek(max(0, end - _LAST_BYTES))
        text = self._log_file.read().decode(errors="replace")
        for line in reversed(text.split("\n")):
            if line.strip():
                return line.strip()[:300]
        return "nothing"


def _open_log(log: Path | None) -> IO[bytes]:
    """Open a file for a server's output; a file that has grown large is put aside."""
    if log is not None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            if log.exists() and log.stat().st_size > _MOST_LOG_BYTES:
                log.replace(log.with_suffix(".log.1"))
            return open(log, "a+b", opener=opener)
        except OSError:  # A full disk, for one: a log is no reason to end a run.
            pass
    return tempfile.NamedTemporaryFile(prefix="hypha-generation-", suffix=".log", delete=False)


def _exit_text(code: int) -> str:
    """Return an exit code as text; a shell's and the guard's are 128 and more for signals."""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"
    return f"killed by signal {number} ({name})"


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
