"""Client of the bridge, for trainers outside Ray. Needs protobuf, numpy and safetensors, but neither ray nor torch.

    with Trainer.connect("my-trainer") as trainer:
        model = build(trainer.job["model"])
        trainer.ready(device="cpu", parameters=count(model))
        for work in trainer.rounds():
            load(model, work.parameters())
            work.merged()
            if work.evaluates:
                work.evaluated(*evaluate(model, work.evaluation()))
            for batch in work.batches():
                work.step(train(model, batch, work.learning_rate))
            work.hand_over(weights(model))

Parameters and batches are numpy arrays by name; the first axis of a batch counts samples.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.access import client_tls, dial, read_token
from hypha_ray.bridge.channel import Channel
from hypha_ray.bridge.paths import TRAINER, Scratch, WorkDirectory, sweep
from hypha_ray.bridge.round import DriverConnection, Round
from hypha_ray.errors import ConfigError

ENVIRONMENT = {
    "HYPHA_BRIDGE_SOCKET": "address of the driver",
    "HYPHA_BRIDGE_TOKEN_FILE": "file with the token",
    "HYPHA_BRIDGE_WORK_DIR": "the driver's work directory, if this process shares it",
    "HYPHA_BRIDGE_CA_FILE": "trusted certificates, PEM",
}
"""Environment variables that a driver sets for a trainer that it starts."""
FOLDERS = ("parameters", "slices", "updates")
"""Names of the folders in a work directory."""


class Trainer:
    """A connection to a driver. A thread receives the driver's messages and keeps them until they are needed.

    Args:
        channel: an authenticated connection.
        directory: the driver's work directory, or a local one.
        scratch: the local directory, which is removed with the connection; None if the driver's is used.

    """

    def __init__(self, channel: Channel, directory: Path, scratch: Scratch | None = None) -> None:
        self._channel = channel
        self._scratch = scratch
        self._directory = WorkDirectory(directory)
        channel.attach(self._directory, lambda path, size: None)
        self._driver = DriverConnection(channel, self._directory)
        channel.send_signs_of_life()
        message = self._driver.wait(lambda: self._driver.job)
        job_file = self._driver.file(message.path, message.content)
        self.job: dict[str, Any] = json.loads(job_file.read_bytes())
        """Definition of the job; see docs/bridge.md."""

    @classmethod
    def connect(
        cls,
        name: str,
        address: str | None = None,
        token_file: str | Path | None = None,
        work_dir: str | Path | None = None,
        authority: str | Path | None = None,
    ) -> Trainer:
        """Join a job. Arguments that are None come from the environment, see `ENVIRONMENT`.

        Args:
            name: name of this trainer in the driver's log.
            address: ``host:port`` or ``unix:PATH``.
            token_file: file with the token, readable only by its owner.
            work_dir: the driver's work directory; None: files are sent over the connection.
            authority: certificates of the authorities that are trusted to sign the driver's, PEM.

        Raises:
            ConfigError: CFG021 no address or no token file.
            AuthenticationError: the driver has another token.
            BridgeError: the driver can't be reached.

        """
        address = _given(address, "HYPHA_BRIDGE_SOCKET")
        token_file = _given(token_file, "HYPHA_BRIDGE_TOKEN_FILE")
        work_dir = work_dir or os.environ.get("HYPHA_BRIDGE_WORK_DIR")
        authority = authority or os.environ.get("HYPHA_BRIDGE_CA_FILE")
        token = read_token(Path(token_file))
        tls = client_tls(Path(authority)) if authority else None
        channel = Channel(dial(address, tls), "trainer", token)
        channel.greet(name, shares_files=work_dir is not None)
        scratch = None
        try:
            if work_dir is None:
                sweep()
                scratch = Scratch(TRAINER)
                for folder in FOLDERS:
                    (scratch.path / folder).mkdir()
            return cls(channel, scratch.path if scratch is not None else Path(str(work_dir)), scratch)
        except BaseException:
            channel.close()
            if scratch is not None:
                scratch.close()
            raise

    def ready(self, device: str, parameters: int) -> None:
        """Report that the model is built."""
        self._driver.send("ready", pb.Ready(device=device, parameters=parameters))

    def rounds(self) -> Iterator[Round]:
        """Yield the rounds of this trainer, each when its parameters have arrived; ends with the training.

        Raises:
            BridgeError: the driver is gone.

        """
        driver = self._driver
        after = None
        while (message := driver.next_parameters(after)) is not None:
            after = message.round
            yield Round(driver, self._directory, message, self.job["report_every_s"])
        if driver.leaving:
            driver.send("left")

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._driver.close()
        if self._scratch is not None:
            self._scratch.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _given(value: Any, variable: str) -> Any:
    value = value or os.environ.get(variable)
    if not value:
        problem = f"no {ENVIRONMENT[variable]}"
        raise ConfigError("CFG021", problem, fix=f"set {variable}, or let a job start this program")
    return value
