"""Roles of a job's algorithm, for the model worker that trains and for the others."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hypha_ray.config import Job
from hypha_ray.config.tables.rewards import MODEL
from hypha_ray.model.environment import compute_reproducibly, device_of
from hypha_ray.model.flat import views
from hypha_ray.model.identity import require_same
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.model.saved_model import export
from hypha_ray.model.trained import ActorCritic, build_trained, exported
from hypha_ray.model.vocabulary import vocabulary_of
from hypha_ray.rl.engines.completions import Engine
from hypha_ray.rl.engines.continuous import ContinuousEngine
from hypha_ray.rl.engines.server import ServerEngine
from hypha_ray.rl.environments.rollouts import EnvironmentRollouts
from hypha_ray.rl.policy import Policy, end_tokens
from hypha_ray.rl.reward_model import load_scores
from hypha_ray.rl.roles.actor_critic import Actor, TrainedCritic
from hypha_ray.rl.roles.learner import Learner
from hypha_ray.rl.roles.policies import Generator, Reference, Rollouts
from hypha_ray.rl.roles.reward import RewardRole
from hypha_ray.rl.roles.role import Role
from hypha_ray.rl.scoring import Scorer


def trained_roles(job: Job, model: torch.nn.Module, tokenizer: Any, worker: int) -> dict[str, Role]:
    """Return the roles of the trained modules, and all others if the island has one model worker."""
    policy = _policy(job, exported(model), tokenizer)
    write = partial(_write, job, model, tokenizer)
    ends = end_tokens(policy.model, tokenizer)
    generates = job.rl.model_workers == 1 or job.rl.evaluation.every_steps is not None
    rollouts = EnvironmentRollouts.of(job.rl, policy.model, tokenizer, ends) if generates else None
    actor = Actor(job, policy, ends, write, _engine(job, tokenizer, worker), rollouts)
    roles: dict[str, Role] = {"actor": actor, "learner": actor.learner}
    evaluates = job.rl.evaluation.every_steps is not None
    is_only_worker = job.rl.model_workers == 1
    if evaluates or is_only_worker:
        reward = _reward(job, tokenizer)
        if evaluates:
            roles["evaluation"] = Rollouts(actor, reward)
        if is_only_worker:
            roles["reward"] = reward
    if isinstance(model, ActorCritic):
        roles["critic"] = TrainedCritic(job, model.critic, _autocast(job))
    if job.rl.reference != "none" and job.rl.reference_is_trainers:
        roles["reference"] = Reference(policy.of(copy.deepcopy(policy.model)))
    return roles


def untrained_roles(job: Job, tokenizer: Any) -> dict[str, Role]:
    """Return the roles of a model worker that doesn't train.

    Raises:
        HyphaError: a model can't be built, or isn't the one that the run began with.

    """
    require_same(job, job.begun_with)
    device = device_of(job.worker.device)
    if job.run.mode == "replay":
        compute_reproducibly(device)
    model = exported(build_trained(job, device))
    policy = _policy(job, model.to(device).eval(), tokenizer)
    engine = _engine(job, tokenizer, 0)
    ends = end_tokens(policy.model, tokenizer)
    rollouts = EnvironmentRollouts.of(job.rl, policy.model, tokenizer, ends)
    generator = Generator(job.rl, job.run.seed, policy, ends, engine, rollouts)
    reward = _reward(job, tokenizer)
    roles: dict[str, Role] = {"generator": generator, "reward": reward, "rollout": Rollouts(generator, reward)}
    roles["learner"] = Learner(job, policy)
    if job.rl.reference != "none" and not job.rl.reference_is_trainers:
        roles["reference"] = Reference(policy.of(copy.deepcopy(policy.model)))
    return roles


def _write(job: Job, model: torch.nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the trained weights in the form of the run's final model."""
    layout = layout_of(model)
    export(job, tokenizer, views(layout, [gather(model, layout, 0)]), folder)


def _engine(job: Job, tokenizer: Any, worker: int) -> Engine | None:
    """Return the engine that generates; None if the policy generates itself."""
    match job.rl.generation.engine:
        case "server":
            log: Path | None = None
            if job.run.dir is not None:
                log = _logs(job) / f"generation-{worker}.log"
            return ServerEngine(job.rl.generation.server, job.run.seed, worker, tokenizer, log)
        case "continuous":
            return ContinuousEngine(job.run.seed)
    return None


def _logs(job: Job) -> Path:
    """Return the folder of the run's logs, on this worker's own machine."""
    return Path(job.run.dir or ".", job.run.name or ".", "logs")


def _reward(job: Job, tokenizer: Any) -> RewardRole:
    model = None
    if MODEL in job.rl.reward.functions:
        model = load_scores(job.rl.reward, job.model, device_of(job.worker.device))
    return RewardRole(Scorer(job.rl, tokenizer, model), job.rounds, job.rl.shown_responses)


def _policy(job: Job, model: Any, tokenizer: Any) -> Policy:
    return Policy(model, job.rl.generation.temperature, _autocast(job), vocabulary_of(tokenizer))


def _autocast(job: Job) -> torch.dtype | None:
    return torch.bfloat16 if job.worker.autocast == "bf16" else None
