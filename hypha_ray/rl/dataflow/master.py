"""Master of an island: it takes batches through the graph of a step by requests, and sees no arrays but prompts.

fetch ─► [calls of a level] ─flush─► [calls of the next level] ─flush─► … ─► clear_data_cache

The readiness rule is that of ReaLHF's buffer (arXiv:2406.14088): a call may begin with the samples that have all of its
keys, the oldest first. A sample leaves when every call is through with it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from hypha_ray.rl.dataflow.graph import Call, Graph
from hypha_ray.rl.dataflow.plan import Mesh, Shard, Where, balanced, moves, windows
from hypha_ray.rl.dataflow.requests import Hook, Name, Pending, Post, R, Reply, Request, Transfer
from hypha_ray.rl.dataflow.sample import Meta, Sample


class Buffer:
    """Samples of a step on their way through the graph. It holds no arrays.

    Args:
        graph: calls that each sample goes through once.

    """

    def __init__(self, graph: Graph) -> None:
        self._calls = [call.name for call in graph.calls]
        self._ids: dict[str, None] = {}  # in the order in which they came, the oldest first
        self._where: dict[str, dict[str, Shard]] = defaultdict(dict)  # by key and id
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
            self._where[key].update(dict.fromkeys(meta.ids, shard))
            self._tokens[key].update(zip(meta.ids, meta.tokens(key), strict=True))

    def ready(self, call: Call) -> tuple[str, ...]:
        """Return the ids that a call may begin with and hasn't begun with, the oldest first."""
        able = self._ids.keys() - self._begun[call.name]
        for key in call.takes:
            able &= self._where[key].keys()
        return tuple(name for name in self._ids if name in able)

    def begin(self, call: Call, ids: Iterable[str]) -> None:
        """Note that a call has been given ids."""
        self._begun[call.name].update(ids)

    def end(self, call: Call, ids: Iterable[str]) -> tuple[str, ...]:
        """Note that a call is through with ids; return those that all calls are through with, which leave."""
        self._ended[call.name].update(ids)
        through = set.intersection(*(self._ended[name] for name in self._calls))
        over = tuple(name for name in self._ids if name in through)
        columns: list[dict[str, Any]] = [self._ids, *self._where.values(), *self._tokens.values()]
        for column in columns if over else ():
            for name in over:
                column.pop(name, None)
        for calls in (*self._begun.values(), *self._ended.values()):
            calls.difference_update(over)
        return over

    @property
    def where(self) -> Where:
        """Places of all ids under each key."""
        return self._where

    def tokens(self, ids: Iterable[str], key: str) -> list[int]:
        """Return the tokens that ids have under a key."""
        return [self._tokens[key][name] for name in ids]


@dataclass(frozen=True)
class Extras:
    """Parts of a call's requests that don't follow from the graph."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values that the operation needs beside its samples."""
    before: tuple[Hook, ...] = ()
    """Hooks before the operation, after its transfer."""
    after: tuple[Hook, ...] = ()
    """Hooks after the operation."""


class Master(Generic[R]):
    """Sends requests and follows their replies.

    Args:
        meshes: model workers of each role.
        post: way to them.
        numbers: numbers of requests, shared with all others that send requests to them.

    """

    def __init__(self, meshes: Mapping[str, Mesh], post: Post[R], numbers: Iterator[int]) -> None:
        self._meshes = dict(meshes)
        self._post = post
        self._numbers = numbers
        self.collectives: Counter[str] = Counter()
        """Number of collectives of each kind that the transfers of the latest batch stand for."""
        self._over: tuple[str, ...] = ()
        """Ids that all calls are through with. They are cleared before the next batch, so that a worker which is found
        dead then costs nothing that was trained."""

    def renew(self, post: Post[R]) -> None:
        """Go on by another post, because requests of this one were lost with a worker."""
        self._post = post

    def ask(self, name: Name, role: str, **arguments: Any) -> Reply:
        """Send a request without samples to the workers of a role; return the reply of the first one."""
        number = next(self._numbers)
        workers = self._meshes[role].workers
        requests = [Request(number, name, worker, role, arguments=arguments) for worker in workers]
        pending = self._post.request(*requests)
        self._post.flush()
        self._wait_for(pending)
        return next(reply for reply in pending.replies if reply.worker == workers[0])

    def traverse(
        self, graph: Graph, batch: Sample, extras: Mapping[str, Extras], streamed: Sequence[Reply] = ()
    ) -> dict[str, tuple[Reply, ...]]:
        """Take a batch through a graph.

        Args:
            graph: calls of the step.
            batch: prompts with the keys of the dataset.
            extras: additions to calls, by their names.
            streamed: replies of workers that have made further keys before.

        Returns:
            Replies of the workers, by the names of the calls.

        Raises:
            WorkerLostError: a worker died.
            ClusterError: a worker didn't answer in time.

        """
        self.collectives.clear()
        buffer = Buffer(graph)
        done = dict[str, tuple[Reply, ...]]()
        self._fetch(graph, batch, buffer)
        for reply in streamed:
            assert reply.meta is not None
            buffer.amend(reply.meta, Shard(reply.worker, reply.request))
        had: set[tuple[int, Shard]] = set()
        running = dict[int, Call]()
        begun = set[str]()
        while len(done) < len(graph.calls):
            for call in [call for call in graph.calls if call.name not in begun]:
                if len(ids := buffer.ready(call)) == len(batch.ids):
                    pending = self._call(call, ids, buffer, had, extras.get(call.name, Extras()))
                    running[pending.requests[0].number] = call
                    buffer.begin(call, ids)
                    begun.add(call.name)
            self._post.flush()
            pending = self._post.wait()
            call = running.pop(pending.requests[0].number)
            self._take_in(buffer, call, pending)
            done[call.name] = tuple(sorted(pending.replies, key=lambda reply: reply.worker))
            self._over += buffer.end(call, batch.ids)
        return done

    def _fetch(self, graph: Graph, batch: Sample, buffer: Buffer) -> None:
        """Give each copy of the first call's model its window of the batch; what is over is cleared meanwhile."""
        mesh = self._meshes[graph.levels[0][0].role]
        number = next(self._numbers)
        ranges = windows(len(batch.ids), mesh.data)
        parts = [batch.take([batch.ids[i] for i in part]) for part in ranges if len(part)]
        heads = zip(mesh.heads, parts, strict=False)  # Fewer prompts than copies leave some without.
        requests = [Request(number, "fetch", head, ids=part.ids, arguments={"sample": part}) for head, part in heads]
        clearing = self._clear()
        pending = self._post.request(*requests)
        self._wait_for(*clearing, pending)
        self._over = ()
        for reply in sorted(pending.replies, key=lambda reply: mesh.heads.index(reply.worker)):
            assert reply.meta is not None
            buffer.put(reply.meta, Shard(reply.worker, number))

    def _call(
        self, call: Call, ids: Sequence[str], buffer: Buffer, had: set[tuple[int, Shard]], extras: Extras
    ) -> Pending:
        """Hold the requests of a call until the next flush."""
        mesh = self._meshes[call.role]
        number = next(self._numbers)
        parts = enumerate(_parts(call, ids, buffer, mesh))
        wanted = {worker: part for rank, part in parts if part for worker in mesh.copy(rank)}
        plan = moves(buffer.where, wanted, call.takes, had)
        self.collectives += plan.counts
        had.update((worker, shard) for worker, shards in plan.shards.items() for shard in shards)
        requests = [
            Request(
                number,
                call.op,
                worker,
                call.role,
                part,
                call.takes,
                (Transfer(plan.shards[worker]), *extras.before),
                extras.after,
                extras.arguments,
            )
            for worker, part in wanted.items()
        ]
        return self._post.request(*requests)

    def _take_in(self, buffer: Buffer, call: Call, pending: Pending) -> None:
        """Tell the buffer what the heads of the copies have made."""
        for reply in pending.replies:
            if reply.meta is not None and reply.worker in self._meshes[call.role].heads:
                buffer.amend(reply.meta, Shard(reply.worker, reply.request))

    def clear(self) -> None:
        """Have workers drop the ids that all calls are through with."""
        self._wait_for(*self._clear())
        self._over = ()

    def _clear(self) -> list[Pending]:
        if not self._over:
            return []
        number = next(self._numbers)
        ids = self._over
        workers = sorted({worker for mesh in self._meshes.values() for worker in mesh.workers})
        return [self._post.request(*(Request(number, "clear_data_cache", worker, ids=ids) for worker in workers))]

    def _wait_for(self, *wanted: Pending) -> None:
        while not all(pending.done for pending in wanted):
            self._post.wait()


def _parts(call: Call, ids: Sequence[str], buffer: Buffer, mesh: Mesh) -> list[tuple[str, ...]]:
    """Divide ids among the copies of a model: by number before responses are there, by tokens afterwards."""
    if mesh.data == 1:
        return [tuple(ids)]
    if call.op == "generate":
        return [tuple(ids[i] for i in window) for window in windows(len(ids), mesh.data)]
    tokens = [sum(each) for each in zip(*(buffer.tokens(ids, key) for key in call.takes), strict=True)]
    return [tuple(ids[i] for i in part) for part in balanced(tokens, mesh.data)]
