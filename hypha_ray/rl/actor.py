"""The Ray actor of a generator, and the way of a worker to the generators of its run.

A generator keeps no samples: prompts come with a request, and responses with their rewards go back in the answer. Of
weights it keeps those that it was asked to respond with last.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError

from hypha_ray.children import ListedActor, own_cores, own_gpus
from hypha_ray.config import Job
from hypha_ray.errors import HyphaError, first_line, reason_of
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.rl.dataflow.requests import Sample
from hypha_ray.rl.generator_pool import (
    Arrival,
    GeneratorLostError,
    Piece,
    Reference,
    Rollout,
    generator_name,
    rollout_by,
)

GROUPS = {"pulse": 1}
"""Concurrency groups of the actor: a ping waits for no other call."""


class ResponseGenerator(ListedActor):
    """Generator as a Ray actor. One that can't be built lives on, and answers each request with the reason.

    Args:
        job: the job file.
        tokenizer: tokenizer of the run, as `Island` gets it packed.

    """

    def __init__(self, job: Job, tokenizer: Any) -> None:
        arm(job.testing.failpoints, job.testing.failpoint_log)
        self._job = job
        self._tokenizer = tokenizer
        self._build_lock = Lock()
        self._built: Future[Any] = Future()
        """Role that responds and rewards, or the error by which it couldn't be built."""
        self._weights: tuple[str, int] | None = None
        """Worker and version whose weights the role has; None: those that the job begins with."""

    @ray.method(concurrency_group="pulse")
    def ping(self) -> int:
        """Return the process id, which shows that the process lives."""
        return os.getpid()

    def prepare(self) -> None:
        """Build the model."""
        with suppress(Exception):  # Each request is answered with this error.
            self._role()

    def respond(
        self, worker: str, version: int, weights: list[Any], prompts: Sample, arguments: Mapping[str, Any]
    ) -> Rollout:
        """Respond to prompts with a worker's weights, and reward the responses.

        Args:
            worker: name of the worker, which with `version` names the weights.
            version: version of the weights.
            weights: reference to them as the only item, so that Ray fetches them only for the first request.
            prompts: the prompts.
            arguments: arguments of the operation.

        Raises:
            HyphaError: the generator can't be built, or the role's error.

        """
        from hypha_ray.model.layout import tensor_of

        role = self._role()
        if self._weights != (worker, version):
            self._weights = None
            arrays = ray.get(weights[0])
            role.take_weights({name: tensor_of(array) for name, array in arrays.items()}, 1.0)
            self._weights = worker, version
        rollout = rollout_by(role, prompts, arguments)
        failpoint("generator.answer")
        return rollout

    def _role(self) -> Any:
        """Return the role; whichever call comes first builds it.

        Raises:
            HyphaError: it can't be built.

        """
        from hypha_ray.model.environment import use_gpus, use_threads
        from hypha_ray.model.execution import resolved_job
        from hypha_ray.rl.roles import untrained_roles

        with self._build_lock:
            if not self._built.done():
                use_threads(own_cores())
                use_gpus(own_gpus())
                try:
                    job = resolved_job(on_own_device(self._job))
                    self._built.set_result(untrained_roles(job, self._tokenizer.load())["rollout"])
                except Exception as error:
                    self._built.set_exception(error)
        return self._built.result()


def on_own_device(job: Job) -> Job:
    """Return the job with the device of a generator, which may have no GPU where workers have one."""
    worker = job.worker.model_copy(update={"device": "auto" if job.resources.generator.gpu else "cpu"})
    return job.model_copy(update={"worker": worker})


class RayGenerators:
    """Way to the generators of a run, which are found by their names.

    Args:
        run: name of the run.
        worker: name of the worker.
        count: number of generators that the job wants.

    """

    def __init__(self, run: str, worker: str, count: int) -> None:
        self._run = run
        self._worker = f"{worker} {uuid4().hex}"
        """Name of the weights' source: a worker's successor counts versions anew."""
        self._names = [generator_name(generator) for generator in range(count)]
        self._actors: dict[str, Any] = {}
        """Handles of the generators that were found."""
        self._preparing: dict[str, Any] = {}
        """References by name to the end of their preparation."""
        self._asked: dict[Reference, str] = {}
        """Names of the generators that were asked, by the references to their answers."""
        self._failed: set[str] = set()
        """Ids of the actors that have failed, and aren't asked again."""

    def put(self, arrays: Mapping[str, Any]) -> Any:
        """Put weights into the object store; return a handle, which keeps them there."""
        return ray.put(arrays)

    def get(self, handle: Any) -> Mapping[str, Any]:
        """Return weights by their handle."""
        arrays: Mapping[str, Any] = ray.get(handle)
        return arrays

    def look(self) -> Sequence[str]:
        """Look up generators that aren't known; return the names of those that are ready now."""
        for name in self._names:
            if name not in self._actors:
                self._find(name)
        ready_names: list[str] = []
        for name, preparation in list(self._preparing.items()):
            finished, _ = ray.wait([preparation], timeout=0)
            if not finished:
                continue
            del self._preparing[name]
            try:
                ray.get(preparation)
            except RayError:
                self._actors.pop(name)
            else:
                ready_names.append(name)
        return ready_names

    def _find(self, name: str) -> None:
        """Look a generator up, and let it prepare itself."""
        with suppress(ValueError, RayError):  # There is no such generator yet.
            actor = ray.get_actor(name, namespace=self._run)
            if actor._actor_id.hex() not in self._failed:
                self._actors[name] = actor
                self._preparing[name] = actor.prepare.remote()

    def ask(self, name: str, piece: Piece) -> Reference:
        """Ask a generator to respond to a piece; return Ray's reference to its answer."""
        weights = piece.weights
        arguments = self._worker, weights.version, [weights.handle], piece.prompts, piece.arguments
        reference: Reference = self._actors[name].respond.remote(*arguments)
        self._asked[reference] = name
        return reference

    def wait(self, references: Sequence[Reference], timeout_s: float) -> Sequence[Arrival[Rollout]]:
        """Wait for the first answer; an error of a machine is a `GeneratorLostError`."""
        ready_refs, _ = ray.wait(list(references), num_returns=1, timeout=timeout_s)
        return [Arrival(reference, self._answer(reference)) for reference in ready_refs]

    def _answer(self, reference: Any) -> Rollout | Exception:
        name = self._asked.pop(reference)
        try:
            answer: Rollout = ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, HyphaError):
                return error.cause
            actor = self._actors.pop(name)
            if not isinstance(error.cause, RayError):  # No further request: a successor may have another machine.
                self._failed.add(actor._actor_id.hex())
            return GeneratorLostError(reason_of(error.cause))
        except RayError as error:
            self._actors.pop(name)
            return GeneratorLostError(first_line(error))
        return answer
