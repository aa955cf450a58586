"""A response to a prompt, as reward functions get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

from hypha_ray.config.schema import Rounds


class TrainerState(SimpleNamespace):
    """Progress of a run, by names of the state of transformers' trainer; other attributes of that aren't here."""

    global_step: int
    """Number of rounds that the weights of the round's beginning have had."""
    epoch: float
    """Number of the epoch that the prompt is drawn in, from 0."""
    max_steps: int
    """Number of rounds of the run; absent if it isn't known."""

    @classmethod
    def of(cls, rounds: Rounds, round: int, epoch: int) -> TrainerState:
        """Return the state in a round, for a prompt of an epoch."""
        state = cls(global_step=round, epoch=float(epoch))
        if rounds.counted:
            state.max_steps = rounds.update_rounds
        return state

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what isn't known.

        Raises:
            AttributeError: always; an attribute that is there isn't looked up so.

        """
        known = ", ".join(self.__dict__)
        raise AttributeError(f"trainer_state has no {name!r} here, only {known}")


@dataclass(frozen=True, slots=True)
class Response:
    """A response to a prompt."""

    prompt: str
    """Text of the prompt."""
    text: str
    """Text of the response, without the end token and other special tokens."""
    ids: tuple[int, ...]
    """Token ids of the response, the end token included."""
    ended: bool
    """Whether the model ended the response itself; otherwise it was cut at the largest number of tokens."""
    data: Mapping[str, Any]
    """Record of the prompt in the dataset: ``task``, ``answer``, and other columns if there are any."""
    most_tokens: int
    """Largest number of tokens that a response may have."""
    is_chat: bool = False
    """Whether the prompt was put into a chat template."""
    conversation: tuple[Mapping[str, str], ...] = ()
    """Turns behind the prompt, each with `content` and `role`, ``assistant`` or ``environment``; empty without an
    environment. With one, `text` is the policy's last turn, and `ids` are those of all its turns."""
    episode_reward: float | None = None
    """Sum of the rewards that the environment gave; None without one, or if the episode has failed."""
    trainer_state: TrainerState | None = None
    """Progress of the run; None outside of one."""

    @property
    def completion(self) -> str | list[dict[str, str]]:
        """The response as trl's functions take it: its text, or after a chat the message of the assistant.

        A conversation with an environment is the list of its turns.
        """
        if self.conversation:
            return [dict(turn) for turn in self.conversation]
        if self.is_chat:
            return [{"role": "assistant", "content": self.text}]
        return self.text

    @property
    def answer(self) -> str:
        """Right answer.

        Raises:
            KeyError: the dataset has none for this prompt.

        """
        return str(self.data["answer"])
