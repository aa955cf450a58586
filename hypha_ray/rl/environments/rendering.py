"""Token ids of an environment's messages: by the tokenizer's chat template, or without one their plain texts.

What the policy has sampled is never made into a text and back: only messages of the environment are tokenized.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from hypha_ray.errors import reason_of
from hypha_ray.model.loading.tokenizer import is_templated, rules_of
from hypha_ray.rl.environments.environment import Message

_ASSISTANT: Final = "content-of-the-assistant"
"""Content of a message whose end is looked for in a rendered text."""
_BEGIN: Final[list[Message]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ASSISTANT}]
"""Conversation before the messages of an environment. They have the same text after any conversation."""


class RenderingError(Exception):
    """Messages that can't be made into tokens."""


class Renderer:
    """Messages as token ids.

    Args:
        tokenizer: tokenizer of the run.
        ends: ids of tokens that end a response.
        tools: JSON schemas of the environment's tools.

    """

    def __init__(self, tokenizer: Any, ends: Collection[int], tools: Sequence[dict[str, Any]] = ()) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._tools = list(tools)
        self.is_chat = is_templated(tokenizer)
        """Whether the dataset's prompts are in the chat template, so that messages are, too."""

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation up to the first response.

        Raises:
            RenderingError: the template doesn't take the messages, or they have no tokens.

        """
        if self.is_chat:
            return self._ids(self._text(messages, True))
        rules = rules_of(self._tokenizer)
        begin = rules.begin if rules is not None else ()
        return [*begin, *self._ids(_plain(messages))]

    def following(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens between the end token of a response and the next response.

        Raises:
            RenderingError: the template doesn't take the messages, or changes what was before them; or they have no
                tokens.

        """
        if not self.is_chat:
            return self._ids(_plain(messages))
        before = self._text(_BEGIN, False)
        all_text = self._text([*_BEGIN, *messages], True)
        if not all_text.startswith(before) or _ASSISTANT not in before:
            raise RenderingError("the chat template changes earlier messages as a conversation goes on")
        response_end = before.rindex(_ASSISTANT) + len(_ASSISTANT)
        ids = self._ids(all_text[response_end:])
        closing = self._tokenized(before[response_end:])
        for position, token in enumerate(closing):
            if token in self._ends:  # The response has an end token of its own.
                return ids[position + 1 :]
        return ids

    def _text(self, messages: Sequence[Message], opens: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=self._tools or None, tokenize=False, add_generation_prompt=opens
            )
        except Exception as error:  # Templates raise errors of their own.
            raise RenderingError(f"the chat template doesn't take its messages ({reason_of(error)})") from None
        return str(text)

    def _ids(self, text: str) -> list[int]:
        ids = self._tokenized(text)
        if not ids:
            raise RenderingError("its messages have no tokens")
        return ids

    def _tokenized(self, text: str) -> list[int]:
        try:
            encoded = self._tokenizer(
                text, add_special_tokens=False, split_special_tokens=not self.is_chat, verbose=False
            )
        except Exception as error:  # Such as a lone surrogate, which is no character.
            raise RenderingError(f"the tokenizer doesn't take its messages ({reason_of(error)})") from None
        return list(encoded["input_ids"])


def _plain(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)
