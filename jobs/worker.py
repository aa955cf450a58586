"""Join a running job from a machine that is no Ray node: take a place that waits for a trainer from elsewhere.

    python jobs/worker.py --connect 192.0.2.7:61001 --token-file worker-2.token --authority ca.pem

The job has such a place where one of its `bridge.commands` is empty. The token is in its run directory, under bridge/.
"""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hypha_ray.config.entry_point import run
from hypha_ray.config.options import parse_options
from hypha_ray.errors import BridgeError, ConfigError

if TYPE_CHECKING:
    from hypha_ray.bridge.client import Trainer

AGAIN_S = 2.0
"""Wait before another attempt to connect."""


@dataclass(frozen=True)
class Worker:
    """Join a running job from a machine that is no Ray node."""

    connect: str
    """host:port of the job's bridge"""
    token_file: Path | None = None
    """the worker's token, readable by its owner alone; default: HYPHA_BRIDGE_TOKEN_FILE"""
    authority: Path | None = None
    """certificates that the job's may be signed by, PEM; needed for another machine"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one"""
    patience_s: float = 60.0
    """how long to try to connect, at first and when the job has dropped the connection"""


def main() -> None:
    """Join, train, and join again if the connection is lost."""
    arguments = parse_options(Worker, __doc__, sys.argv[1:])
    if not 0 <= arguments.patience_s < math.inf:
        raise ConfigError("CFG003", "--patience-s is out of range", str(arguments.patience_s), "0 and up", "see --help")
    _check_access(arguments)
    # Imported before the connection is made: this process is silent while torch is loaded.
    from hypha_ray.worker.bridged.own_trainer import train

    while True:
        with _joined(arguments) as trainer:
            print(f"joined run {trainer.job['run']} as worker {trainer.job['worker']}", flush=True)
            try:
                train(trainer, arguments.device)
            except BridgeError as error:
                print(f"lost: {error}", file=sys.stderr, flush=True)
                continue
        print("the training is completed")
        return


def _check_access(arguments: Worker) -> None:
    """Refuse an address or a token that can't be used, before libraries are loaded.

    Raises:
        ConfigError: CFG020 not an address, CFG021 no token is given, SEC001 another machine without --authority,
            SEC005 the certificates can't be used.
        AuthenticationError: as `read_token`.

    """
    from hypha_ray.bridge.access import UNIX, client_tls, read_token, split

    token_file = arguments.token_file or os.environ.get("HYPHA_BRIDGE_TOKEN_FILE")
    if not token_file:
        raise ConfigError("CFG021", "no file with the token", fix="give --token-file, or set HYPHA_BRIDGE_TOKEN_FILE")
    read_token(Path(token_file))
    authority = arguments.authority or os.environ.get("HYPHA_BRIDGE_CA_FILE")
    if authority:
        client_tls(Path(authority))
    if not arguments.connect.startswith(UNIX):
        split(arguments.connect, encrypted=bool(authority))


def _joined(arguments: Worker) -> Trainer:
    from hypha_ray.bridge.client import Trainer  # Not before the command line is known to be right.

    deadline = time.monotonic() + arguments.patience_s
    while True:
        try:
            return Trainer.connect("worker", arguments.connect, arguments.token_file, authority=arguments.authority)
        except BridgeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(AGAIN_S)


if __name__ == "__main__":
    run(main)
