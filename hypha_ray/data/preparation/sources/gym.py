"""Tasks of the package reasoning-gym. Entries are drawn in a process of their own, whose hashes of texts are fixed.

Some tasks draw from sets of texts, whose order follows these hashes: by default another one in each process.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from hypha_ray.data.preparation.options import GYM
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.types.json_records import from_json, to_json

_KEYS = ("answer", "question", "metadata")
"""Parts of an entry that its own scoring takes."""


def gym_entries(name: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Draw entries of a task: the same ones for a seed, in whatever process.

    Raises:
        ConfigError: PREP008, the package isn't installed.
        DataError: DATA030, it has no such task, or can't draw from it.

    """
    _require(name)
    command = [sys.executable, "-P", "-c", f"from {__name__} import _draw; _draw()", name, str(seed), str(count)]
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryFile() as printed:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=printed) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield from_json(line)
        printed.seek(0)
        said = printed.read().decode(errors="replace").strip().rpartition("\n")[2]
    if process.returncode:
        raise DataError("DATA030", f"reasoning-gym can't draw from its task {name!r}", said, fix="name another task")


def _require(name: str) -> None:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        got = " ".join(str(error).split())
        fix = "pip install 'hypha_ray[rl]'"
        raise ConfigError("PREP008", f"--source {GYM}{name} needs the package reasoning-gym", got, fix=fix) from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        fix = f"did you mean {near[0]!r}?" if near else "name one of them"
        raise DataError("DATA030", f"reasoning-gym has no task {name!r}", name, ", ".join(sorted(DATASETS)), fix)


def _draw() -> None:
    """Write the entries that the command line asks for to standard output, a line each."""
    import reasoning_gym

    name = sys.argv[1]
    seed = int(sys.argv[2])
    count = int(sys.argv[3])
    with os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogatepass") as lines:
        os.dup2(2, 1)  # The package may print.
        for entry in reasoning_gym.create_dataset(name, size=count, seed=seed):
            lines.write(to_json({key: entry[key] for key in _KEYS if entry[key] is not None}) + "\n")
