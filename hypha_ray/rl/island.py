"""A trainer whose batch is prompts: a step is one traverse of the graph of model function calls.

prompts ──► actor_gen ──► rew_inf, ref_inf, critic_inf ──► advantage_inf ──► actor_train, critic_train
                ▲                                                                     │
                └────────────────────────── the same weights ─────────────────────────┘
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from hypha_ray.config import Job
from hypha_ray.failpoints import failpoint
from hypha_ray.model.critic import ActorCritic
from hypha_ray.model.environment import device_of, seed_all
from hypha_ray.model.trained import build_trained, exported
from hypha_ray.optim.joint import Joint
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.schedules import inner_steps
from hypha_ray.optim.step import Step
from hypha_ray.rl.dataflow.master import Extras
from hypha_ray.rl.dataflow.requests import Reallocate
from hypha_ray.rl.graphs import step_graph
from hypha_ray.rl.packing import sample_of
from hypha_ray.rl.policy import Policy
from hypha_ray.rl.roles.actor import Actor
from hypha_ray.rl.roles.advantage import Advantage
from hypha_ray.rl.roles.critic import Values
from hypha_ray.rl.roles.policies import Reference
from hypha_ray.rl.roles.reward import Reward
from hypha_ray.rl.roles.role import Role, TrainedRole
from hypha_ray.rl.scoring import Scorer
from hypha_ray.rl.tokens import end_tokens
from hypha_ray.rl.workers.in_process import master_of, sums_of, validate
from hypha_ray.types import Flat, Samples, Sums

_REFERENCE = "reference/"
"""Prefix of the reference's tensors in a trainer's state."""


class Island:
    """Trainer of a policy, and of a critic if the algorithm has one, on prompts.

    Models stay in evaluation mode, because dropout would make ratios of equal weights differ from 1.

    Args:
        job: the job file.
        tokenizer: tokenizer of the run.

    Raises:
        HyphaError: the model can't be built, or a reward function can't be had.

    """

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self._rl = job.rl
        self.device = device_of(job.worker.device)
        self.model = build_trained(job).to(self.device).eval()
        self._advantage = Advantage(job.rl)
        self._roles = roles = {**_models(job, self.model, tokenizer), "advantage": self._advantage}
        self._graph, self._master = step_graph(job.rl), master_of(roles, steps=inner_steps(job))
        trained = {name: role for name, role in roles.items() if isinstance(role, TrainedRole)}
        for name in trained:
            self._master.ask("initialize", name, **self._master.ask("spec", name).facts)
        optimizers = [role.optimizer for role in trained.values()]
        self.optimizer: Inner = Joint(optimizers) if len(optimizers) > 1 else optimizers[0]
        self.parameters: int = sum(self._master.ask("model_config", name).facts["parameters"] for name in trained)
        self._merged = False
        """Global weights were merged that the reference hasn't got yet."""

    def check_loss(self, batch: Samples) -> None:
        """Do nothing: only trainers outside of Ray check a model themselves."""

    def seed(self, *entropy: int) -> None:
        """Let the order of minibatches depend on these numbers alone; responses depend on their prompts' keys."""
        seed_all(*entropy)

    def step(self, batch: Samples) -> Step:
        """Generate responses, and take the optimizer steps of all epochs and minibatches on them."""
        return self._train(batch)

    def backward(self, batch: Samples, summed: bool = False) -> Step:
        """Generate responses, and add their gradient to the gradients that are there, if it is finite."""
        return self._train(batch, gradient="sum" if summed else "mean")

    def evaluate(self, batches: Iterable[Samples]) -> Sums:
        """Return reward, pass@1 and length of responses, which are sampled with the same random numbers each time."""
        return validate(self._master, batches)

    def merged(self, version: int) -> None:
        """Let the reference have the merged weights, if it is the policy that the round began with."""
        failpoint("rl.merge")
        self._merged = self._rl.reference == "round"

    def state(self) -> Flat:
        """Return what depends on earlier steps: an adapted coefficient of the divergence, an averaged reference."""
        found: Flat = {} if self._rl.kl_target is None else {"kl": np.array([self._advantage.kl])}
        if self._rl.reference == "average":
            own = self._roles["reference"].weights()
            found |= {f"{_REFERENCE}{name}": own[name].float().cpu().numpy().copy() for name in own}
        return found

    def restore(self, state: Flat) -> None:
        """Go on with what `state` gave."""
        if "kl" in state:
            self._advantage.kl = float(state["kl"][0])
        averaged = {name: array for name, array in state.items() if name.startswith(_REFERENCE)}
        if averaged:
            weights = {name.removeprefix(_REFERENCE): torch.from_numpy(array) for name, array in averaged.items()}
            self._roles["reference"].take_weights(weights, 1.0)

    def close(self) -> None:
        """Do nothing: only memory is held."""

    def _train(self, batch: Samples, **arguments: Any) -> Step:
        """Take a batch through the graph; without one step taken it is bad, unless it had nothing to score."""
        training = [call.name for call in self._graph.calls if call.op == "train_step"]
        extras = {name: Extras(arguments) for name in training}
        if self._merged:
            extras["ref_inf"], self._merged = Extras(before=(Reallocate("actor", "reference"),)), False
        if self._rl.reference == "average":
            average = Reallocate("actor", "reference", self._rl.reference_rate)
            extras["actor_train"] = Extras(arguments, after=(average,))
        replies = self._master.traverse(self._graph, sample_of(batch), extras)
        actor, *others = [replies[name][0].facts for name in training]
        damaged = any(facts["damaged"] for facts in (actor, *others))
        loss, norm = (torch.tensor(actor[name]) for name in ("loss", "norm"))
        bad = batch.keys if damaged else batch.keys[:0]
        shown = replies["rew_inf"][0].facts["shown"]
        return Step(loss, actor["scored"], norm, actor["tokens"], sums_of(replies), bad, shown)


def _models(job: Job, model: torch.nn.Module, tokenizer: Any) -> dict[str, Role]:
    """Return the roles that the job's algorithm has, around the modules that are trained."""
    autocast = torch.bfloat16 if job.worker.autocast == "bf16" else None
    policy = Policy(exported(model), job.rl.generation.temperature, autocast)
    roles: dict[str, Role] = {
        "actor": Actor(job, policy, end_tokens(policy.model, tokenizer)),
        "reward": Reward(Scorer(job.rl, tokenizer), job.rl.shown_responses),
    }
    if isinstance(model, ActorCritic):
        roles["critic"] = Values(job, model.critic, autocast)
    if job.rl.reference != "none":
        roles["reference"] = Reference(policy.of(copy.deepcopy(policy.model)))
    return roles
