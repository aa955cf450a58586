"""Modules of an actor-critic job: the policy, and a critic that values the states before tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hypha_ray.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Critic(torch.nn.Module):
    """Body of a language model under a head of one number, which is 0 before any training.

    Args:
        network: the language model, whose own head is left out.

    Raises:
        ConfigError: RL014, body and head of the model can't be told apart.

    """

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        output = network.get_output_embeddings()
        if network.base_model is network or output is None:
            fix = "choose an algorithm without a critic, or another model"
            raise ConfigError("RL014", "no critic can be made of the model", type(network).__name__, fix=fix)
        self.base_model: Any = network.base_model
        self.head = torch.nn.Linear(output.weight.shape[1], 1, device=network.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, **inputs: Any) -> torch.Tensor:
        """Return values, [sequences, positions]; the inputs are those of the body."""
        hidden: torch.Tensor = self.base_model(**inputs).last_hidden_state
        values: torch.Tensor = self.head(hidden)[..., 0]
        return values


class ActorCritic(torch.nn.Module):
    """Policy and critic, which are trained and exchanged together.

    Args:
        actor: the policy.
        critic: another copy of the model, to be made a critic.

    """

    def __init__(self, actor: PreTrainedModel, critic: PreTrainedModel) -> None:
        super().__init__()
        self.actor = actor
        self.critic = Critic(critic)
