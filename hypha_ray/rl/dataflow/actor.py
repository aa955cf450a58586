"""Model workers in processes of their own: Ray actors within the lease of their island."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import ray
from ray.exceptions import RayActorError, RayTaskError

from hypha_ray.children import ListedActor, own_cores, start_child
from hypha_ray.config import Job
from hypha_ray.errors import ClusterError, ConfigError, HyphaError
from hypha_ray.failpoints import arm
from hypha_ray.model.layout import array_of
from hypha_ray.model.tokenizers import PackedTokenizer
from hypha_ray.rl.dataflow.model_worker import Answer, ModelWorker
from hypha_ray.rl.dataflow.requests import ModelRequest, Reallocate, Reply, Shard, Transfer, WorkerLostError

Reference: TypeAlias = Any
"""Number of a reply of the worker in this process, or Ray's reference to that of an actor."""

_LONGEST_PING_S = 60.0
"""Longest wait in seconds for the pings of all workers: a computation may delay the answer."""

log = logging.getLogger(__name__)


class _RequestResult(NamedTuple):
    """Result of a request."""

    ids: frozenset[str]
    """Ids that the request was for."""
    data: Any
    """Samples, or Ray's reference to those of an actor."""


class ModelWorkerActor(ListedActor):
    """Model worker as a Ray actor. Requests that don't compute are answered while others compute.

    A worker that can't be built lives on, and answers each request with the reason. If it ended, that would look like
    the death of a process, which is replaced.

    Args:
        job: the job file.
        worker: number of the worker in its island.
        tokenizer: tokenizer of the run.

    """

    def __init__(self, job: Job, worker: int, tokenizer: PackedTokenizer) -> None:
        arm(job.testing.failpoints, job.testing.failpoint_log)
        self._job = job
        self._number = worker
        self._tokenizer = tokenizer
        self._build_lock = Lock()
        self._built: Future[ModelWorker] = Future()
        """The worker, or the error by which it couldn't be built."""

    def build(self) -> None:
        """Build the models, as the first call: while a constructor runs, no ping would be answered."""
        with suppress(HyphaError):  # Each request is answered with this error.
            self._worker()

    @ray.method(num_returns=2)
    def handle(self, request: ModelRequest, *objects: Any) -> Answer:
        """Answer a request that computes, as `ModelWorker.handle`.

        Raises:
            HyphaError: the worker can't be built.

        """
        return self._worker().handle(request, *objects)

    @ray.method(num_returns=2, concurrency_group="control")
    def handle_at_once(self, request: ModelRequest) -> Answer:
        """Answer a request that doesn't compute.

        Raises:
            HyphaError: the worker can't be built.

        """
        return self._worker().handle(request)

    @ray.method(concurrency_group="pulse")
    def ping(self) -> int:
        """Return the process id, which shows that the process lives."""
        return os.getpid()

    def _worker(self) -> ModelWorker:
        """Return the worker; whichever call comes first builds it.

        Raises:
            HyphaError: the worker can't be built.

        """
        from hypha_ray.model.environment import use_threads
        from hypha_ray.rl.roles import untrained_roles

        with self._build_lock:
            if not self._built.done():
                use_threads(own_cores())
                try:
                    roles = untrained_roles(self._job, self._tokenizer.load())
                except Exception as error:
                    self._built.set_exception(error_for_user(error))
                else:
                    self._built.set_result(ModelWorker(self._number, roles, {}))
        return self._built.result()


def error_for_user(error: Exception) -> HyphaError:
    """Return the error of a worker that can't be built as one that a user can act on."""
    if isinstance(error, HyphaError):
        return error
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}"[:300]
    if isinstance(error, ImportError):
        return ConfigError("RL028", "a model worker lacks a package", line, fix="install it on all nodes")
    if type(error).__name__ == "OutOfMemoryError":
        fix = "give workers more memory, or lower rl.model_workers"
        return ConfigError("RL028", "the models of a model worker don't fit into its memory", line, fix=fix)
    return ConfigError("RL028", "a model worker can't be built", line, fix="mend what the reason names")


class Actors:
    """Transport to worker 0, which is in this process, and to actors.

    Args:
        local: worker 0.
        job: the job file.
        tokenizer: tokenizer of the run.

    """

    def __init__(self, local: ModelWorker, job: Job, tokenizer: PackedTokenizer) -> None:
        self._local = local
        self._arguments = (job, tokenizer)
        self._replies = count()
        self._ping_s = min(_LONGEST_PING_S, job.worker.stall_s / 3)
        self._actors = {worker: self._start(worker) for worker in range(1, job.rl.model_workers)}
        self._waiting: dict[Reference, ModelRequest] = {}
        """Requests to worker 0, in their order; those that compute run when all others are on their way."""
        self._results: dict[Shard, _RequestResult] = {}
        """Results of requests, until their ids are cleared."""
        self._references: dict[Shard, Any] = {}
        """References to samples of worker 0 that actors were given."""
        self._weights: dict[int, Any] = {}
        """References to weights, by the number of the request that they go with."""

    def send(self, request: ModelRequest) -> Reference:
        """Send a request, and with it the objects that its hooks name; return a reference to the reply."""
        if request.name == "clear_data_cache":
            self._forget(request.ids)
        if request.worker == 0:
            reply_number = next(self._replies)
            self._waiting[reply_number] = request
            return reply_number
        actor = self._actors[request.worker]
        if request.at_once:
            data, reply = actor.handle_at_once.remote(request)
        else:
            data, reply = actor.handle.remote(request, *self._objects(request))
        self._results[Shard(request.worker, request.number)] = _RequestResult(frozenset(request.ids), data)
        return reply

    def receive(self, replies: Sequence[Reference], deadline_s: float) -> tuple[Reference, Reply]:
        """Wait for the first of some replies.

        Raises:
            WorkerLostError: an actor has died.
            ClusterError: RL015, no reply came within the deadline.
            HyphaError: whatever a role raises.

        """
        if self._waiting:
            reply_number = self._next_number()
            request = self._waiting.pop(reply_number)
            return reply_number, self._handle(request)
        ready_refs, _ = ray.wait(list(replies), num_returns=1, timeout=deadline_s)
        if not ready_refs:
            raise ClusterError("RL015", "no model worker has answered", f"{deadline_s:g} s of silence")
        return ready_refs[0], _values(ready_refs)[0]

    def revive(self) -> tuple[int, ...]:
        """Replace actors that have died or are silent, and forget requests that worker 0 hasn't seen.

        Returns:
            Numbers of the actors that were replaced.

        """
        self._waiting = {}
        pings = {actor.ping.remote(): worker for worker, actor in self._actors.items()}
        answered_pings, silent_pings = ray.wait(list(pings), num_returns=len(pings), timeout=self._ping_s)
        reasons: dict[int, str] = {}
        for ping in answered_pings:
            if not _is_pong(ping):
                reasons[pings[ping]] = "has died"
        for ping in silent_pings:
            reasons[pings[ping]] = f"is silent for {self._ping_s:g} s"
        for worker, reason in sorted(reasons.items()):
            log.warning("model worker %d %s and is replaced", worker, reason)
            ray.kill(self._actors[worker])
            self._actors[worker] = self._start(worker)
        return tuple(sorted(reasons))

    def close(self) -> None:
        """End all actors."""
        for actor in self._actors.values():
            ray.kill(actor)

    def _next_number(self) -> Reference:
        """Return the number of the request that worker 0 answers next: a short one, otherwise the oldest."""
        for reply_number, request in self._waiting.items():
            if request.at_once:
                return reply_number
        return next(iter(self._waiting))

    def _handle(self, request: ModelRequest) -> Reply:
        shards: list[Shard] = []
        for hook in request.before:
            if isinstance(hook, Transfer):
                shards += hook.shards
        samples = _values([self._results[shard].data for shard in shards])
        sample, reply = self._local.handle(request, *samples)
        if sample is not None:
            self._results[Shard(0, request.number)] = _RequestResult(frozenset(sample.ids), sample)
        return reply

    def _forget(self, ids: Collection[str]) -> None:
        """Drop results for these ids alone, and the references and weights that went with them."""
        for shard, result in list(self._results.items()):
            if result.ids.issubset(ids):
                del self._results[shard]
                self._references.pop(shard, None)
        request_numbers = {shard.request for shard in self._results}
        for request_number in self._weights.keys() - request_numbers:
            del self._weights[request_number]

    def _objects(self, request: ModelRequest) -> list[Any]:
        """Return the objects for an actor's hooks, in the order of the hooks."""
        objects: list[Any] = []
        for hook in (*request.before, *request.after):
            match hook:
                case Transfer(shards):
                    objects += [self._reference(shard) for shard in shards]
                case Reallocate(source):
                    objects.append(self._weights_of(source, request.number))
        return objects

    def _reference(self, shard: Shard) -> Any:
        if shard.worker:
            return self._results[shard].data
        if shard not in self._references:
            self._references[shard] = ray.put(self._results[shard].data)
        return self._references[shard]

    def _weights_of(self, role: str, request_number: int) -> Any:
        """Return a reference to a role's weights, the same for all workers that a request goes to."""
        if request_number not in self._weights:
            tensors = self._local.weights(role)
            arrays = {name: array_of(tensor) for name, tensor in tensors.items()}
            self._weights[request_number] = ray.put(arrays)
        return self._weights[request_number]

    def _start(self, worker: int) -> Any:
        job, tokenizer = self._arguments
        actor = start_child(ModelWorkerActor, job, worker, tokenizer)
        actor.build.remote()
        return actor


def _is_pong(ping: Any) -> bool:
    """Whether a ping was answered, rather than lost with its actor."""
    try:
        ray.get(ping)
    except RayActorError:
        return False
    return True


def _values(objects: Sequence[Any]) -> list[Any]:
    """Return objects with the values of Ray's references in their place.

    Raises:
        WorkerLostError: an actor has died.
        HyphaError: whatever a role raises.

    """
    references = [value for value in objects if isinstance(value, ray.ObjectRef)]
    if not references:  # Ray would be started to get nothing.
        return list(objects)
    try:
        results = iter(ray.get(references))
    except RayActorError as error:
        first_line, *_ = str(error).partition("\n")
        raise WorkerLostError("RL016", "a model worker has died", first_line) from None
    except RayTaskError as error:
        if isinstance(error.cause, HyphaError):
            raise error.cause from None
        raise
    values: list[Any] = []
    for value in objects:
        values.append(next(results) if isinstance(value, ray.ObjectRef) else value)
    return values
