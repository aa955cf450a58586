"""A model worker: roles that it plays, samples that it holds, and requests that it answers.

The same class is called within the island's process and within a Ray actor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from hypha_ray.errors import CheckpointError
from hypha_ray.model.layout import tensor_of
from hypha_ray.rl.dataflow.requests import Evaluate, Hook, Offload, Reallocate, Reply, Request, Save, Transfer
from hypha_ray.rl.dataflow.sample import Sample
from hypha_ray.rl.roles.role import Outcome, Role
from hypha_ray.rl.workers.storage import Storage

Answer: TypeAlias = tuple[Sample | None, Reply]
"""Samples that were made, which stay with workers; and the reply, which goes to the master."""


class ModelWorker:
    """Answers requests one after the other.

    Args:
        number: number of the worker in its island.
        roles: roles that it plays.
        spec: facts of the training that the dataset is for.

    """

    def __init__(self, number: int, roles: Mapping[str, Role], spec: Mapping[str, Any]) -> None:
        self._number = number
        self._roles = dict(roles)
        self._spec = dict(spec)
        self._storage = Storage()

    def handle(self, request: Request, *objects: Any) -> Answer:
        """Go through the hooks before a request, its operation, and the hooks after it.

        Args:
            request: the request.
            objects: samples of other workers, and weights as arrays, in the order in which the hooks need them.

        """
        others = iter(objects)
        for hook in request.before:
            self._run(hook, others)
        outcome = self._operation(request)
        for hook in request.after:
            beside = self._run(hook, others)
            outcome.sums |= beside.sums
            outcome.problems += beside.problems
        if outcome.sample is not None:
            self._storage.keep(outcome.sample)
        meta = None if outcome.sample is None else outcome.sample.meta
        reply = Reply(self._number, request.number, meta, outcome.sums, outcome.facts, outcome.problems)
        return outcome.sample, reply

    def weights(self, role: str) -> Mapping[str, Any]:
        """Return a role's weights."""
        return self._role(role).weights()

    def _role(self, name: str) -> Role:
        """Return a role that is ready for use."""
        role = self._roles[name]
        role.load()
        return role

    def _operation(self, request: Request) -> Outcome:
        match request.name:
            case "fetch":
                return Outcome(request.arguments["sample"])
            case "spec":
                return Outcome(facts=self._spec)
            case "clear_data_cache":
                self._storage.clear(request.ids)
                return Outcome()
        assert request.role is not None
        role = self._role(request.role)
        match request.name:
            case "model_config":
                return Outcome(facts=role.config())
            case "initialize":
                role.initialize(**request.arguments)
                return Outcome()
            case "generate":
                operation = role.generate
            case "inference":
                operation = role.inference
            case "train_step":
                operation = role.train_step
        return operation(self._storage.sample(request.ids, request.takes), request.arguments)

    def _run(self, hook: Hook, others: Iterator[Any]) -> Outcome:
        """Do what a hook says; return figures and problems of it."""
        match hook:
            case Transfer(shards):
                for _ in shards:
                    self._storage.keep(next(others))
            case Reallocate(source, target, eta):
                own = source in self._roles
                weights = self.weights(source) if own else {name: tensor_of(one) for name, one in next(others).items()}
                self._role(target).take_weights(weights, eta)
            case Offload(role):
                self._roles[role].offload()
            case Evaluate(role, prompts):
                found = self._role(role).generate(prompts, {"evaluation": True, "version": 0})
                sums = {f"validation/{name}": figure for name, figure in found.sums.items()}
                return Outcome(sums=sums, problems=found.problems)
            case Save(role, folder):
                return Outcome(problems=self._save(role, folder))
        return Outcome()

    def _save(self, role: str, folder: str) -> tuple[str, ...]:
        """Write a role's model; return the reason if that fails, since the step beside it was taken."""
        try:
            self._role(role).save(folder)
        except (CheckpointError, OSError) as error:
            return (f"the policy was not saved; training goes on: {error}",)
        return ()
