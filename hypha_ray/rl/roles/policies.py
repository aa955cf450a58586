"""Roles of policies that aren't trained: generator, rollout worker, and the reference of the trained policy."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from hypha_ray.config.tables.rl import RL
from hypha_ray.errors import ConfigError
from hypha_ray.failpoints import failpoint
from hypha_ray.rl.dataflow.sample import Sample
from hypha_ray.rl.engines.completions import ROUNDING, Engine, EngineUnableError
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.engines.sampling import Sampling, draw, evaluation_sampling, training_sampling
from hypha_ray.rl.packing import packed_responses, packed_tokens, prompts_of, responses_of
from hypha_ray.rl.policy import Policy
from hypha_ray.rl.roles.reward import Reward
from hypha_ray.rl.roles.role import Outcome, Role


class OffloadedWeights:
    """Parameters of a model, which are empty meanwhile: in pinned memory if it is on a GPU, otherwise in a file.

    The module and its parameters stay the same objects, so tied ones stay tied. Buffers stay where they are.

    Args:
        model: the model; it can't compute until `load`.

    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        tensors = [one.data for one in self._parameters]
        self._pinned: list[torch.Tensor] | None = None
        self._file: Any = None
        if tensors[0].is_cuda:
            self._pinned = [one.cpu().pin_memory() for one in tensors]
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


_CLOSE = 0.1
"""Largest mean distance of an engine's log-probabilities from the policy's; number formats make 0.02."""


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
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in frozen}

    @torch.no_grad()
    def take_weights(self, weights: Mapping[str, torch.Tensor], eta: float) -> None:
        """Move the model's weights towards others; with an `eta` of 1 they are equal to them."""
        own = self.policy.model.state_dict()
        for name, given in weights.items():
            tensor = own[name]
            source = given.to(own[name].device)
            tensor.copy_(torch.lerp(tensor, source, eta) if tensor.is_floating_point() else source)

    def offload(self) -> None:
        """Move the model's weights out of the device's memory, if they aren't already."""
        self._offloaded = self._offloaded or OffloadedWeights(self.policy.model)

    def load(self) -> None:
        """Bring weights that were moved back."""
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
        engine: engine that generates; None: the policy does itself.

    """

    def __init__(self, rl: RL, seed: int, policy: Policy, ends: Collection[int], engine: Engine | None = None) -> None:
        super().__init__(policy)
        self._rl = rl
        self._seed = seed
        self._ends = ends
        self._engine = engine
        self._compared = False
        """Log-probabilities of the engine were compared with the policy's own."""

    def generate(self, sample: Sample, arguments: Mapping[str, Any]) -> Outcome:
        """Make a group of responses to each prompt; with `evaluation` as many as evaluation wants."""
        settings = (evaluation_sampling if arguments.get("evaluation") else training_sampling)(self._rl)
        sampling = replace(settings, vocabulary=self.policy.vocabulary)
        ids, mask = (torch.from_numpy(one).to(self.device) for one in prompts_of(sample))
        began = time.thread_time()
        responses, problems = self._by_engine(ids, mask, sample.data["keys"], sampling)
        if responses is None:
            uniform = draw(self._seed, sample.data["keys"], sampling).to(self.device)
            responses = self.policy.sample(ids, mask, uniform, sampling, self._ends)
        elif self._engine is not None and not (self._compared or arguments.get("evaluation")):
            self._compare(self._engine, responses)
        worked_s = time.thread_time() - began
        if failpoint("rl.generate") == "triple":
            time.sleep(2 * worked_s)
        return Outcome(packed_responses(sample.ids, responses, sampling.samples), problems=problems)

    def _by_engine(
        self, ids: torch.Tensor, mask: torch.Tensor, keys: Any, sampling: Sampling
    ) -> tuple[Responses | None, tuple[str, ...]]:
        """Return the engine's responses, and problems; None in their place: the policy has to generate itself."""
        if self._engine is None:
            return None, ()
        try:
            responses = self._engine.generate(self.policy.model, ids, mask, keys, sampling, self._ends)
        except EngineUnableError as error:
            return None, (f"{self._engine.name} can't be used; the policy generates itself meanwhile: {error}",)
        self._check(self._engine, responses)
        return responses, ()

    def close(self) -> None:
        """End a server that was started."""
        if self._engine is not None:
            self._engine.close()

    def _check(self, engine: Engine, responses: Responses) -> None:
        """Refuse tokens and log-probabilities that no response of the policy can have.

        Raises:
            ConfigError: RL021, with the number.

        """
        taken = responses.mask.bool()
        rows = int(self.policy.model.get_input_embeddings().weight.shape[0])
        ids = responses.ids[:, -taken.shape[1] :][taken]
        logprobs = responses.logprobs[taken]
        what = f"{engine.name} has made what can't be a response"
        unknown = torch.tensor(self.policy.vocabulary.unknown(rows), dtype=torch.long, device=ids.device)
        if len(wrong := ids[(ids < 0) | (ids >= rows) | torch.isin(ids, unknown)]):
            allowed = "ids of the model that its tokenizer has"
            raise ConfigError("RL021", what, f"the token id {int(wrong[0])}", allowed, engine.remedy)
        if len(wrong := logprobs[~(logprobs.isfinite() & (logprobs <= ROUNDING))]):
            got = f"the log-probability {float(wrong[0]):g}"
            raise ConfigError("RL021", what, got, "finite numbers up to 0", engine.remedy)

    def _compare(self, engine: Engine, responses: Responses) -> None:
        """Refuse an engine whose log-probabilities are of another model or temperature.

        Raises:
            ConfigError: RL024.

        """
        gap = (self.policy.logprobs(responses) - responses.logprobs).abs()
        mean = float((gap * responses.mask).sum() / responses.mask.sum())
        if not mean <= _CLOSE:
            what = f"{engine.name} has other log-probabilities than the policy"
            raise ConfigError("RL024", what, f"{mean:.2g} apart in the mean", f"up to {_CLOSE:g}", engine.remedy)
        self._compared = True


class Reference(PolicyRole):
    """Policy that the trained one is held to; its model isn't trained, but may take the trained one's weights.

    Args:
        policy: policy with a copy of the trained model.

    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._names = super().weights().keys()
        policy.model.requires_grad_(False)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the weights that may change, as they do in the trained model."""
        own = self.policy.model.state_dict()
        return {name: own[name] for name in self._names}

    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> Outcome:
        """Compute log-probabilities of responses."""
        logprobs = self.policy.logprobs(responses_of(sample, self.device))
        return Outcome(packed_tokens(sample, {"reference_logprobs": logprobs}))


class Rollouts(Role):
    """Responses with rewards; a reply tells the version of the weights that they were sampled with.

    Args:
        generator: policy that responds.
        reward: functions that reward the responses.

    """

    def __init__(self, generator: Generator, reward: Reward) -> None:
        self._generator = generator
        self._reward = reward

    def generate(self, sample: Sample, arguments: Mapping[str, Any]) -> Outcome:
        """Respond to prompts and reward the responses; `version` is that of the weights."""
        generated = self._generator.generate(sample, arguments)
        made = generated.sample
        assert made is not None
        rewarded = self._reward.inference(sample.update(made), arguments)
        assert rewarded.sample is not None
        facts = {**rewarded.facts, "version": arguments["version"]}
        return Outcome(made.update(rewarded.sample), rewarded.sums, facts, generated.problems + rewarded.problems)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the generator's weights."""
        return self._generator.weights()

    def take_weights(self, weights: Mapping[str, torch.Tensor], eta: float) -> None:
        """Move the generator's weights."""
        self._generator.take_weights(weights, eta)
