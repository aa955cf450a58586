"""Roles of a job's algorithm, for the model worker that trains and for the others.

Those in training are the policy, which also generates, and the critic, which values the states before tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hypha_ray.config import Job
from hypha_ray.config.rl import MODEL
from hypha_ray.failpoints import failpoint
from hypha_ray.model.environment import compute_reproducibly, device_of
from hypha_ray.model.flat import views
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.model.lora import ActorCritic, CriticModel, build_trained, exported
from hypha_ray.model.saved_model import export
from hypha_ray.model.sources import require_same
from hypha_ray.model.tokenizers import vocabulary_of
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.optim.torch_extras import MIXED, scale_of
from hypha_ray.rl.algorithms.policy_losses import by_token, clipped_value_loss
from hypha_ray.rl.dataflow.model_worker import Role, RoleOutcome, TrainedRole, facts_of
from hypha_ray.rl.dataflow.requests import Sample
from hypha_ray.rl.engines.continuous import ContinuousEngine
from hypha_ray.rl.engines.native import Engine, Responses, accepted, positions
from hypha_ray.rl.engines.server import ServerEngine
from hypha_ray.rl.environments.rollouts import EnvironmentRollouts
from hypha_ray.rl.learner import Learner, critic_settings, step_on_parts, train
from hypha_ray.rl.policy import (
    Policy,
    Valued,
    end_tokens,
    logprob_gap,
    mixed_precision,
    packed_tokens,
    responses_of,
    tokens_of,
)
from hypha_ray.rl.policy_roles import Generator, Reference, Rollouts
from hypha_ray.rl.reward_model import load_scores
from hypha_ray.rl.reward_role import RewardRole
from hypha_ray.rl.scoring import Scorer
from hypha_ray.types import Sums


class Actor(Generator, TrainedRole):
    """Policy in training.

    Args:
        job: the job file.
        policy: the policy.
        ends: ids of tokens that end a response.
        write: function that writes the trained weights to a folder.
        engine: engine that generates; None: the policy generates itself.
        rollouts: environment that responses are a conversation with; None without one.

    """

    def __init__(
        self,
        job: Job,
        policy: Policy,
        ends: Collection[int],
        write: Callable[[Path], None],
        engine: Engine | None = None,
        rollouts: EnvironmentRollouts | None = None,
    ) -> None:
        super().__init__(job.rl, job.run.seed, policy, ends, engine, rollouts)
        self._job = job
        self._write = write
        self.learner = Learner(job, policy)

    def save(self, folder: str) -> None:
        """Write the policy for `from_pretrained`."""
        self._write(Path(folder))

    def config(self) -> Mapping[str, Any]:
        """Return facts of the model."""
        return facts_of(self.policy.model)

    def initialize(self, steps: int) -> None:
        """Build the optimizer."""
        job = self._job
        self.optimizer = build_optimizer(self.policy.model, job.inner_optimizer, steps, job.num_workers)
        self.loss_scale = scale_of(_autocast(job), self.device)

    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Compute the trainer's own log-probabilities, and their mean distance from those of generation."""
        responses = responses_of(sample, self.device)
        logprobs = self.policy.logprobs(responses)
        return RoleOutcome(packed_tokens(sample, {"proximal_logprobs": logprobs}), logprob_gap(logprobs, responses))

    def train_step(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Train on a batch, as `train`, or on gradients that other model workers have computed."""
        learner = self.learner
        if "gradients" in sample.data:
            outcome = step_on_parts(sample, self.policy.model, self.optimizer, arguments.get("gradient"))
        else:
            rollout = learner.rollout(sample)
            outcome = train(
                self._job, rollout, self.optimizer, learner.weights_of, learner.loss, arguments, self.loss_scale
            )
        failpoint("rl.train")
        return outcome


class TrainedCritic(TrainedRole):
    """Critic in training.

    Args:
        job: the job file.
        critic: the model, in evaluation mode.
        autocast: dtype of mixed precision; None: full precision.

    """

    def __init__(self, job: Job, critic: CriticModel, autocast: torch.dtype | None) -> None:
        self._job = job
        self._critic = critic
        self._autocast = autocast
        self._device = critic.head.weight.device

    def initialize(self, steps: int) -> None:
        """Build the optimizer."""
        self.optimizer = build_optimizer(self._critic, critic_settings(self._job), steps, self._job.num_workers)
        self.loss_scale = scale_of(self._autocast, self._device)

    @torch.no_grad()
    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Compute the values before all tokens of responses."""
        values = self._values(responses_of(sample, self._device))
        return RoleOutcome(packed_tokens(sample, {"values": values}))

    def train_step(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Train on a batch, as `train`; the loss is a mean over tokens."""
        responses = responses_of(sample, self._device)
        is_trained_on = torch.from_numpy(sample.data["kept"])
        rows = Valued(
            responses=responses,
            mask=responses.mask * is_trained_on.to(self._device)[:, None],
            old=tokens_of(sample, "values", self._device),
            returns=tokens_of(sample, "returns", self._device),
        )
        return train(
            self._job,
            rows,
            self.optimizer,
            lambda part: by_token(part.mask, 0, 0),
            self._loss,
            arguments,
            self.loss_scale,
        )

    def config(self) -> Mapping[str, Any]:
        """Return facts of the model."""
        return facts_of(self._critic)

    def _loss(self, part: Valued, weights: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        values = self._values(part.responses)
        value_clip = self._job.rl.critic.value_clip
        losses, is_clipped = clipped_value_loss(values, part.old, part.returns, value_clip)
        tokens = float(part.mask.sum())
        sums: Sums = {}
        for name, figure in (("value_loss", losses.detach()), ("value_clip_share", is_clipped)):
            total = (figure * part.mask).sum()
            sums[name] = float(total), tokens
        return (losses * weights).sum(), sums

    def _values(self, responses: Responses) -> torch.Tensor:
        length = responses.mask.shape[1]
        options = accepted(self._critic.base_model, positions(responses.attention_mask), length + 1)
        with mixed_precision(self._device, self._autocast):
            values: torch.Tensor = self._critic(
                input_ids=responses.ids, attention_mask=responses.attention_mask, use_cache=False, **options
            )
        return values[:, -length - 1 : -1].float()


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
    return MIXED.get(job.worker.autocast)
