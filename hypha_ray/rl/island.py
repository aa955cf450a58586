"""A trainer whose batch is prompts: a step is one traverse of the graph of model function calls.

prompts ──► actor_gen ──► rew_inf, ref_inf, critic_inf ──► advantage_inf ──► actor_train, critic_train
                ▲                                                                     │
                └────────────────────────── the same weights ─────────────────────────┘
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch

from hypha_ray.config import Job
from hypha_ray.config.rl import RL
from hypha_ray.failpoints import failpoint
from hypha_ray.model.environment import compute_reproducibly, device_of, seed_all
from hypha_ray.model.lora import build_trained
from hypha_ray.model.tokenizers import pack
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.schedules import inner_steps
from hypha_ray.optim.step import Step, WholeModel
from hypha_ray.optim.torch_extras import LossScale
from hypha_ray.rl.batches import (
    Refill,
    Replies,
    SharedRollouts,
    Traversed,
    responders_of,
    shares_of_generators,
    shown_of,
    staleness_sums,
    sums_of,
    times,
    with_advantages,
)
from hypha_ray.rl.dataflow.graph import ROLLOUT, Graph, Mesh, generation_hooks, rollout_call, rollout_graph, step_graph
from hypha_ray.rl.dataflow.master import Extras, Master, StreamDataset
from hypha_ray.rl.dataflow.model_worker import Local, ModelWorker, Role, TrainedRole
from hypha_ray.rl.dataflow.requests import (
    Evaluate,
    Hook,
    Offload,
    Reallocate,
    Reply,
    RequestQueue,
    Sample,
    Save,
    WorkerLostError,
)
from hypha_ray.rl.generator_pool import GeneratorPool
from hypha_ray.rl.learner import Joint
from hypha_ray.rl.policy import sample_of
from hypha_ray.rl.policy_roles import Generator, Rollouts
from hypha_ray.rl.reward_role import Advantage, RewardRole
from hypha_ray.rl.roles import trained_roles
from hypha_ray.types import Flat, Samples, Sums, added

Traverse: TypeAlias = Callable[[Graph, Sample, Mapping[str, Extras]], Replies]
"""Function that takes a batch through a graph, as `Master.traverse`."""
T = TypeVar("T")
_ATTEMPTS = 5
"""Number of attempts at a step whose model workers die."""
_REFERENCE = "reference/"
"""Prefix of the reference's tensors in a trainer's state."""
_RAMP_STEPS = 10
"""Steps of warm-up of an optimizer that begins without a state beside trained weights. Its averages are of few
gradients, so its steps are long and random, and a small policy can lose its entropy by them."""
_DEADLINE_S = 3600.0
"""Longest time in seconds to wait for the next reply."""


class Island(WholeModel):
    """Trainer of a policy, and of a critic if the algorithm has one, on prompts.

    Models stay in evaluation mode, because dropout would make ratios of equal weights differ from 1.

    Args:
        job: the job file.
        tokenizer: tokenizer of the run.
        worker: number of the worker.

    Raises:
        HyphaError: the model can't be built, or a reward function can't be had.

    """

    def __init__(self, job: Job, tokenizer: Any, worker: int = 0) -> None:
        self._rl = job.rl
        self.device = device_of(job.worker.device)
        if job.run.mode == "replay":
            compute_reproducibly(self.device)
        model = build_trained(job, self.device)
        self.model: Any = model.to(self.device).eval()
        self._graph = step_graph(job.rl)
        self._advantage = Advantage(job.rl)
        self._roles = trained_roles(job, self.model, tokenizer, worker)
        self._roles["advantage"] = self._advantage
        other_workers = tuple(range(1, job.rl.model_workers))
        meshes = _meshes(job.rl, self._graph, self._roles, other_workers)
        self._first = ModelWorker(0, self._roles, {"steps": inner_steps(job)})
        self._workers = _workers(job, self._first, tokenizer)
        self._policies = policy_folders(job, worker)
        numbers = count()
        self._master = Master(meshes, self._new_queue(), numbers)
        self._stream = StreamDataset(self._workers, other_workers, rollout_call(job.rl), numbers, _DEADLINE_S)
        self._shared = _shared_rollouts(job, self._roles, worker)
        """Responses by the generators of the run; None if the job has none."""
        self._upcoming: list[Sample] = []
        """Prompts of the batches after the next one, as far as the staleness reaches."""
        self._refill = Refill(job.rl.refill)
        self._revived: list[int] = []
        """Numbers of model workers that were replaced since the last step."""
        self._version = 0
        """Number of batches that were trained on."""
        self._merged_version = 0
        """Version of the global weights that were merged last; 0 before the first merge."""
        self._merged_at = 0
        """Number of batches that were trained on before that merge."""
        self._validation: Sample | None = None
        """First batch of the validation prompts that were given last."""
        optimizers: list[Inner] = []
        self.parameters = 0
        for name, role in self._roles.items():
            if isinstance(role, TrainedRole):
                self.parameters += self._initialize(name)
                optimizers.append(role.optimizer)
        self.optimizer: Inner = Joint(optimizers) if len(optimizers) > 1 else optimizers[0]
        self._reference_is_old = False
        """Whether global weights were merged that the reference hasn't got yet."""

    def _initialize(self, role: str) -> int:
        """Build the optimizer of a role; return the number of the model's parameters."""
        spec = self._master.ask("spec", role).facts
        self._master.ask("initialize", role, **spec)
        config = self._master.ask("model_config", role).facts
        return int(config["parameters"])

    def check_loss(self, batch: Samples) -> None:
        """Do nothing: only trainers outside of Ray check a model themselves."""

    def seed(self, *entropy: int) -> None:
        """Let the order of minibatches depend on these numbers alone; responses depend on their prompts' keys."""
        seed_all(*entropy)

    def announce(self, upcoming_batches: Iterator[Samples]) -> None:
        """Take in as many of the next batches as may be responded to before their turn."""
        self._upcoming = [sample_of(batch) for batch in islice(upcoming_batches, self._rl.staleness)]
        self._refill.announce(upcoming_batches)

    def step(self, batch: Samples) -> Step:
        """Generate responses, and take the optimizer steps of all epochs and minibatches on them."""
        return self._train(batch)

    def backward(self, batch: Samples, summed: bool = False) -> Step:
        """Generate responses, and add their gradient to the gradients that are there, if it is finite."""
        gradient = "sum" if summed else "mean"
        return self._train(batch, gradient=gradient)

    def evaluate(self, batches: Iterable[Samples]) -> Sums:
        """Return reward, pass@1 and length of responses, which are sampled with the same random numbers each time."""
        batches_left = iter(batches)
        first_prompt = next(batches_left, None)
        if first_prompt is None:
            self._validation = None
            return {}
        self._validation = sample_of(first_prompt)
        return validate(self._traverse, chain([first_prompt], batches_left), self._rl, self._merged_version)

    def merged(self, version: int) -> None:
        """Let the reference have the merged weights, if it is the policy that the round began with.

        Responses of other weights are dropped: the stream begins each round empty.
        """
        failpoint("rl.merge")
        self._reference_is_old = self._rl.reference == "round"
        self._stream.begin_anew()
        if self._shared is not None:
            self._shared.begin_anew()
        self._merged_version = version
        self._merged_at = self._version
        if version and not self._version:
            self.optimizer.ramp(_RAMP_STEPS)

    def state(self) -> Flat:
        """Return the state of earlier steps: scales of losses, the divergence's coefficient, an averaged reference."""
        state: Flat = {}
        for name, scale in self._loss_scales():
            state |= {f"{name}/{key}": array for key, array in scale.state().items()}
        if self._rl.kl_target is not None:
            state["kl"] = np.array([self._advantage.kl])
        if self._rl.reference == "average":
            for name, tensor in self._first.weights("reference").items():
                array = tensor.float().cpu().numpy()
                state[f"{_REFERENCE}{name}"] = array.copy()
        return state

    def restore(self, state: Flat) -> None:
        """Go on with a result of `state`, beside a state of the optimizer."""
        self.optimizer.ramp(0)
        for name, scale in self._loss_scales():
            prefix = f"{name}/"
            scale.restore({key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)})
        if "kl" in state:
            self._advantage.kl = float(state["kl"][0])
        weights: dict[str, torch.Tensor] = {}
        for name, array in state.items():
            if name.startswith(_REFERENCE):
                weights[name.removeprefix(_REFERENCE)] = torch.from_numpy(array)
        if weights:
            self._roles["reference"].load()
            self._roles["reference"].take_weights(weights, 1.0)

    def _loss_scales(self) -> Iterator[tuple[str, LossScale]]:
        """Yield the scales of losses, with the names of their roles."""
        for name, role in self._roles.items():
            if isinstance(role, TrainedRole) and role.loss_scale is not None:
                yield name, role.loss_scale

    def close(self) -> None:
        """End all model workers of other processes, and a server that generates."""
        if self._shared is not None:
            self._shared.close()
        self._workers.close()
        for role in self._roles.values():
            role.close()

    def _train(self, batch: Samples, **arguments: Any) -> Step:
        """Take a batch through the graph; without one step taken it is bad, unless it had nothing to score."""
        extras = self._extras(arguments)
        if self._rl.refill:
            traversed = self._retry(lambda: self._traverse_refilled(batch, extras))
        else:
            traversed = self._traverse_once(batch, extras)
        replies = traversed.replies
        self._version += 1
        training = [call.name for call in self._graph.calls if call.op == "train_step"]
        facts_of_roles = [replies[name][0].facts for name in training]
        is_damaged = any(facts["damaged"] for facts in facts_of_roles)
        actor = facts_of_roles[0]
        revived_workers = tuple(self._revived)
        self._revived = []
        problems: list[str] = [] if self._shared is None else [*self._shared.take_problems()]
        for reply in (*traversed.before, *chain.from_iterable(replies.values())):
            problems += reply.problems
        shown_responses = with_advantages(traversed.shown, replies["advantage_inf"][0].facts["advantages"])
        return Step(
            loss=torch.tensor(actor["loss"]),
            scored=actor["scored"],
            norm=torch.tensor(actor["norm"]),
            tokens=actor["tokens"],
            sums=sums_of(replies) | traversed.sums | traversed.collectives,
            bad=batch.keys if is_damaged else batch.keys[:0],
            shown=shown_responses,
            revived=revived_workers,
            problems=tuple(problems),
            times=times(traversed),
            extra=traversed.extra,
            responders=traversed.responders,
        )

    def _traverse_once(self, batch: Samples, extras: Mapping[str, Extras]) -> Traversed:
        """Take a batch through the graph of a step."""
        prompts = sample_of(batch)
        if self._shared is not None:
            return self._traverse_shared(self._shared, prompts, extras)
        streamed = self._fetch_streamed(prompts)
        replies = {ROLLOUT: streamed, **self._traverse(self._graph, prompts, extras, streamed)}
        rewarded = streamed or replies["rew_inf"]
        sums = staleness_sums(streamed, self._version)
        return Traversed(replies, (), rewarded[0].facts["shown"], sums, self._master.collectives)

    def _traverse_shared(
        self, shared_rollouts: SharedRollouts, prompts: Sample, extras: Mapping[str, Extras]
    ) -> Traversed:
        """Have generators respond to a batch, and take it through the graph of a step."""
        self._master.clear()  # A batch that is repeated has ids that were trained on before.
        responded = shared_rollouts.fetch([prompts, *self._upcoming], self._version, self._merged_version)
        rollouts: list[Reply] = []
        for part in responded:
            kept_reply = self._master.keep(0, part.answer.sample)
            rollouts.append(part.answer.reply(kept_reply))
        replies = {ROLLOUT: tuple(rollouts), **self._traverse(self._graph, prompts, extras, rollouts)}
        sums = shares_of_generators(responded)
        if self._rl.is_asynchronous:
            sums |= staleness_sums(rollouts, self._version)
        shown_responses = shown_of(responded, self._rl.shown_responses)
        responders = responders_of(responded)
        return Traversed(replies, (), shown_responses, sums, self._master.collectives, responders=responders)

    def _traverse_refilled(self, batch: Samples, extras: Mapping[str, Extras]) -> Traversed:
        """Respond to a batch and to prompts in the place of others, and take those with a signal through the graph."""
        graph = rollout_graph(self._rl)
        transfers: Counter[str] = Counter()

        def rollout(prompts: Samples) -> Replies:
            replies = self._master.traverse(graph, sample_of(prompts), extras, keeps=True)
            transfers.update(self._master.collectives)
            return replies

        refilled = self._refill.refilled(batch, rollout)
        earlier_replies: list[Reply] = []
        for draw in refilled.draws:
            earlier_replies += chain.from_iterable(draw.values())
        replies = self._master.traverse(self._graph, sample_of(refilled.batch), extras, earlier_replies)
        self._master.drop(refilled.left_out)
        transfers.update(self._master.collectives)
        sums = added([reply.sums for reply in earlier_replies])
        sums |= added([reply.facts.get("equal_groups", {}) for reply in earlier_replies])
        sums["extra_prompts"] = float(refilled.extra), 1.0
        shown_responses = refilled.draws[0]["rew_inf"][0].facts["shown"]
        return Traversed(replies, tuple(earlier_replies), shown_responses, sums, transfers, refilled.extra)

    def _extras(self, arguments: Mapping[str, Any]) -> dict[str, Extras]:
        """Return arguments and hooks of the calls of a step; `arguments` are those of training."""
        offload: tuple[Hook, ...] = (Offload("reference"),) if self._rl.offload_reference else ()
        update: tuple[Hook, ...] = (Reallocate("actor", "reference"),) if self._reference_is_old else ()
        self._reference_is_old = False
        return {
            "actor_gen": Extras(before=generation_hooks(self._rl.model_workers)),
            "ref_inf": Extras(before=update, after=offload),
            "rew_inf": Extras({"round": self._merged_version}),
            "advantage_inf": Extras({"step": self._version}),
            "actor_train": Extras(arguments, after=tuple(self._hooks_after_training(offload))),
            "critic_train": Extras(arguments),
        }

    def _hooks_after_training(self, offload: tuple[Hook, ...]) -> Iterator[Hook]:
        """Yield hooks after a step of the policy: averaging of the reference, and evaluation and saving when due."""
        if self._rl.reference == "average":
            yield Reallocate("actor", "reference", self._rl.reference_rate)
            yield from offload
        steps = self._version + 1
        if _is_due(steps, self._rl.evaluation.every_steps) and self._validation is not None:
            yield Evaluate("evaluation", self._validation, self._merged_version)
        if _is_due(steps, self._rl.save_every_steps):
            name = f"version_{self._merged_version:06d}_step_{steps - self._merged_at:06d}"
            yield Save("actor", str(self._policies / name))

    def _fetch_streamed(self, batch: Sample) -> tuple[Reply, ...]:
        """Have rollout workers begin with the next batches, and wait for this one; without staleness do nothing."""
        if not self._rl.is_asynchronous:
            return ()
        self._retry(self._master.clear)  # A batch that is repeated has ids that were trained on before.
        batches = [batch, *self._upcoming]
        return self._retry(lambda: self._stream.fetch(batches, self._version, self._merged_version))

    def _traverse(
        self, graph: Graph, batch: Sample, extras: Mapping[str, Extras], streamed: Sequence[Reply] = ()
    ) -> Replies:
        """Take a batch through a graph; from the beginning again if a model worker dies."""
        return self._retry(lambda: self._master.traverse(graph, batch, extras, streamed))

    def _retry(self, action: Callable[[], T]) -> T:
        """Do something that needs model workers; again if some of them die and are replaced.

        Only workers that don't train can die, and responses depend on prompts and weights alone, so the step is the
        same.

        Raises:
            WorkerLostError: model workers die each time.

        """
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(WorkerLostError):
                return action()
            self._revived += self._workers.revive()
            self._master.renew(self._new_queue())
            self._stream.send_again()
        return action()

    def _new_queue(self) -> RequestQueue[Any]:
        return RequestQueue(self._workers, _DEADLINE_S)


def validate(traverse: Traverse, batches: Iterable[Samples], rl: RL, round: int | None = None) -> Sums:
    """Return reward, pass@1 and length of responses, which are sampled with the same random numbers each time.

    Args:
        traverse: takes a batch through a graph.
        batches: prompts.
        rl: table of the job file.
        round: round of the run; None outside of one.

    """
    graph = rollout_graph(rl)
    hooks = generation_hooks(rl.model_workers)
    extras: dict[str, Extras] = {}
    for call in graph.calls:
        before_hooks = hooks if call.op == "generate" else ()
        extras[call.name] = Extras({"evaluation": True, "round": round}, before_hooks)
    sums: list[Sums] = []
    for batch in batches:
        replies = traverse(graph, sample_of(batch), extras)
        sums.append(sums_of(replies))
    return added(sums)


def _is_due(steps: int, every_steps: int | None) -> bool:
    return every_steps is not None and steps % every_steps == 0


def _meshes(rl: RL, graph: Graph, roles: Mapping[str, Role], other_workers: tuple[int, ...]) -> dict[str, Mesh]:
    """Return the model workers of each role; those of the first worker are `roles`."""
    meshes: dict[str, Mesh] = {}
    for call in (*graph.calls, *rollout_graph(rl).calls):
        meshes[call.role] = Mesh((0,)) if call.role in roles else Mesh(other_workers)
    meshes["learner"] = Mesh((0, *other_workers))
    return meshes


def _shared_rollouts(job: Job, roles: Mapping[str, Role], worker: int) -> SharedRollouts | None:
    """Return the way to responses by generators; None if the job has none."""
    rl = job.rl
    if not rl.generators:
        return None
    from hypha_ray.rl.actor import RayGenerators  # Without generators, Ray has no part in this.

    name = f"worker-{worker}"
    generators = RayGenerators(str(job.run.name), name, rl.generators)
    pool = GeneratorPool(generators, name, job.worker.stall_s / 3, job.resources.start_deadline_s)
    role = Rollouts(cast(Generator, roles["actor"]), cast(RewardRole, roles["reward"]))
    return SharedRollouts(role, generators, pool, rl.generation.request_prompts, rl.staleness)


def policy_folders(job: Job, worker: int) -> Path:
    """Return the folder of the policies that a worker writes, on its own machine."""
    return Path(job.run.dir or ".", job.run.name or ".", "policies", f"worker-{worker}")


def _workers(job: Job, first_worker: ModelWorker, tokenizer: Any) -> Any:
    """Return the way to an island's model workers, of which the first one is in this process."""
    if job.rl.model_workers == 1:
        return Local({0: first_worker})
    from hypha_ray.rl.dataflow.actor import Actors  # Without other processes, Ray has no part in this.

    return Actors(first_worker, job, pack(tokenizer))
