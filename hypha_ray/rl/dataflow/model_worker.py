"""Model worker: the interface of its roles, the samples in its storage, and its answers to requests.

The same class is called within the island's process, where a request is a call, and within a Ray actor.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any, TypeAlias

import torch

from hypha_ray.errors import CheckpointError
from hypha_ray.model.layout import tensor_of
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.torch_extras import LossScale
from hypha_ray.rl.dataflow.graph import Mesh
from hypha_ray.rl.dataflow.master import Master
from hypha_ray.rl.dataflow.requests import (
    Evaluate,
    Hook,
    Lengths,
    Meta,
    ModelRequest,
    Offload,
    Packed,
    Reallocate,
    Reply,
    RequestQueue,
    Sample,
    Save,
    Shard,
    Transfer,
    gather,
)
from hypha_ray.types import Sums

Answer: TypeAlias = tuple[Sample | None, Reply]
"""Samples that were made, which stay with workers; and the reply, which goes to the master."""


@dataclass
class RoleOutcome:
    """Result of an operation of a role."""

    sample: Sample | None = None
    """Samples with the keys that were made; None if none were."""
    sums: Sums = field(default_factory=dict)
    """Figures of the operation."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Single values, such as the norm of a gradient."""
    problems: tuple[str, ...] = ()
    """Lines for the user about failures beside the operation, which itself succeeded."""


class Role:
    """Role of a model, or of functions in its place.

    Subclasses have the operations that have a meaning for them. Each takes samples with the keys of its call, and the
    arguments of the request.
    """

    def initialize(self, steps: int) -> None:
        """Build the optimizer, for a run of `steps` steps."""
        raise NotImplementedError

    def generate(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Make responses to prompts."""
        raise NotImplementedError

    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Add keys by one forward pass, or by functions."""
        raise NotImplementedError

    def train_step(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Take the optimizer steps of a batch, or only add its gradient."""
        raise NotImplementedError

    def config(self) -> Mapping[str, Any]:
        """Return facts of the model."""
        raise NotImplementedError

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the model's weights by name: its own tensors, not copies."""
        raise NotImplementedError

    def take_weights(self, weights: Mapping[str, torch.Tensor], eta: float) -> None:
        """Make the model's weights `eta` times these plus `1 - eta` times the present ones."""
        raise NotImplementedError

    def offload(self) -> None:
        """Move the model's weights out of the device's memory."""
        raise NotImplementedError

    def load(self) -> None:
        """Bring offloaded weights back; called before each use of the role."""

    def save(self, folder: str) -> None:
        """Write the model to a folder."""
        raise NotImplementedError

    def close(self) -> None:
        """Release resources other than memory."""


class TrainedRole(Role):
    """Role of a model in training."""

    optimizer: Inner
    """Inner optimizer of the model, once that is initialized."""
    loss_scale: LossScale | None
    """Scale of losses, once that is initialized; None: losses aren't scaled."""


def facts_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return facts of a model."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters}


class Storage:
    """Samples by key and id. Requests that are answered at once may change it while another request computes."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._samples: dict[str, list[Sample]] = {}  # by key

    def keep(self, sample: Sample) -> None:
        """Add samples; they replace those of the same ids, which a repeated step makes again."""
        ids = set(sample.ids)
        with self._lock:
            for key in sample.data:
                shard_samples = self._samples.get(key, [])
                remaining_samples = [stored for stored in shard_samples if ids.isdisjoint(stored.ids)]
                self._samples[key] = [*remaining_samples, sample]

    def sample(self, ids: Sequence[str], keys: Sequence[str]) -> Sample:
        """Return ids with these keys, in their order."""
        lengths: dict[str, Lengths] = {}
        data: dict[str, Packed] = {}
        for key in keys:
            column = self._column(tuple(ids), key)
            lengths[key] = column.meta.lengths[key]
            data[key] = column.data[key]
        return Sample(Meta(tuple(ids), lengths), data)

    def clear(self, ids: Collection[str]) -> None:
        """Drop samples of which all ids are among these."""
        dropped_ids = set(ids)
        with self._lock:
            for key, samples in self._samples.items():
                self._samples[key] = [sample for sample in samples if not dropped_ids.issuperset(sample.ids)]

    def _column(self, ids: tuple[str, ...], key: str) -> Sample:
        """Return samples of exactly these ids that have a key, and maybe other keys."""
        samples = self._samples[key]
        for sample in samples:
            if sample.ids == ids:
                return sample
        id_set = set(ids)
        parts = [sample.select([key]) for sample in samples if not id_set.isdisjoint(sample.ids)]
        return gather(parts).take(ids)


class ModelWorker:
    """Worker that answers requests one after the other.

    Args:
        worker: number of the worker in its island.
        roles: roles of the worker, by name.
        spec: facts of the training that the dataset is for.

    """

    def __init__(self, worker: int, roles: Mapping[str, Role], spec: Mapping[str, Any]) -> None:
        self._number = worker
        self._roles = dict(roles)
        self._spec = dict(spec)
        self._storage = Storage()

    def handle(self, request: ModelRequest, *objects: Any) -> Answer:
        """Go through the hooks before a request, its operation, and the hooks after it.

        Args:
            request: the request.
            objects: samples of other workers, and weights as arrays, in the order in which the hooks need them.

        """
        objects_left = iter(objects)
        for hook in request.before:
            self._run(hook, objects_left)
        began_at = time.perf_counter()
        outcome = self._operation(request)
        seconds = time.perf_counter() - began_at
        for hook in request.after:
            hook_outcome = self._run(hook, objects_left)
            outcome.sums |= hook_outcome.sums
            outcome.problems += hook_outcome.problems
        meta: Meta | None = None
        if outcome.sample is not None:
            self._storage.keep(outcome.sample)
            meta = outcome.sample.meta
        reply = Reply(self._number, request.number, meta, outcome.sums, outcome.facts, outcome.problems, seconds)
        return outcome.sample, reply

    def weights(self, role: str) -> Mapping[str, Any]:
        """Return a role's weights."""
        return self._role(role).weights()

    def _role(self, name: str) -> Role:
        """Return a role that is ready for use."""
        role = self._roles[name]
        role.load()
        return role

    def _operation(self, request: ModelRequest) -> RoleOutcome:
        match request.name:
            case "fetch":
                return RoleOutcome(request.arguments["sample"])
            case "spec":
                return RoleOutcome(facts=self._spec)
            case "clear_data_cache":
                self._storage.clear(request.ids)
                return RoleOutcome()
        assert request.role is not None
        role = self._role(request.role)
        match request.name:
            case "model_config":
                return RoleOutcome(facts=role.config())
            case "initialize":
                role.initialize(**request.arguments)
                return RoleOutcome()
            case "generate":
                operation = role.generate
            case "inference":
                operation = role.inference
            case "train_step":
                operation = role.train_step
        return operation(self._storage.sample(request.ids, request.takes), request.arguments)

    def _run(self, hook: Hook, objects: Iterator[Any]) -> RoleOutcome:
        """Run a hook; return its figures and problems."""
        match hook:
            case Transfer(shards):
                for _ in shards:
                    self._storage.keep(next(objects))
            case Reallocate(source, target, eta):
                if source in self._roles:
                    weights = self.weights(source)
                else:
                    arrays = next(objects)
                    weights = {name: tensor_of(array) for name, array in arrays.items()}
                self._role(target).take_weights(weights, eta)
            case Offload(role):
                self._roles[role].offload()
            case Evaluate(role, prompts, round):
                outcome = self._role(role).generate(prompts, {"evaluation": True, "version": 0, "round": round})
                sums = {f"validation/{name}": figure for name, figure in outcome.sums.items()}
                return RoleOutcome(sums=sums, problems=outcome.problems)
            case Save(role, folder):
                return RoleOutcome(problems=self._save(role, folder))
        return RoleOutcome()

    def _save(self, role: str, folder: str) -> tuple[str, ...]:
        """Write a role's model; return the reason if that fails, since the step beside it was taken."""
        try:
            self._role(role).save(folder)
        except (CheckpointError, OSError) as error:
            return (f"the policy was not saved; training goes on: {error}",)
        return ()


class Local:
    """Transport by calls.

    Args:
        workers: model workers by their numbers.

    """

    def __init__(self, workers: Mapping[int, ModelWorker]) -> None:
        self._workers = dict(workers)
        self._numbers = count()
        self._samples: dict[Shard, Sample] = {}
        self._replies: dict[int, Reply] = {}

    def send(self, request: ModelRequest) -> int:
        """Handle a request at once; return a number for its reply."""
        transferred: list[Sample] = []
        for hook in request.before:
            if isinstance(hook, Transfer):
                transferred += [self._samples[shard] for shard in hook.shards]
        worker = self._workers[request.worker]
        sample, reply = worker.handle(request, *transferred)
        if sample is not None:
            self._samples[Shard(request.worker, request.number)] = sample
        if request.name == "clear_data_cache":
            self._clear(set(request.ids))
        reply_number = next(self._numbers)
        self._replies[reply_number] = reply
        return reply_number

    def _clear(self, ids: set[str]) -> None:
        for shard, sample in list(self._samples.items()):
            if ids.issuperset(sample.ids):
                del self._samples[shard]

    def receive(self, replies: Sequence[int], deadline_s: float) -> tuple[int, Reply]:
        """Return the first reply: all are there."""
        return replies[0], self._replies.pop(replies[0])

    def revive(self) -> tuple[int, ...]:
        """Do nothing: workers of this process die with it."""
        return ()

    def close(self) -> None:
        """Do nothing: only memory is held."""


def master_of(roles: Mapping[str, Role]) -> Master[int]:
    """Return a master with one model worker, which plays all roles and trains none."""
    meshes = {name: Mesh((0,)) for name in roles}
    worker = ModelWorker(0, roles, {})
    return Master(meshes, RequestQueue(Local({0: worker}), deadline_s=0.0), count())
