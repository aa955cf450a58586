"""Search for the assistant's answers in a rendered chat by their contents.

A template may render a chat's beginning in another way than in the whole chat: reasoning models think in their last
answer only. So each answer is replaced by a mark. What the template writes between marks is then known, and the whole
chat must be these pieces with the answers between them:

    marked   <|user|>Hi<|assistant|> MARK <|end|><|user|>More<|assistant|><think></think> MARK <|end|>
    whole    <|user|>Hi<|assistant|>Hello<|end|><|user|>More<|assistant|><think></think>Fine<|end|>
    answers                         Hello<|end|>                         <think></think>Fine<|end|>

An answer begins behind the generation prompt, and ends with the special token that follows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import TypeAlias

from hypha_ray.data.preparation.sources.chats import Messages

Render: TypeAlias = Callable[[Messages, bool], str]
"""Text of messages; with the generation prompt behind it if the flag is true."""
_MARK = "\N{REFERENCE MARK}answer {}\N{REFERENCE MARK}"
_THOUGHT_AND_REST = re.compile(r"(?s)(.*</think>\s*)?(.*)")
_THOUGHTS = re.compile(r"(?s)<think>\s*(\S.*?)\s*</think>")
_THINKS = re.compile(r"</?think>")


def find_answers(
    render: Render, messages: Messages, places: Sequence[int], ends: tuple[str, ...], added: tuple[str, ...] = ()
) -> list[tuple[int, int]] | None:
    """Find the answers in the text of the whole chat.

    Args:
        render: the chat template.
        messages: the chat.
        places: indices of the assistant's messages.
        ends: special tokens with a role, such as the end of a text.
        added: other special tokens, of which one may end an answer at once; calls of tools may have some inside.

    Returns:
        First character of each answer and the character behind its last; None if the answers aren't in the text as
        they are in the messages.

    """
    text = render(messages, False)
    marked = [*messages]
    marks = [_MARK.format(place) for place in places]
    answers = []
    for place, mark in zip(places, marks, strict=True):
        thought, answer = _THOUGHT_AND_REST.fullmatch(messages[place]["content"]).groups(default="")  # type: ignore[union-attr]
        marked[place] = messages[place] | {"content": thought + mark}
        answers.append(answer)
    pieces = re.split("|".join(marks), render(marked, False))
    if any(mark in text for mark in marks) or len(pieces) != len(answers) + 1 or not text.startswith(pieces[0]):
        return None
    parts = []
    at = len(pieces[0])
    for place, answer, (before, after) in zip(places, answers, pairwise(pieces), strict=True):
        start = _opening(render, messages[:place], before)
        found = next((one for one in _forms(answer, after) if text.startswith("".join(one), at)), None)
        if start is None or found is None:
            return None
        calls = "tool_calls" in messages[place]
        closing = _closing(found[1], ends if calls else ends + added, calls)
        parts.append((at - len(before) + start, at + len(found[0]) + closing))
        at += len("".join(found))
    return parts if at == len(text) else None


def count_lost_thoughts(messages: Messages, text: str) -> int:
    """Count the thoughts in messages that the text of the chat lacks."""
    thoughts = [thought for message in messages for thought in _THOUGHTS.findall(message["content"])]
    return sum(thought not in text for thought in thoughts)


def _opening(render: Render, earlier: Messages, before: str) -> int | None:
    """Place in the text before an answer where the generation prompt ends, with the thoughts that it opens or not.

    If there is no prompt, as behind results of tools in some templates, the answer begins where the earlier text ends.
    """
    opened = render(earlier, True)
    plain = render(earlier, False)
    if opened == plain and before and plain.endswith(before):
        return len(before)
    shared = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(opened, plain, strict=False)))
    prompt = opened[shared:]
    for one in (prompt, _THINKS.split(prompt)[0]):
        if one.strip() and (place := before.rfind(one)) >= 0:
            return place + len(one)
    return None


def _closing(after: str, ends: tuple[str, ...], calls: bool) -> int:
    """Length of the special token that ends an answer, with what stands before it."""
    places = [(place, -len(end)) for end in ends if (place := after.find(end)) >= 0]
    place, length = min(places, default=(0, 0))
    return place - length if calls or not after[:place].strip() else 0


def _forms(answer: str, after: str) -> Iterator[tuple[str, str]]:
    """Forms of an answer, as templates trim it, and of the text behind it."""
    for one in (answer, answer.rstrip(), answer.lstrip("\n"), answer.strip("\n"), answer.lstrip(), answer.strip()):
        yield one, after
    if not answer:
        yield "", after.lstrip("\n")  # Lines that would keep calls of tools apart from an answer.
