"""A trainer's line to its driver: the newest that it has said of each kind, and what is said to it."""

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
"""Longest wait for the last word of a driver that has hung up."""


class Line:
    """The line to the driver: the newest that it has said of each kind, to which a thread listens, and what is said.

    Args:
        channel: both sides have greeted each other.
        directory: where its files are.

    """

    def __init__(self, channel: Channel, directory: WorkDirectory) -> None:
        self._channel, self._directory = channel, directory
        self._changed = threading.Condition()
        self.job: pb.JobDefinition | None = None
        self.parameters: pb.Parameters | None = None
        self.assignment: pb.Assignment | None = None
        self.ending = False
        """The training is completed, or this trainer has to leave."""
        self.leaving = False
        self._error: HyphaError | None = None
        self._listening = threading.Thread(target=self._listen, name="bridge-line", daemon=True)
        self._listening.start()

    def close(self) -> None:
        """Hang up, and let go of the directory once nothing comes in any more; may come twice."""
        self._channel.close()
        self._listening.join()
        self._directory.close()

    @property
    def shares_files(self) -> bool:
        """Whether the driver has the same work directory."""
        return self._channel.shares_files

    def say(self, content: str, message: Any = None) -> None:
        """Say something; raises why the driver has hung up, if it has."""
        with self._explained():
            self._channel.say(content, message)

    def send_file(self, path: str) -> None:
        """Send a file of the work directory; raises as `say`."""
        with self._explained():
            self._channel.send_file(path)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """If the driver has hung up, its last word says why."""
        try:
            yield
        except BridgeError:
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None, LAST_WORD_S)
            if self._error is not None:
                raise self._error from None
            raise

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Wait until a condition on this line holds; returns its value.

        Raises:
            HyphaError: the connection has ended before.

        """
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._error is not None)
            found = condition()
            if not found and self._error is not None:
                raise self._error
            return found

    def next_parameters(self, after: int) -> pb.Parameters | None:
        """The parameters of a round after that one, once they are there; None at the end."""
        self.wait(lambda: self.over(after))
        return None if self.ending else self.parameters

    def over(self, round_number: int) -> bool:
        """Whether the driver waits for nothing more of a round."""
        return self.ending or self.newer(round_number)

    def newer(self, round_number: int) -> bool:
        """Whether the parameters of a later round are there."""
        return self.parameters is not None and self.parameters.round > round_number

    def file(self, path: str, content: pb.Content) -> Path:
        """A file of the driver's, which is there whole.

        Raises:
            BridgeError: PATH001 it is none of the work directory's, PATH004 it has another size.

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
                self.ending, self.leaving = True, False
