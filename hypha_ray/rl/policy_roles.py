"""Roles of policies that aren't trained: generator, rollout worker, and the reference of the trained policy."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hypha_ray.config.rl import RL
from hypha_ray.errors import ConfigError
from hypha_ray.failpoints import failpoint
from hypha_ray.rl.dataflow.model_worker import Role, RoleOutcome
from hypha_ray.rl.dataflow.requests import Sample
from hypha_ray.rl.engines.native import (
    ROUNDING,
    Engine,
    EngineUnableError,
    Responses,
    Sampling,
    draw,
    evaluation_sampling,
    training_sampling,
)
from hypha_ray.rl.environments.rollouts import EnvironmentRollouts, Integers
from hypha_ray.rl.policy import Policy, packed_episodes, packed_responses, packed_tokens, prompts_of, responses_of
from hypha_ray.rl.reward_role import RewardRole
from hypha_ray.rl.rewards.response import records_of

_CLOSE = 0.1
"""Largest mean distance of an engine's log-probabilities from the policy's; number formats make 0.02."""


class OffloadedWeights:
    """Parameters of a model, kept in pinned memory if it is on a GPU, otherwise in a file; the model's own are empty.

    The module and its parameters stay the same objects, so tied ones stay tied. Buffers stay where they are.

    Args:
        model: the model; it can't compute until `load`.

    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        tensors = [parameter.data for parameter in self._parameters]
        self._pinned: list[torch.Tensor] | None = None
        self._file: Any = None
        if tensors[0].is_cuda:
            self._pinned = [tensor.cpu().pin_memory() for tensor in tensors]
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed when the weights are back.
            torch.save(tensors, self._file)
        self._device = tensors[0].device
        for parameter in self._parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)

    def load(self) -> None:
        """Bring the weights back, to the bit."""
        tensors = self._pinned
        if tensors is None:
            with self._file:
                self._file.seek(0)
                tensors = torch.load(self._file, weights_only=True)
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor.to(self._device)


class PolicyRole(Role):
    """Role of a policy.

    Args:
        policy: the policy; its model stays in evaluation mode.

    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.device = policy.model.device
        self._offloaded: OffloadedWeights | None = None

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the model's weights that may change: frozen ones are those that the job began with."""
        model = self.policy.model
        weights = dict(model.state_dict())
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                weights.pop(name, None)
        return {name: tensor.detach() for name, tensor in weights.items()}

    @torch.no_grad()
    def take_weights(self, weights: Mapping[str, torch.Tensor], eta: float) -> None:
        """Move the model's weights towards others; with an `eta` of 1 they become equal."""
        tensors = self.policy.model.state_dict()
        for name, weight in weights.items():
            tensor = tensors[name]
            source = weight.to(tensor.device)
            if tensor.is_floating_point():
                source = torch.lerp(tensor, source, eta)
            tensor.copy_(source)

    def offload(self) -> None:
        """Move the model's weights out of the device's memory, if they aren't already."""
        self._offloaded = self._offloaded or OffloadedWeights(self.policy.model)

    def load(self) -> None:
        """Bring offloaded weights back."""
        if self._offloaded is not None:
            self._offloaded.load()
            self._offloaded = None


class Generator(PolicyRole):
    """Policy that answers prompts.

    Args:
        rl: table of the job file.
        seed: seed of the run.
        policy: the policy.
        ends: ids of tokens that end a response.
        engine: engine that generates; None: the policy generates itself.
        rollouts: environment that responses are a conversation with; None without one.

    """

    def __init__(
        self,
        rl: RL,
        seed: int,
        policy: Policy,
        ends: Collection[int],
        engine: Engine | None = None,
        rollouts: EnvironmentRollouts | None = None,
    ) -> None:
        super().__init__(policy)
        self._rl = rl
        self._seed = seed
        self._ends = ends
        self._engine = engine
        self._rollouts = rollouts
        self._compared = False
        """Whether log-probabilities of the engine were compared with the policy's own."""

    def generate(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Make a group of responses to each prompt; with `evaluation` by the settings of evaluation."""
        is_evaluation = bool(arguments.get("evaluation"))
        settings = evaluation_sampling(self._rl) if is_evaluation else training_sampling(self._rl)
        sampling = replace(settings, vocabulary=self.policy.vocabulary)
        problems: list[str] = []
        began_at = time.thread_time()

        def respond(ids: Integers, mask: Integers, keys: Integers, sampling: Sampling) -> Responses:
            responses, new_problems = self._respond(ids, mask, keys, sampling, is_evaluation)
            problems.extend(new_problems)
            return responses

        if self._rollouts is None:
            responses = respond(*prompts_of(sample), sample.data["keys"], sampling)
            generated = packed_responses(sample.ids, responses, sampling.samples)
        else:
            prompts = np.split(sample.data["prompts"], np.cumsum(sample.meta.flat("prompts"))[:-1])
            token_ids = [prompt.tolist() for prompt in prompts]
            records = records_of(sample.data["reward_data"])
            trajectories = self._rollouts.play(token_ids, sample.data["keys"], records, sampling, respond)
            self._rollouts.warn_of_failures(trajectories)
            generated = packed_episodes(sample.ids, trajectories, sampling.samples)
        worked_s = time.thread_time() - began_at
        if failpoint("rl.generate") == "triple":
            time.sleep(2 * worked_s)
        return RoleOutcome(generated, problems=tuple(dict.fromkeys(problems)))

    def _respond(
        self, prompts: Integers, prompt_mask: Integers, keys: Integers, sampling: Sampling, is_evaluation: bool
    ) -> tuple[Responses, tuple[str, ...]]:
        """Return the responses to prompts that are padded on the left, and problems."""
        ids = torch.from_numpy(prompts).to(self.device)
        mask = torch.from_numpy(prompt_mask).to(self.device)
        responses, problems = self._by_engine(ids, mask, keys, sampling)
        if responses is None:
            uniform = draw(self._seed, keys, sampling).to(self.device)
            responses = self.policy.sample(ids, mask, uniform, sampling, self._ends)
        elif self._engine is not None and not (self._compared or is_evaluation):
            self._compare(self._engine, responses)
        return responses, problems

    def _by_engine(
        self, ids: torch.Tensor, mask: torch.Tensor, keys: Any, sampling: Sampling
    ) -> tuple[Responses | None, tuple[str, ...]]:
        """Return the engine's responses, and problems; None instead of responses if the policy has to generate."""
        if self._engine is None:
            return None, ()
        try:
            responses = self._engine.generate(self.policy.model, ids, mask, keys, sampling, self._ends)
        except EngineUnableError as error:
            problem = f"{self._engine.name} can't be used; the policy generates itself meanwhile: {error}"
            return None, (problem,)
        self._check(self._engine, responses)
        return responses, ()

    def close(self) -> None:
        """End a server that was started, and the processes of an environment."""
        if self._engine is not None:
            self._engine.close()
        if self._rollouts is not None:
            self._rollouts.close()

    def _check(self, engine: Engine, responses: Responses) -> None:
        """Refuse tokens and log-probabilities that no response of the policy can have.

        Raises:
            ConfigError: RL021, with the number.

        """
        mask = responses.mask.bool()
        embeddings = self.policy.model.get_input_embeddings().weight
        rows = int(embeddings.shape[0])
        tokens = responses.ids[:, responses.prompt_width :]
        ids = tokens[mask]
        unknown_ids = torch.tensor(self.policy.vocabulary.unknown(rows), dtype=torch.long, device=ids.device)
        problem = f"{engine.name} has made what can't be a response"
        wrong_ids = ids[(ids < 0) | (ids >= rows) | torch.isin(ids, unknown_ids)]
        if len(wrong_ids):
            got = f"the token id {int(wrong_ids[0])}"
            raise ConfigError("RL021", problem, got, "ids of the model that its tokenizer has", engine.remedy)
        logprobs = responses.logprobs[mask]
        is_possible = logprobs.isfinite() & (logprobs <= ROUNDING)
        wrong_logprobs = logprobs[~is_possible]
        if len(wrong_logprobs):
            got = f"the log-probability {float(wrong_logprobs[0]):g}"
            raise ConfigError("RL021", problem, got, "finite numbers up to 0", engine.remedy)

    def _compare(self, engine: Engine, responses: Responses) -> None:
        """Refuse an engine whose log-probabilities are of another model or temperature.

        Raises:
            ConfigError: RL024.

        """
        distances = (self.policy.logprobs(responses) - responses.logprobs).abs()
        total = (distances * responses.mask).sum()
        mean = float(total / responses.mask.sum())
        if not mean <= _CLOSE:
            problem = f"{engine.name} has other log-probabilities than the policy"
            raise ConfigError("RL024", problem, f"{mean:.2g} apart in the mean", f"up to {_CLOSE:g}", engine.remedy)
        self._compared = True


class Reference(PolicyRole):
    """Reference of the trained policy; its model isn't trained, but may take the trained policy's weights.

    Args:
        policy: policy with a copy of the trained model.

    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._names = list(super().weights())
        policy.model.requires_grad_(False)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the weights that may change, as they do in the trained model."""
        tensors = self.policy.model.state_dict()
        return {name: tensors[name] for name in self._names}

    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Compute log-probabilities of responses."""
        logprobs = self.policy.logprobs(responses_of(sample, self.device))
        return RoleOutcome(packed_tokens(sample, {"reference_logprobs": logprobs}))


class Rollouts(Role):
    """Responses with rewards; a reply has the version of the weights that sampled them.

    Args:
        generator: policy that responds.
        reward: functions that reward the responses.

    """

    def __init__(self, generator: Generator, reward: RewardRole) -> None:
        self._generator = generator
        self._reward = reward

    def generate(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        """Respond to prompts and reward the responses; `version` is that of the weights."""
        generated = self._generator.generate(sample, arguments)
        responses = generated.sample
        assert responses is not None
        rewarded = self._reward.inference(sample.update(responses), arguments)
        assert rewarded.sample is not None
        return RoleOutcome(
            sample=responses.update(rewarded.sample),
            sums=rewarded.sums,
            facts={**rewarded.facts, "version": arguments["version"]},
            problems=generated.problems + rewarded.problems,
        )

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the generator's weights."""
        return self._generator.weights()

    def take_weights(self, weights: Mapping[str, torch.Tensor], eta: float) -> None:
        """Move the generator's weights."""
        self._generator.take_weights(weights, eta)
