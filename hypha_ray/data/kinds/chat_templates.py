"""Text of a chat as its template renders it, the assistant's parts of it, and values that the template ignores.

A template may mark these parts by ``{% generation %}``. Otherwise a part is the text by which the chat grows with the
assistant's message:

    rendered up to the message, with the generation prompt    <|user|>Hi<|end|><|assistant|>
    rendered with the message                                 <|user|>Hi<|end|><|assistant|>Hello<|end|>
    part of the assistant                                                                  Hello<|end|>

A template may render a chat's beginning in another way than in the whole chat: reasoning models think in their last
answer only. Then each answer is replaced by a mark. This shows the text that the template writes between marks, and the
whole chat must be these pieces with the answers between them:

    marked   <|user|>Hi<|assistant|> MARK <|end|><|user|>More<|assistant|><think></think> MARK <|end|>
    whole    <|user|>Hi<|assistant|>Hello<|end|><|user|>More<|assistant|><think></think>Fine<|end|>
    answers                         Hello<|end|>                         <think></think>Fine<|end|>

An answer begins behind the generation prompt, and ends with the special token that follows it.

A value is ignored if the text is the same without it. Templates differ in the keys of messages that they know, and say
nothing of those that they don't: thoughts in ``reasoning_content``, or a speaker's ``name``, vanish.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeAlias

from hypha_ray.data.kinds.scored_tokens import ScoredText
from hypha_ray.data.provenance import Account, readable
from hypha_ray.data.sources.chats import Chat, Messages, count_calls, with_texts, without_calls
from hypha_ray.errors import DataError, reason_of
from hypha_ray.texts import counted

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Mark of the assistant's parts, as transformers recognises it."""
_FIX = "give a template that marks them by {% generation %} with --chat-template FILE"
Render: TypeAlias = Callable[[Messages, bool], str]
"""Text of messages; with the generation prompt behind it if the flag is true."""
_MARK = "\N{REFERENCE MARK}answer {}\N{REFERENCE MARK}"
_THOUGHT_AND_REST = re.compile(r"(?s)(.*</think>\s*)?(.*)")
_THOUGHTS = re.compile(r"(?s)<think>\s*(\S.*?)\s*</think>")
_THINKS = re.compile(r"</?think>")
RenderMessages: TypeAlias = Callable[[Messages], str]
"""Text of messages, without a generation prompt."""
Ignored: TypeAlias = Counter[tuple[str, str]]
"""Number of ignored values by their noun and the reason for the account."""

_OTHERWISE_COUNTED: Final = frozenset({"role", "content", "weight", "train", "tool_calls"})
"""Keys of messages that aren't searched for: templates need them, never see them, or they are counted as calls."""
_OTHER = "another text"


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self.unopened = 0
        """Number of answers behind another text than the generation prompt that the template writes for them."""
        self._ends = tuple(token for token in tokenizer.all_special_tokens if token)
        self._added: tuple[str, ...] = ()
        self._closing = self._ends
        """Tokens that may end an answer before white space, among them those of the template that have no role."""
        with suppress(NotImplementedError):  # Tokenizers of mistral-common don't list theirs.
            added = tokenizer.added_tokens_decoder.values()
            self._added = tuple(token.content for token in added if token.special)
            template = str(tokenizer.chat_template)
            self._closing += tuple(token.content for token in added if token.content in template)

    def rendered(self, chat: Chat) -> ScoredText:
        """The text of a chat, with the assistant's parts. A message of the assistant with the weight 0 isn't scored.

        Raises:
            DataError: the template refuses the chat, or the assistant's parts can't be told from it.

        """
        template = self._tokenizer.get_chat_template(None, chat.tools)
        answers = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if _MARKED.search(template):
            text, parts = self._render(chat, chat.messages, marked=True)
        else:
            text, parts = self._by_prefixes(chat, answers)
        if len(parts) != len(answers):
            if not parts or any("weight" in message for message in chat.messages):
                got = f"{len(parts)} for {counted(len(answers), 'message')} of the assistant"
                raise self._unclear(chat, "the template doesn't mark the assistant's parts one by one", got)
            return ScoredText(text, tuple(parts))
        scored_parts = []
        openings = []
        for part, index in zip(parts, answers, strict=True):
            if chat.messages[index].get("weight") != 0:
                scored_parts.append(part)
                openings.append(self._opening(chat, text, index, part[0]))
        return ScoredText(text, tuple(scored_parts), tuple(openings))

    def _opening(self, chat: Chat, text: str, index: int, start: int) -> int:
        """The end of an answer's generation prompt in the text; the first character of the answer without a prompt."""
        if not _MARKED.search(self._tokenizer.get_chat_template(None, chat.tools)):
            return start
        with suppress(DataError):
            text_before, _ = self._render(chat, chat.messages[:index], opened=True)
            if text.startswith(text_before):
                return len(text_before)
        return start

    def lost_calls(self, chat: Chat, text: str) -> int:
        """Count the calls of tools in a chat whose text is the same without them."""
        calls = count_calls(chat.messages)
        if not calls:
            return 0
        with suppress(DataError):
            text_without_calls, _ = self._render(chat, without_calls(chat.messages))
            if text_without_calls == text:
                return calls
        return 0

    def ignored(self, chat: Chat, text: str) -> Ignored:
        """Values in a chat that leave no trace in its text."""
        ignored = ignored_values(lambda messages: self._render(chat, messages)[0], chat.messages, text)
        if chat.tools is not None and self._is_same_without_tools(chat, text):
            ignored["lists of tools", "which the chat template ignores"] = 1
        return ignored

    def _is_same_without_tools(self, chat: Chat, text: str) -> bool:
        with suppress(DataError):
            return self._render(replace(chat, tools=None), chat.messages)[0] == text
        return False

    def _by_prefixes(self, chat: Chat, answers: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        text, _ = self._render(chat, chat.messages)
        parts = []
        for index in answers:
            text_before, _ = self._render(chat, chat.messages[:index], opened=True)
            text_after, _ = self._render(chat, chat.messages[: index + 1])
            if not (text_after.startswith(text_before) and text.startswith(text_after)):
                return text, self._by_contents(chat, answers, index)
            parts.append((len(text_before), self._end(text, len(text_before), len(text_after))))
        return text, parts

    def _by_contents(self, chat: Chat, answers: Sequence[int], different: int) -> list[tuple[int, int]]:
        def render(messages: Messages, opened: bool) -> str:
            return self._render(chat, messages, opened)[0]

        parts = find_answers(render, chat.messages, answers, self._ends, self._added)
        if parts is None:
            problem = (
                "the template renders the beginning of a chat, and its answers, in another way than in the whole chat"
            )
            raise self._unclear(chat, problem, f"a difference at message {different + 1}")
        text = render(chat.messages, False)
        for index, (start, _) in zip(answers, parts, strict=True):
            self.unopened += not text[:start].endswith(_generation_prompt(render, chat.messages[:index]))
        return parts

    def _end(self, text: str, start: int, end: int) -> int:
        """End of a part without the white space behind its last special token, which no model has to generate."""
        part = text[start:end].rstrip()
        if part.endswith(self._closing):
            return start + len(part)
        return end

    def _render(
        self, chat: Chat, messages: Messages, opened: bool = False, marked: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Text of messages and its marked parts; a template that takes no objects as arguments gets texts."""
        try:
            return self._filled(chat, messages, opened, marked)
        except Exception as error:  # Templates raise errors of their own, for instance without system messages.
            if count_calls(messages):
                with suppress(Exception):
                    return self._filled(chat, list(map(with_texts, messages)), opened, marked)
            got = reason_of(error)
            problem = f"{chat.location}: the chat template of {self._name!r} refuses the chat"
            fix = "mend or remove the row, or choose another template by --chat-template"
            raise DataError("DATA034", problem, got, fix=fix) from None

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

    def _unclear(self, chat: Chat, reason: str, got: str) -> DataError:
        problem = (
            f"{chat.location}: the assistant's tokens can't be found with the chat template of {self._name!r}: {reason}"
        )
        return DataError("DATA036", problem, got, fix=_FIX)


def note_date(tokenizer: Any, account: Account) -> None:
    """Note that a chat template writes the date on which it is used."""
    if "strftime_now" in str(tokenizer.chat_template):
        account.note("the chat template writes today's date: on another day the same command makes other samples")


def find_answers(
    render: Render, messages: Messages, answers: Sequence[int], ends: tuple[str, ...], added: tuple[str, ...] = ()
) -> list[tuple[int, int]] | None:
    """Find the answers in the text of the whole chat.

    Args:
        render: the chat template.
        messages: the chat.
        answers: indices of the assistant's messages.
        ends: special tokens with a role, such as the end of a text.
        added: other special tokens, of which one may end an answer at once; calls of tools may have some inside.

    Returns:
        First character of each answer and the character behind its last; None if the answers aren't in the text as
        they are in the messages.

    """
    text = render(messages, False)
    marked = [*messages]
    marks = [_MARK.format(index) for index in answers]
    contents = []
    for index, mark in zip(answers, marks, strict=True):
        thought, content = _THOUGHT_AND_REST.fullmatch(messages[index]["content"]).groups(default="")  # type: ignore[union-attr]
        marked[index] = messages[index] | {"content": thought + mark}
        contents.append(content)
    pieces = re.split("|".join(marks), render(marked, False))
    is_marked = len(pieces) == len(answers) + 1 and text.startswith(pieces[0])
    if not is_marked or any(mark in text for mark in marks):
        return None
    parts = []
    position = len(pieces[0])
    for index, content, (text_before, text_after) in zip(answers, contents, pairwise(pieces), strict=True):
        start = _opening(render, messages[:index], text_before)
        form = _matching_form(content, text_after, text, position)
        if start is None or form is None:
            return None
        answer, text_behind = form
        has_calls = "tool_calls" in messages[index]
        closing = _closing(text_behind, ends if has_calls else ends + added, has_calls)
        parts.append((position - len(text_before) + start, position + len(answer) + closing))
        position += len(answer) + len(text_behind)
    return parts if position == len(text) else None


def count_lost_thoughts(messages: Messages, text: str) -> int:
    """Count the thoughts in messages that the text of the chat lacks."""
    lost_count = 0
    for message in messages:
        for thought in _THOUGHTS.findall(message["content"]):
            lost_count += thought not in text
    return lost_count


def _opening(render: Render, earlier_messages: Messages, text_before: str) -> int | None:
    """End of the generation prompt in the text before an answer, with the thoughts that it opens or without.

    If there is no prompt, as behind results of tools in some templates, the answer begins where the earlier text ends.
    """
    prompt = _generation_prompt(render, earlier_messages)
    if not prompt and text_before and render(earlier_messages, False).endswith(text_before):
        return len(text_before)
    for opening in (prompt, _THINKS.split(prompt)[0]):
        start = text_before.rfind(opening)
        if opening.strip() and start >= 0:
            return start + len(opening)
    return None


def _generation_prompt(render: Render, earlier_messages: Messages) -> str:
    """The text that a template writes behind messages for an answer to them; empty if it writes none."""
    opened_text = render(earlier_messages, True)
    plain_text = render(earlier_messages, False)
    shared_length = 0
    while (
        shared_length < min(len(opened_text), len(plain_text))
        and opened_text[shared_length] == plain_text[shared_length]
    ):
        shared_length += 1
    return opened_text[shared_length:]


def _closing(text_after: str, ends: tuple[str, ...], has_calls: bool) -> int:
    """Length of the special token that ends an answer, with the text before it."""
    matches = [(text_after.find(end), -len(end)) for end in ends if end in text_after]
    start, negative_length = min(matches, default=(0, 0))
    if has_calls or not text_after[:start].strip():
        return start - negative_length
    return 0


def _matching_form(content: str, text_after: str, text: str, position: int) -> tuple[str, str] | None:
    """The form of an answer and of the text behind it that the whole text has at a position; None without one."""
    for form in _forms(content, text_after):
        if text.startswith("".join(form), position):
            return form
    return None


def _forms(answer: str, text_after: str) -> Iterator[tuple[str, str]]:
    """Forms of an answer, as templates trim it, and of the text behind it."""
    forms = (answer, answer.rstrip(), answer.lstrip("\n"), answer.strip("\n"), answer.lstrip(), answer.strip())
    for form in forms:
        yield form, text_after
    if not answer:
        yield "", text_after.lstrip("\n")  # Lines that would keep calls of tools apart from an answer.


def ignored_values(render: RenderMessages, messages: Messages, text: str) -> Ignored:
    """Values of messages without which a template makes the same text, and contents with the same text for others."""
    ignored: Ignored = Counter()
    keys: dict[str, None] = {}
    roles: dict[str, None] = {}
    for message in messages:
        keys |= dict.fromkeys(message)
        roles[message["role"]] = None
    for key in keys:
        if key in _OTHERWISE_COUNTED:
            continue
        indices = []
        for index, message in enumerate(messages):
            if message.get(key) not in (None, "", [], {}):
                indices.append(index)
        count = _count_ignored(indices, partial(_without_key, messages, key), render, text)
        ignored["values", f"of {readable(key)!r} in messages, which the chat template ignores"] += count
    for role in roles:
        if role == "assistant":
            continue
        indices = []
        for index, message in enumerate(messages):
            if message["role"] == role and _is_absent(message, text):
                indices.append(index)
        count = _count_ignored(indices, partial(_with_other_content, messages), render, text)
        ignored["messages", f"of role {readable(role)!r}, whose content the chat template ignores"] += count
    return +ignored


def leave_out_ignored(account: Account, ignored: Iterable[Ignored]) -> None:
    """Put the ignored values of chats into an account."""
    for values in ignored:
        for (noun, reason), count in values.items():
            account.leave_out(noun, reason, count)


def _count_ignored(
    indices: Sequence[int], change: Callable[[Sequence[int]], Messages], render: RenderMessages, text: str
) -> int:
    """Number of messages whose value is ignored: they are changed together, then one by one if that makes a difference.

    `change` returns messages that are changed at the given indices.
    """
    if not indices or _is_same(render, change(indices), text):
        return len(indices)
    if len(indices) == 1:
        return 0
    return sum(_is_same(render, change([index]), text) for index in indices)


def _is_same(render: RenderMessages, messages: Messages, text: str) -> bool:
    """Whether a template makes the same text of changed messages; a template that refuses them uses the value."""
    try:
        return render(messages) == text
    except DataError:
        return False


def _is_absent(message: dict[str, object], text: str) -> bool:
    content = str(message["content"]).strip()
    return bool(content) and content not in text


def _without_key(messages: Messages, key: str, indices: Sequence[int]) -> Messages:
    changed_messages = list(messages)
    for index in indices:
        changed_messages[index] = {name: value for name, value in messages[index].items() if name != key}
    return changed_messages


def _with_other_content(messages: Messages, indices: Sequence[int]) -> Messages:
    changed_messages = list(messages)
    for index in indices:
        changed_messages[index] = messages[index] | {"content": _OTHER}
    return changed_messages
