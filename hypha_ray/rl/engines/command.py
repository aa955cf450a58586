"""Server that a worker starts by a command: its process, its port, and the last that it printed."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from hypha_ray.bridge.environment import handed_on
from hypha_ray.errors import ConfigError
from hypha_ray.rl.engines import guard
from hypha_ray.rl.http import Unreachable

_STARTED = "RL020"
_LAST_BYTES = 4000


class CommandServer:
    """Process of a server; it ends with this process, however that ends.

    Args:
        line: command line, with ``{model}`` and ``{port}``.
        model: folder of the model.
        environment: variables beside those that are handed on.

    Raises:
        ConfigError: RL020, there is no such program.

    """

    def __init__(self, line: str, model: str, environment: Mapping[str, str]) -> None:
        port = _free_port()
        words = [word.replace("{model}", model).replace("{port}", str(port)) for word in shlex.split(line)]
        self.url = f"http://127.0.0.1:{port}"
        self.answered = False
        """Whether the server has answered once."""
        self._program, program = words[0], shutil.which(words[0])
        if program is None:
            fix = "mend rl.generation.server.command; the program has to be on every node that may get a worker"
            raise ConfigError(_STARTED, "there is no such program for a server that generates", words[0], fix=fix)
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  It is open as long as the server.
        self._process = subprocess.Popen(
            [sys.executable, "-m", guard.__name__, program, *words[1:]],
            env={**handed_on(os.environ), **environment},
            stdin=subprocess.PIPE,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def check_lives(self) -> None:
        """Refuse a server that has ended.

        Raises:
            ConfigError: RL020, it has ended before it answered.
            Unreachable: it has ended later.

        """
        if (code := self._process.poll()) is None:
            return
        if self.answered:
            raise Unreachable(f"the server has ended with exit code {code}")
        fix = f"run the command by hand; it printed at last: {self._last_line()}"
        raise ConfigError(_STARTED, f"the server {self._program} has ended", f"exit code {code}", fix=fix)

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
        self._printed.close()

    def _last_line(self) -> str:
        end = self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, end - _LAST_BYTES))
        lines = self._printed.read().decode(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "nothing")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
