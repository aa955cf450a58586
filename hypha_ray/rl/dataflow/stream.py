"""Batches that rollout workers respond to while earlier batches are trained on (AReaL, arXiv:2505.24298).

     step              k                  k+1                 k+2
     rollout workers   batch k+1 ───────► batch k+2 ───────► batch k+3         staleness 1
     trainer           batch k            batch k+1           batch k+2

A batch goes out as many steps ahead as the staleness allows, with the weights of that moment. So no speed of a worker
decides which weights respond to a prompt, and a batch that is sent again gets the same responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from hypha_ray.rl.dataflow.graph import Call
from hypha_ray.rl.dataflow.plan import Shard, windows
from hypha_ray.rl.dataflow.requests import (
    ModelRequest,
    Pending,
    R,
    Reallocate,
    Reply,
    RequestQueue,
    Transfer,
    Transport,
)
from hypha_ray.rl.dataflow.sample import Sample


@dataclass
class _Batch(Generic[R]):
    """Batch on its way."""

    ids: tuple[str, ...]
    requests: tuple[ModelRequest, ...]
    queue: RequestQueue[R]
    pending: Pending

    def wait(self) -> None:
        """Wait until all workers have answered."""
        while not self.pending.done:
            self.queue.wait()


class StreamDataset(Generic[R]):
    """Dataset of an asynchronous island. It holds no arrays: samples stay with the rollout workers that made them.

    Args:
        transport: way to the model workers.
        workers: numbers of the rollout workers.
        call: call that rollout workers answer.
        numbers: numbers of requests, shared with all others that send requests by this transport.
        deadline_s: longest time in seconds to wait for a reply.

    """

    def __init__(
        self, transport: Transport[R], workers: Sequence[int], call: Call, numbers: Iterator[int], deadline_s: float
    ) -> None:
        self._transport = transport
        self._workers = tuple(workers)
        self._call = call
        self._numbers = numbers
        self._deadline_s = deadline_s
        self._ahead: dict[tuple[str, ...], _Batch[R]] = {}
        self._dropped: list[_Batch[R]] = []

    def fetch(self, batches: Sequence[Sample], version: int, round: int) -> tuple[Reply, ...]:
        """Send out the batches that aren't on their way, wait for the first one, and drop all batches but these.

        Args:
            batches: prompts of the batch that is trained on next, and of the batches after it.
            version: version of the weights that batches sent out now are responded with.
            round: round of the run.

        Returns:
            Replies of the workers for the first batch.

        Raises:
            WorkerLostError: a worker died.
            ClusterError: a worker didn't answer in time.

        """
        names = [batch.ids for batch in batches]
        self._drop([ids for ids in self._ahead if ids not in names])
        while self._dropped:  # Workers begin with nothing new before these are done, so that is no time lost.
            self._clear(self._dropped[0])
            del self._dropped[0]
        for batch in batches:
            if batch.ids not in self._ahead:
                self._ahead[batch.ids] = self._begin(batch, {"version": version, "round": round})
        first = self._ahead[names[0]]
        first.wait()
        del self._ahead[names[0]]
        return tuple(sorted(first.pending.replies, key=lambda reply: reply.worker))

    def begin_anew(self) -> None:
        """Drop everything: the weights have been replaced."""
        self._drop(list(self._ahead))

    def send_again(self) -> None:
        """Send all unanswered requests again, with the weights of the first time, because a worker was replaced."""
        for batch in (*self._ahead.values(), *self._dropped):
            if not batch.pending.done:
                batch.queue = RequestQueue(self._transport, self._deadline_s)
                batch.pending = _send(batch.queue, batch.requests)

    def _drop(self, names: Sequence[tuple[str, ...]]) -> None:
        self._dropped += [self._ahead.pop(ids) for ids in names]

    def _begin(self, batch: Sample, arguments: Mapping[str, int]) -> _Batch[R]:
        """Store the prompts with worker 0, and let each rollout worker respond to its window of them."""
        queue = RequestQueue(self._transport, self._deadline_s)
        fetch = next(self._numbers)
        number = next(self._numbers)
        queue.request(ModelRequest(fetch, "fetch", 0, ids=batch.ids, arguments={"sample": batch}))
        queue.wait()
        call = self._call
        before = (Transfer((Shard(0, fetch),)), Reallocate("actor", call.role))
        requests: list[ModelRequest] = []
        for worker, window in zip(self._workers, windows(len(batch.ids), len(self._workers)), strict=True):
            ids = batch.ids[window.start : window.stop]
            if ids:
                requests.append(
                    ModelRequest(number, call.op, worker, call.role, ids, call.takes, before, arguments=arguments)
                )
        return _Batch(batch.ids, tuple(requests), queue, _send(queue, requests))

    def _clear(self, batch: _Batch[R]) -> None:
        """Let workers drop a batch when they have answered it."""
        batch.wait()
        number = next(self._numbers)
        workers = [0, *(request.worker for request in batch.requests)]
        requests = [ModelRequest(number, "clear_data_cache", worker, ids=batch.ids) for worker in workers]
        clearing = batch.queue.request(*requests)
        while not clearing.done:
            batch.queue.wait()


def _send(queue: RequestQueue[R], requests: Sequence[ModelRequest]) -> Pending:
    pending = queue.request(*requests)
    queue.flush()
    return pending
