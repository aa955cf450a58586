"""The token that Ray's clusters on this machine ask for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def make_token() -> None:
    """Make one, if there is none: for a head that something else than `ray.init` starts, which would end without.

    Call it before several processes want one at the same time: each would make its own.

    Raises:
        CalledProcessError: Ray couldn't.

    """
    if not (Path.home() / ".ray" / "auth_token").exists():
        command = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
        subprocess.run(command, capture_output=True, check=True)
