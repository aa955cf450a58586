"""Master of an island: it takes batches through the graph of a step by requests, and sees no arrays but prompts.

fetch ─► [calls of a level] ─flush─► [calls of the next level] ─flush─► … ─► clear_data_cache

The readiness rule is that of ReaLHF's buffer (arXiv:2406.14088): a call may begin with the samples that have all of its
keys, the oldest first. A sample leaves when every call is through with it.

Rollout workers may respond to batches while earlier ones are trained on (AReaL, arXiv:2505.24298):

     step              k                  k+1                 k+2
     rollout workers   batch k+1 ───────► batch k+2 ───────► batch k+3         staleness 1
     trainer           batch k            batch k+1           batch k+2

A batch goes out as many steps ahead as the staleness allows, with the weights of that moment. So no speed of a worker
decides which weights respond to a prompt, and a batch that is sent again gets the same responses.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from hypha_ray.rl.dataflow.graph import Call, Graph, Locations, Mesh, balanced, moves, windows
from hypha_ray.rl.dataflow.requests import (
    Hook,
    Meta,
    ModelRequest,
    Name,
    Pending,
    R,
    Reallocate,
    Reply,
    RequestQueue,
    Sample,
    Shard,
    Transfer,
    Transport,
)


class Buffer:
    """Samples of a step on their way through the graph. It holds no arrays.

    Args:
        graph: calls that each sample goes through once.

    """

    def __init__(self, graph: Graph) -> None:
        self._calls = [call.name for call in graph.calls]
        self._ids: dict[str, None] = {}  # in the order in which they came, the oldest first
        self._locations: dict[str, dict[str, Shard]] = defaultdict(dict)  # by key and id
        self._tokens: dict[str, dict[str, int]] = defaultdict(dict)  # by key and id
        self._begun: dict[str, set[str]] = defaultdict(set)  # by call
        self._ended: dict[str, set[str]] = defaultdict(set)  # by call

    def __len__(self) -> int:
        return len(self._ids)

    def put(self, meta: Meta, shard: Shard) -> None:
        """Add ids that a fetch has brought.

        Raises:
            ValueError: an id is there already.

        """
        for name in meta.ids:
            if name in self._ids:
                raise ValueError(f"sample {name} was fetched twice")
        self._ids |= dict.fromkeys(meta.ids)
        self.amend(meta, shard)

    def amend(self, meta: Meta, shard: Shard) -> None:
        """Add keys that a call has made."""
        for key in meta.lengths:
            self._locations[key].update(dict.fromkeys(meta.ids, shard))
            self._tokens[key].update(zip(meta.ids, meta.tokens(key), strict=True))

    def ready(self, call: Call) -> tuple[str, ...]:
        """Return the ids that a call may begin with and hasn't begun with, the oldest first."""
        ids = self._ids.keys() - self._begun[call.name]
        for key in call.takes:
            ids &= self._locations[key].keys()
        return tuple(name for name in self._ids if name in ids)

    def begin(self, call: Call, ids: Iterable[str]) -> None:
        """Record that a call begins with ids."""
        self._begun[call.name].update(ids)

    def end(self, call: Call, ids: Iterable[str]) -> tuple[str, ...]:
        """Record that a call has ended with ids; return the ids that all calls have ended with, and drop them."""
        self._ended[call.name].update(ids)
        ended_by_all = set.intersection(*[self._ended[name] for name in self._calls])
        finished = tuple(name for name in self._ids if name in ended_by_all)
        if not finished:
            return ()
        columns: list[dict[str, Any]] = [self._ids, *self._locations.values(), *self._tokens.values()]
        for column in columns:
            for name in finished:
                column.pop(name, None)
        for ids_of_call in (*self._begun.values(), *self._ended.values()):
            ids_of_call.difference_update(finished)
        return finished

    @property
    def locations(self) -> Locations:
        """Shards of all ids under each key."""
        return self._locations

    def tokens(self, ids: Iterable[str], key: str) -> list[int]:
        """Return the tokens that ids have under a key."""
        return [self._tokens[key][name] for name in ids]


@dataclass(frozen=True)
class Extras:
    """Parts of a call's requests that don't follow from the graph."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values that the operation needs beside its samples."""
    before: tuple[Hook, ...] = ()
    """Hooks between the transfer and the operation."""
    after: tuple[Hook, ...] = ()
    """Hooks after the operation."""


class Master(Generic[R]):
    """Sender of requests, which follows their replies.

    Args:
        meshes: model workers of each role.
        queue: queue of requests to them.
        numbers: numbers of requests, shared with all others that send requests to them.

    """

    def __init__(self, meshes: Mapping[str, Mesh], queue: RequestQueue[R], numbers: Iterator[int]) -> None:
        self._meshes = dict(meshes)
        self._queue = queue
        self._numbers = numbers
        self.collectives: Counter[str] = Counter()
        """Number of collectives of each kind that would make the transfers of the latest batch."""
        self._finished: tuple[str, ...] = ()
        """Ids that all calls have ended with. They are cleared before the next batch: if a worker is found dead then,
        no training is lost."""

    def renew(self, queue: RequestQueue[R]) -> None:
        """Go on with another queue, because requests of this one were lost with a worker."""
        self._queue = queue

    def ask(self, name: Name, role: str, **arguments: Any) -> Reply:
        """Send a request without samples to the workers of a role; return the reply of the first one."""
        request_number = next(self._numbers)
        workers = self._meshes[role].workers
        requests = [ModelRequest(request_number, name, worker, role, arguments=arguments) for worker in workers]
        pending = self._queue.request(*requests)
        self._queue.flush()
        self._wait_for(pending)
        [first_reply] = [reply for reply in pending.replies if reply.worker == workers[0]]
        return first_reply

    def traverse(
        self,
        graph: Graph,
        batch: Sample,
        extras: Mapping[str, Extras],
        streamed: Iterable[Reply] = (),
        keeps: bool = False,
    ) -> dict[str, tuple[Reply, ...]]:
        """Take a batch through a graph.

        Args:
            graph: calls of the step.
            batch: prompts with the keys of the dataset.
            extras: additions to calls, by their names.
            streamed: replies of rollout workers, whose keys the batch has from the beginning.
            keeps: whether the samples stay until they are dropped, for another graph.

        Returns:
            Replies of the workers, by the names of the calls.

        Raises:
            WorkerLostError: a worker died.
            ClusterError: a worker was silent.

        """
        self.collectives.clear()
        buffer = Buffer(graph)
        replies: dict[str, tuple[Reply, ...]] = {}
        self._fetch(graph, batch, buffer)
        _amend(buffer, streamed)
        transferred: set[tuple[int, Shard]] = set()
        running: dict[int, Call] = {}  # by the number of their requests
        begun: set[str] = set()
        while len(replies) < len(graph.calls):
            for call in graph.calls:
                ids = buffer.ready(call)
                if call.name in begun or len(ids) < len(batch.ids):
                    continue
                pending = self._call(call, ids, buffer, transferred, extras.get(call.name, Extras()))
                running[pending.requests[0].number] = call
                buffer.begin(call, ids)
                begun.add(call.name)
            self._queue.flush()
            pending = self._queue.wait()
            call = running.pop(pending.requests[0].number)
            self._add_keys(buffer, call, pending)
            replies[call.name] = tuple(sorted(pending.replies, key=lambda reply: reply.worker))
            if not keeps:
                self._finished += buffer.end(call, batch.ids)
        return replies

    def _fetch(self, graph: Graph, batch: Sample, buffer: Buffer) -> None:
        """Give each copy of the first call's model its window of the batch; finished ids are cleared meanwhile."""
        first_call = graph.levels[0][0]
        mesh = self._meshes[first_call.role]
        request_number = next(self._numbers)
        requests: list[ModelRequest] = []
        nonempty = filter(len, windows(len(batch.ids), mesh.data))
        for head, window in zip(mesh.heads, nonempty, strict=False):  # Fewer prompts than copies leave some without.
            part = batch.take(batch.ids[window.start : window.stop])
            requests.append(ModelRequest(request_number, "fetch", head, ids=part.ids, arguments={"sample": part}))
        clearing = self._clear()
        pending = self._queue.request(*requests)
        self._wait_for(*clearing, pending)
        self._finished = ()
        for reply in sorted(pending.replies, key=lambda reply: mesh.heads.index(reply.worker)):
            assert reply.meta is not None
            buffer.put(reply.meta, Shard(reply.worker, request_number))

    def _call(
        self, call: Call, ids: Sequence[str], buffer: Buffer, transferred: set[tuple[int, Shard]], extras: Extras
    ) -> Pending:
        """Queue the requests of a call until the next flush."""
        mesh = self._meshes[call.role]
        request_number = next(self._numbers)
        ids_of_workers: dict[int, tuple[str, ...]] = {}
        for rank, part in enumerate(_parts(call, ids, buffer, mesh)):
            if part:
                ids_of_workers |= dict.fromkeys(mesh.copy(rank), part)
        plan = moves(buffer.locations, ids_of_workers, call.takes, transferred)
        self.collectives += plan.counts
        requests: list[ModelRequest] = []
        for worker, part in ids_of_workers.items():
            shards = plan.shards[worker]
            transferred.update((worker, shard) for shard in shards)
            request = ModelRequest(
                number=request_number,
                name=call.op,
                worker=worker,
                role=call.role,
                ids=part,
                takes=call.takes,
                before=(Transfer(shards), *extras.before),
                after=extras.after,
                arguments=extras.arguments,
            )
            requests.append(request)
        return self._queue.request(*requests)

    def _add_keys(self, buffer: Buffer, call: Call, pending: Pending) -> None:
        """Add to the buffer the keys that the heads of the copies have made."""
        heads = self._meshes[call.role].heads
        for reply in pending.replies:
            if reply.meta is not None and reply.worker in heads:
                buffer.amend(reply.meta, Shard(reply.worker, reply.request))

    def keep(self, worker: int, sample: Sample) -> Reply:
        """Store samples that were made elsewhere with a worker, until their ids are cleared."""
        request = ModelRequest(next(self._numbers), "fetch", worker, ids=sample.ids, arguments={"sample": sample})
        pending = self._queue.request(request)
        self._wait_for(pending)
        [reply] = pending.replies
        return reply

    def drop(self, ids: Sequence[str]) -> None:
        """Let workers drop ids that were kept, with those that a graph has finished last."""
        self._finished += tuple(ids)

    def clear(self) -> None:
        """Have workers drop the ids that all calls have ended with."""
        self._wait_for(*self._clear())
        self._finished = ()

    def _clear(self) -> list[Pending]:
        if not self._finished:
            return []
        request_number = next(self._numbers)
        workers: set[int] = set()
        for mesh in self._meshes.values():
            workers.update(mesh.workers)
        ids = self._finished
        requests = [ModelRequest(request_number, "clear_data_cache", worker, ids=ids) for worker in sorted(workers)]
        return [self._queue.request(*requests)]

    def _wait_for(self, *requests: Pending) -> None:
        while not all(pending.done for pending in requests):
            self._queue.wait()


def _amend(buffer: Buffer, replies: Iterable[Reply]) -> None:
    """Add the keys in replies to a buffer."""
    for reply in replies:
        assert reply.meta is not None
        buffer.amend(reply.meta, Shard(reply.worker, reply.request))


def _parts(call: Call, ids: Sequence[str], buffer: Buffer, mesh: Mesh) -> list[tuple[str, ...]]:
    """Divide ids among the copies of a model: generation by their number, other calls by their tokens."""
    if mesh.data == 1:
        return [tuple(ids)]
    if call.op == "generate":
        return [tuple(ids[window.start : window.stop]) for window in windows(len(ids), mesh.data)]
    totals = [0] * len(ids)
    for key in call.takes:
        for index, tokens in enumerate(buffer.tokens(ids, key)):
            totals[index] += tokens
    parts: list[tuple[str, ...]] = []
    for indices in balanced(totals, mesh.data):
        parts.append(tuple(ids[index] for index in indices))
    return parts


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
        first_batch = self._ahead[names[0]]
        first_batch.wait()
        del self._ahead[names[0]]
        return tuple(sorted(first_batch.pending.replies, key=lambda reply: reply.worker))

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
        request_number = next(self._numbers)
        queue.request(ModelRequest(fetch, "fetch", 0, ids=batch.ids, arguments={"sample": batch}))
        queue.wait()
        call = self._call
        before = (Transfer((Shard(0, fetch),)), Reallocate("actor", call.role))
        requests: list[ModelRequest] = []
        for worker, window in zip(self._workers, windows(len(batch.ids), len(self._workers)), strict=True):
            ids = batch.ids[window.start : window.stop]
            if ids:
                requests.append(
                    ModelRequest(
                        request_number, call.op, worker, call.role, ids, call.takes, before, arguments=arguments
                    )
                )
        return _Batch(batch.ids, tuple(requests), queue, _send(queue, requests))

    def _clear(self, batch: _Batch[R]) -> None:
        """Let workers drop a batch when they have answered it."""
        batch.wait()
        request_number = next(self._numbers)
        workers = [0, *(request.worker for request in batch.requests)]
        requests = [ModelRequest(request_number, "clear_data_cache", worker, ids=batch.ids) for worker in workers]
        clearing = batch.queue.request(*requests)
        while not clearing.done:
            batch.queue.wait()


def _send(queue: RequestQueue[R], requests: Sequence[ModelRequest]) -> Pending:
    pending = queue.request(*requests)
    queue.flush()
    return pending
