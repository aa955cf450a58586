"""A trainer's connection to its driver: the newest message of each kind that it has sent, and messages to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.paths import WorkDirectory, parts
from hypha_ray.bridge.transport.channel import Channel
from hypha_ray.errors import BridgeError, HyphaError

LAST_WORD_S = 1.0
"""Longest wait in seconds for the last message of a driver that has closed the connection."""


class Line:
    """The connection to the driver: a thread keeps the newest message of each kind.

    Args:
        channel: both sides have greeted each other.
        directory: directory of the files that are exchanged.

    """

    def __init__(self, channel: Channel, directory: WorkDirectory) -> None:
        self._channel = channel
        self._directory = directory
        self._changed = threading.Condition()
        self.job: pb.JobDefinition | None = None
        self.parameters: pb.Parameters | None = None
        self.assignment: pb.Assignment | None = None
        self.ending = False
        """Whether the training is completed, or this trainer has to leave."""
        self.leaving = False
        self._error: HyphaError | None = None
        self._listening = threading.Thread(target=self._listen, name="bridge-line", daemon=True)
        self._listening.start()

    def close(self) -> None:
        """Close the connection, and release the directory when nothing more arrives; may be called twice."""
        self._channel.close()
        self._listening.join()
        self._directory.close()

    @property
    def shares_files(self) -> bool:
        """Whether the driver has the same work directory."""
        return self._channel.shares_files

    def say(self, content: str, message: Any = None) -> None:
        """Send a message; if the driver has closed the connection, raise its reason."""
        with self._explained():
            self._channel.say(content, message)

    def send_file(self, path: str) -> None:
        """Send a file of the work directory; raises the same errors as `say`."""
        with self._explained():
            self._channel.send_file(path)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Replace the error of a closed connection by the reason in the driver's last message."""
        try:
            yield
        except BridgeError:
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None, LAST_WORD_S)
            if self._error is not None:
                raise self._error from None
            raise

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Wait until a condition on this connection holds; returns its value.

        Raises:
            HyphaError: the connection ended before.

        """
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._error is not None)
            found = condition()
            if not found and self._error is not None:
                raise self._error
            return found

    def next_parameters(self, after: int | None) -> pb.Parameters | None:
        """Wait for the parameters of a round later than `after`, or of any round; None at the end."""
        self.wait(lambda: self.over(after))
        return None if self.ending else self.parameters

    def over(self, round_number: int | None) -> bool:
        """Whether the driver no longer waits for a round's result."""
        return self.ending or self.newer(round_number)

    def newer(self, round_number: int | None) -> bool:
        """Whether the parameters of a later round, or for None of any round, have arrived."""
        return self.parameters is not None and (round_number is None or self.parameters.round > round_number)

    def file(self, path: str, content: pb.Content) -> Path:
        """Path of a complete file of the driver's.

        Raises:
            BridgeError: PATH001 it isn't in the work directory, PATH004 it has another size.

        """
        found = self._directory.path.joinpath(*parts(path))
        size = found.stat().st_size
        if size != content.size:
            raise BridgeError("PATH004", f"{path} has another size", str(size), f"{content.size} bytes")
        return found

    def _listen(self) -> None:
        try:
            while not self.ending or self.leaving:
                content, message = self._channel.hear()
                with self._changed:
                    self._take(content, message)
                    self._changed.notify_all()
        except HyphaError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take(self, content: str, message: Any) -> None:
        match content:
            case "job":
                self.job = message
            case "parameters":
                self.parameters = message
            case "assignment":
                self.assignment = message
            case "leave":
                self.ending = self.leaving = True
            case "done":
                self.ending = True
                self.leaving = False
