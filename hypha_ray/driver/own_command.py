"""Command that started this process."""

from __future__ import annotations

import sys
from pathlib import Path

from hypha_ray.redaction import redacted


def program() -> list[str]:
    """Return the words before the arguments with which this process was started."""
    script = sys.argv[0]
    words = sys.orig_argv
    if Path(words[1] if len(words) > 1 else "").name == "hypha-ray":
        return ["hypha-ray", Path(script).stem]
    if words[1:3] == ["-m", "hypha_ray"]:
        return [words[0], "-m", "hypha_ray", Path(script).stem]
    return [words[0], script]


def own_command() -> list[str]:
    """Return the command that started this job script, as a user types it, without the secrets of URLs."""
    return [*program(), *map(redacted, sys.argv[1:])]
