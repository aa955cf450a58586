"""Readers of slices: from shards of the run, or from data nodes, which serve other jobs as well; and their cache.

SliceCache ──read(index, worker)──► ShardReader ────► shard-n, on this node
                               └──► ReplicaReader ──► data/<dataset>/<node>, the nearest that answers
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hypha_ray.config import Job
from hypha_ray.data.catalogue import is_url
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import OTHER_SAMPLES, RunDataset, mixed, other_dataset
from hypha_ray.data.slices import UNREADABLE
from hypha_ray.data.storage import Place
from hypha_ray.errors import AuthenticationError, DataError, ExpiredError, HubError, QuarantinedError
from hypha_ray.scheduler.runtime.replica_reader import RETRY_S, ReaderPatience, ReplicaReader
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.supervised_actor import SupervisedActor
from hypha_ray.types import SLICES_PER_DATASET, SliceInfo, dataset_of

READS = 3
"""Reads of a slice, from one shard after the other, before it counts as damaged."""
CREDENTIALS_S = 5.0
"""Seconds between two tries with credentials that may be new."""
SLICES_PER_WORKER = 4
"""Slices per worker that stay in the object store for the next reader, beside those that workers hold."""


class SliceReader(Protocol):
    """Reads slices of the run's dataset."""

    async def manifest(self) -> Manifest:
        """Manifest of the dataset.

        Raises:
            HyphaError: it is missing or damaged, or can't be reached.

        """

    async def read(self, index: int, worker: int) -> Any:
        """Read a slice for a worker of that number; return a reference to its tensors.

        Raises:
            HyphaError: every read found the slice damaged, or it can't be read.

        """

    def traffic(self) -> dict[str, int]:
        """Bytes of slices read since the last call, by name of the data node; empty without data nodes."""


def reader_of(
    places: Sequence[Place], job: Job, actors: RunActors, report_problem: Callable[[str], None], run_dataset: RunDataset
) -> SliceReader:
    """The reader for the places of a job's datasets.

    Args:
        places: place of each dataset.
        job: the job file.
        actors: actors of the run.
        report_problem: takes lines of text for the user.
        run_dataset: identities of the datasets that the run began with.

    """
    readers: list[SliceReader] = []
    for dataset, source in enumerate(places):
        identity = run_dataset.of(dataset)
        patience = ReaderPatience(job.resources.max_idle_s, report_problem)
        if source.served:
            readers.append(ReplicaReader(source.address, job, actors, report_problem, identity))
        elif is_url(source.address):
            readers.append(UrlReader(source.address, actors, report_problem, patience, identity))
        else:
            readers.append(ShardReader(actors.shards_of(source.address), patience, identity))
    if len(readers) == 1:
        return readers[0]
    return MixtureReader(readers)


class MixtureReader:
    """Reads the datasets of a mixture, each by a reader of its own."""

    def __init__(self, readers: Sequence[SliceReader]) -> None:
        self._readers = readers

    async def manifest(self) -> Manifest:
        """Manifest of all datasets together."""
        manifests = [await reader.manifest() for reader in self._readers]
        return mixed(manifests)

    async def read(self, index: int, worker: int) -> Any:
        """Read a slice of one of the datasets."""
        reader = self._readers[dataset_of(index)]
        return await reader.read(index % SLICES_PER_DATASET, worker)

    def traffic(self) -> dict[str, int]:
        """Bytes read of all datasets since the last call, by name of the data node."""
        total = Counter[str]()
        for reader in self._readers:
            total += Counter(reader.traffic())
        return dict(total)


class ShardSlices:
    """Slices of one dataset from shards, compared with those that the run began with.

    A shard that has other samples, because its folder was prepared anew, is waited for.

    Args:
        patience: says what is awaited, and how long.
        identity: identity of the dataset that the run began with; None: it begins with what is there first.

    """

    def __init__(self, patience: ReaderPatience, identity: str | None) -> None:
        self._patience = patience
        self._identity = identity
        self._manifest: Manifest | None = None
        self._was_served = False
        """Whether a slice has been read, so that credentials were good."""
        self._hashes: dict[int, str] = {}
        """Hash of each slice that the run began with, by index."""

    async def manifest(self, shard: SupervisedActor) -> Manifest:
        """Manifest of the dataset that the run began with.

        Raises:
            HyphaError: it is missing or damaged, can't be reached, or has other samples until patience ends.

        """
        deadline = self._patience.deadline()
        while self._manifest is None:
            try:
                announced: Manifest = await (await shard.ask(lambda actor: actor.announce.remote()))
            except ExpiredError as expired:
                await self._wait_for_credentials(expired, deadline)
                continue
            if self._identity in (None, announced.identity):
                self._manifest = announced
                self._hashes = {info.index: info.sha256 for info in announced.slices}
            else:
                error = other_dataset(announced.name, [announced.identity], str(self._identity))
                await self._wait(error, deadline)
        self._patience.served()
        return self._manifest

    async def read(self, shards: Sequence[SupervisedActor], index: int) -> Any:
        """Ask one shard after the other for a slice; return a reference to its tensors.

        Raises:
            HyphaError: the slice is damaged in every read, can't be read, or has other samples until patience ends.

        """
        deadline = self._patience.deadline()
        while True:
            try:
                tensors = await _serve(shards, index, self._hashes.get(index))
            except DataError as error:
                if error.code != OTHER_SAMPLES:
                    raise
                await self._wait(error, deadline)
            except AuthenticationError as error:
                if not (self._was_served or isinstance(error, ExpiredError)):
                    raise
                await self._wait_for_credentials(error, deadline)
            else:
                self._patience.served()
                self._was_served = True
                return tensors

    async def _wait_for_credentials(self, error: AuthenticationError, deadline: float) -> None:
        """Wait for new credentials, which a place reads again with each try.

        Raises:
            HubError: the deadline is over.

        """
        if time.monotonic() > deadline:
            fix = "renew the credentials on all machines, then submit again: the run goes on from its last commit"
            raise HubError("DATA065", error.what, error.got, fix=fix)
        self._patience.tell(f"{error.what}; the run waits for new credentials")
        await asyncio.sleep(CREDENTIALS_S)

    async def _wait(self, error: DataError, deadline: float) -> None:
        """Wait before the next try.

        Raises:
            DataError: the deadline is over.

        """
        if time.monotonic() > deadline:
            raise error
        self._patience.tell(error.what)
        await asyncio.sleep(RETRY_S)


class ShardReader:
    """Reads from the shards of the run, in turn; `patience` and `identity` are those of `ShardSlices`."""

    def __init__(self, shards: Sequence[SupervisedActor], patience: ReaderPatience, identity: str | None) -> None:
        self._shards = shards
        self._slices = ShardSlices(patience, identity)

    async def manifest(self) -> Manifest:
        """Manifest of the dataset, from the first shard."""
        return await self._slices.manifest(self._shards[0])

    async def read(self, index: int, worker: int) -> Any:
        """Read a slice from one shard after the other."""
        return await self._slices.read(self._shards, index)

    def traffic(self) -> dict[str, int]:
        """Nothing, because shards are no data nodes."""
        return {}


class UrlReader:
    """Reads a URL on the nodes of workers, each of which keeps on its disk what it has fetched.

    A slice is fetched by the node of the worker that was the first to need it. Later readers get it from there, so each
    slice leaves its source once, as long as caches are large enough.

    Args:
        url: folder of the dataset.
        actors: actors of the run, which start shards and know the nodes of workers.
        problem: takes a line of text for the user.
        patience: see `ShardSlices`.
        identity: see `ShardSlices`.

    """

    def __init__(
        self,
        url: str,
        actors: RunActors,
        problem: Callable[[str], None],
        patience: ReaderPatience,
        identity: str | None,
    ) -> None:
        self._url = url
        self._actors = actors
        self._problem = problem
        self._slices = ShardSlices(patience, identity)
        self._shards: dict[str | None, SupervisedActor] = {}
        """Shard of each node that has one; None: of this node."""
        self._nodes: dict[int, str | None] = {}
        """Node that has fetched each slice."""

    async def manifest(self) -> Manifest:
        """Manifest of the dataset, read on this node."""
        return await self._slices.manifest(self._shard(None))

    async def read(self, index: int, worker: int) -> Any:
        """Read a slice on the node that has fetched it, or on the worker's node if none has."""
        if index not in self._nodes:
            self._nodes[index] = await self._actors.node_of(worker)
        shard = self._shard(self._nodes[index])
        tensors = await self._slices.read([shard], index)
        notes = await shard.ask(lambda actor: actor.notes.remote())
        for text in await notes:
            self._problem(text)
        return tensors

    def traffic(self) -> dict[str, int]:
        """Nothing, because shards are no data nodes."""
        return {}

    def _shard(self, node: str | None) -> SupervisedActor:
        if node not in self._shards:
            self._shards[node] = self._actors.shard_near(node, self._url)
        return self._shards[node]


async def _serve(shards: Sequence[SupervisedActor], index: int, sha256: str | None) -> Any:
    """Ask one shard after the other for a slice with that hash; return a reference to its tensors.

    Raises:
        HyphaError: every read found the slice damaged, or it can't be read.

    """

    def tensors_and_receipt(shard: Any) -> Any:
        return shard.serve.options(num_returns=2).remote(index, sha256)

    for attempt in range(READS):
        shard = shards[(index + attempt) % len(shards)]
        try:
            tensors, _ = await shard.ask(tensors_and_receipt)
            return tensors
        except DataError as error:
            damage = error
    raise damage


class SliceCache:
    """References to the slices used last.

    Args:
        job: the job file.
        actors: actors of the run, with the store.
        reader: reads slices.

    """

    def __init__(self, job: Job, actors: RunActors, reader: SliceReader) -> None:
        self._job = job
        self._actors = actors
        self._reader = reader
        self._slices: dict[int, asyncio.Task[Any]] = {}
        self.nearby: dict[int, frozenset[int]] = {}
        """Slices by worker that it is to get before others; empty unless the job prefers those near to it."""

    async def locate(self, worker: int) -> None:
        """Find out which slices are served near a new worker, if the job prefers these."""
        if self._job.dataset.locality == "prefer" and isinstance(self._reader, ReplicaReader):
            self.nearby[worker] = await self._reader.near(worker)

    async def usable(self, slices: Sequence[SliceInfo]) -> list[SliceInfo]:
        """Return the slices that aren't in quarantine.

        Raises:
            DataError: nothing to train on is left, in one of the datasets.

        """
        quarantined = await (await self._actors.store.ask(lambda store: store.quarantined.remote()))
        usable = [info for info in slices if info.index not in quarantined]
        if not _datasets(usable) or _datasets(usable) != _datasets(slices):
            damaged = "1 slice is" if len(quarantined) == 1 else f"{len(quarantined)} slices are"
            problem = f"nothing to train on is left: {damaged} damaged"
            first_reason = next(iter(quarantined.values()), "")
            raise DataError("DATA028", problem, first_reason, fix="prepare the dataset again")
        return usable

    async def slice(self, index: int, worker: int) -> Any:
        """Return a reference to a slice's tensors; if they have to be read, then from near that worker.

        Raises:
            QuarantinedError: the slice is damaged and was set aside, as the job allows.
            DataError: every read found the slice damaged, or it can't be read.

        """
        if index not in self._slices:
            self._slices[index] = asyncio.ensure_future(self._reader.read(index, worker))
        task = self._slices[index] = self._slices.pop(index)
        while len(self._slices) > SLICES_PER_WORKER * self._job.num_workers:
            oldest = next(iter(self._slices))
            del self._slices[oldest]
        try:
            return await asyncio.shield(task)
        except DataError as error:
            self.forget(index)
            if not self._job.dataset.allow_quarantine or error.code in (UNREADABLE, OTHER_SAMPLES):
                raise
            reason = str(getattr(error, "cause", error))  # Ray's own text of it is a traceback.
            await self._actors.store.ask(lambda store: store.quarantine.remote(index, reason))
            problem = f"slice {index} is damaged and set aside; going on without it from the last commit"
            raise QuarantinedError("DATA029", problem, got=error.what) from None

    def forget(self, index: int) -> None:
        """Drop the reference to a slice whose object is lost."""
        self._slices.pop(index, None)


def _datasets(slices: Sequence[SliceInfo]) -> set[int]:
    """Numbers of the datasets that have something to train on."""
    return {dataset_of(info.index) for info in slices if info.split == "train"}
