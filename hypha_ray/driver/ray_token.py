"""Token of Ray's clusters on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def make_token() -> None:
    """Make a token if there is none: a head that isn't started by `ray.init` would end without one.

    To be called before several processes need it at the same time, because each would make its own.

    Raises:
        CalledProcessError: Ray can't make one.

    """
    if not (Path.home() / ".ray" / "auth_token").exists():
        command = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
        subprocess.run(command, capture_output=True, check=True)
