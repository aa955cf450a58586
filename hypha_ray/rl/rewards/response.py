"""A response to a prompt, as reward functions get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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

    @property
    def completion(self) -> str | list[dict[str, str]]:
        """The response as trl's functions take it: its text, or after a chat the message of the assistant."""
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
