"""Text of a chat as its template renders it, and the parts of it that the assistant wrote.

A template may mark these parts by ``{% generation %}``. Otherwise a part is the text by which the chat grows with the
assistant's message:

    rendered up to the message, with the generation prompt    <|user|>Hi<|end|><|assistant|>
    rendered with the message                                 <|user|>Hi<|end|><|assistant|>Hello<|end|>
    part of the assistant                                                                  Hello<|end|>

If the template renders the beginning of a chat in another way than in the whole chat, `answers` finds the parts by the
messages' contents.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hypha_ray.data.preparation.kinds.answers import find_answers
from hypha_ray.data.preparation.kinds.ignored_values import Ignored, ignored_values
from hypha_ray.data.preparation.kinds.scored_tokens import ScoredText
from hypha_ray.data.preparation.sources.chats import Chat, Messages
from hypha_ray.data.preparation.sources.tool_calls import count_calls, with_texts, without_calls
from hypha_ray.errors import DataError, reason_of

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Mark of the assistant's parts, as transformers recognises it."""
_FIX = "give a template that marks them by {% generation %} with --chat-template FILE"


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._ends = tuple(token for token in tokenizer.all_special_tokens if token)
        self._added: tuple[str, ...] = ()
        with suppress(NotImplementedError):  # Tokenizers of mistral-common don't tell theirs.
            self._added = tuple(one.content for one in tokenizer.added_tokens_decoder.values() if one.special)

    def rendered(self, chat: Chat) -> ScoredText:
        """The text of a chat, with the assistant's parts. A message of the assistant with the weight 0 isn't scored.

        Raises:
            DataError: the template refuses the chat, or the assistant's parts can't be told from it.

        """
        template = self._tokenizer.get_chat_template(None, chat.tools)
        answers = [place for place, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if _MARKED.search(template):
            text, parts = self._render(chat, chat.messages, marked=True)
        else:
            text, parts = self._by_prefixes(chat, answers)
        if len(parts) != len(answers) and (not parts or any("weight" in message for message in chat.messages)):
            found = f"{len(parts)} for {len(answers)} messages of the assistant"
            raise self._unclear(chat, "the template doesn't mark the assistant's parts one by one", found)
        if len(parts) != len(answers):
            return ScoredText(text, tuple(parts))
        scored = [(part, place) for part, place in zip(parts, answers, strict=True) if not self._is_given(chat, place)]
        openings = tuple(self._opening(chat, text, place, part[0]) for part, place in scored)
        return ScoredText(text, tuple(part for part, _ in scored), openings)

    @staticmethod
    def _is_given(chat: Chat, place: int) -> bool:
        return chat.messages[place].get("weight") == 0

    def _opening(self, chat: Chat, text: str, place: int, start: int) -> int:
        """The place behind the generation prompt of an answer; its first character if the text has no such prompt."""
        if not _MARKED.search(self._tokenizer.get_chat_template(None, chat.tools)):
            return start
        with suppress(DataError):
            before, _ = self._render(chat, chat.messages[:place], opened=True)
            return len(before) if text.startswith(before) else start
        return start

    def lost_calls(self, chat: Chat, text: str) -> int:
        """Count the calls of tools in a chat whose text is the same without them."""
        calls = count_calls(chat.messages)
        if not calls:
            return 0
        with suppress(DataError):
            return calls if self._render(chat, without_calls(chat.messages))[0] == text else 0
        return 0

    def ignored(self, chat: Chat, text: str) -> Ignored:
        """Values in a chat that leave no trace in its text."""
        found = ignored_values(lambda messages: self._render(chat, messages)[0], chat.messages, text)
        if chat.tools is not None and self._is_same_without_tools(chat, text):
            found["lists of tools", "which the chat template ignores"] = 1
        return found

    def _is_same_without_tools(self, chat: Chat, text: str) -> bool:
        with suppress(DataError):
            return self._render(replace(chat, tools=None), chat.messages)[0] == text
        return False

    def _by_prefixes(self, chat: Chat, answers: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        text, _ = self._render(chat, chat.messages)
        parts = []
        for place in answers:
            before, _ = self._render(chat, chat.messages[:place], opened=True)
            after, _ = self._render(chat, chat.messages[: place + 1])
            if not (after.startswith(before) and text.startswith(after)):
                return text, self._by_contents(chat, answers, place)
            parts.append((len(before), self._end(text, len(before), len(after))))
        return text, parts

    def _by_contents(self, chat: Chat, answers: Sequence[int], different: int) -> list[tuple[int, int]]:
        def render(messages: Messages, opened: bool) -> str:
            return self._render(chat, messages, opened)[0]

        parts = find_answers(render, chat.messages, answers, self._ends, self._added)
        if parts is None:
            what = (
                "the template renders the beginning of a chat, and its answers, in another way than in the whole chat"
            )
            raise self._unclear(chat, what, f"a difference at message {different + 1}")
        return parts

    def _end(self, text: str, start: int, end: int) -> int:
        """End of a part without the white space behind its last special token, which no model has to generate."""
        part = text[start:end].rstrip()
        return start + len(part) if part.endswith(self._ends) else end

    def _render(
        self, chat: Chat, messages: Messages, opened: bool = False, marked: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Text of messages and its marked parts; a template that takes no objects as arguments gets texts."""
        try:
            return self._filled(chat, messages, opened, marked)
        except Exception as error:  # Templates raise errors of their own, for instance without system messages.
            if count_calls(messages):
                with suppress(Exception):
                    return self._filled(chat, [with_texts(message) for message in messages], opened, marked)
            got = reason_of(error)
            what = f"{chat.where}: the chat template of {self._name!r} refuses the chat"
            fix = "mend or remove the row"
            raise DataError("DATA034", what, got, fix=fix) from None

    def _filled(self, chat: Chat, messages: Messages, opened: bool, marked: bool) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, parts = render_jinja_template(
            [messages],
            tools=chat.tools,
            chat_template=self._tokenizer.get_chat_template(None, chat.tools),
            return_assistant_tokens_mask=marked,
            add_generation_prompt=opened,
            **self._tokenizer.special_tokens_map,
        )
        return texts[0], parts[0] if marked else []

    def _unclear(self, chat: Chat, why: str, got: str) -> DataError:
        what = f"{chat.where}: the assistant's tokens can't be found with the chat template of {self._name!r}: {why}"
        return DataError("DATA036", what, got, fix=_FIX)
