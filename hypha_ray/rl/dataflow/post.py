"""Sending of requests: those that need no other worker at once, all others together at a flush.

A flush sends the held requests one after the other without a pause, small groups first. A worker runs its calls in the
order in which one sender sends them. So any two workers see their common requests in one order, and collectives inside
them can't wait for each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from hypha_ray.errors import ClusterError
from hypha_ray.rl.dataflow.requests import Reply, Request

R = TypeVar("R", bound=Hashable)
"""Reference to a reply that may not be there yet."""


class Transport(Protocol[R]):
    """Way to the model workers: a call in this process, or of a Ray actor."""

    def send(self, request: Request) -> R:
        """Send a request, and with it the shards of its transfer; return a reference to the reply."""

    def receive(self, replies: Sequence[R], deadline_s: float) -> tuple[R, Reply]:
        """Wait for the first of some replies.

        Raises:
            ClusterError: none came within the deadline, or a worker died.

        """


class WorkerLostError(ClusterError):
    """A model worker has died; nothing was trained on the batch that was under way."""


@dataclass
class Pending:
    """Requests of one number, until all of their workers have answered."""

    requests: tuple[Request, ...]
    """One request for each worker."""
    replies: list[Reply] = field(default_factory=list)
    """Replies that have come."""

    @property
    def done(self) -> bool:
        """Whether all workers have answered."""
        return len(self.replies) == len(self.requests)


class Post(Generic[R]):
    """Requests of one master on their way.

    Args:
        transport: way to the model workers.
        deadline_s: longest time in seconds to wait for a reply.

    """

    def __init__(self, transport: Transport[R], deadline_s: float) -> None:
        self._transport = transport
        self._deadline_s = deadline_s
        self._held: list[Pending] = []
        self._sent: dict[R, Pending] = {}

    def request(self, *requests: Request) -> Pending:
        """Send the requests of one number if they need no flush; otherwise hold them until the next one."""
        pending = Pending(requests)
        if requests[0].at_once:
            self._send(pending)
        else:
            self._held.append(pending)
        return pending

    def flush(self) -> None:
        """Send all held requests, those to few workers first, and otherwise in the order in which they were made."""
        held = self._held
        self._held = []
        for pending in sorted(held, key=lambda pending: len(pending.requests)):
            self._send(pending)

    def _send(self, pending: Pending) -> None:
        for request in pending.requests:
            self._sent[self._transport.send(request)] = pending

    def wait(self) -> Pending:
        """Wait until one more request is answered by all of its workers, and return it.

        Raises:
            ClusterError: no reply came within the deadline, or a worker died.

        """
        while True:
            reference, reply = self._transport.receive(list(self._sent), self._deadline_s)
            pending = self._sent.pop(reference)
            pending.replies.append(reply)
            if pending.done:
                return pending
