"""Rewards by comparison of texts. Spaces at both ends of a response and of an answer don't count."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from hypha_ray.rl.rewards.response import Response

_NUMBER = re.compile(r"(?:(?<![\w.)])[-+−])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")

_BOX = re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
"""Box whose content has at most one level of braces."""


def exact(response: Response) -> float:
    """Give 1 for the answer and nothing else, ended by the model, otherwise 0."""
    is_equal = response.text.strip() == response.answer.strip()
    return float(response.ended and is_equal)


def positions(response: Response) -> float:
    """Give the share of the answer's characters at the right position; the end counts as one more character.

    It leads a small model to exact answers: a response that is half right gets half of the reward.
    """
    text = response.text.strip()
    answer = response.answer.strip()
    right = sum(character == expected for character, expected in zip(text, answer, strict=False))
    if response.ended and len(text) == len(answer):
        right += 1
    return right / (len(answer) + 1)


def contains(response: Response) -> float:
    """Give 1 if the answer occurs in the response as whole words, otherwise 0; the case of letters counts."""
    answer = re.escape(response.answer.strip())
    return float(re.search(rf"(?<!\w){answer}(?!\w)", response.text) is not None)


def number(response: Response) -> float:
    """Give 1 if the last number of the response equals the last one of the answer, otherwise 0.

    Thousands may be separated by commas; any other comma separates numbers, so ``8,5`` ends in 5. ``72`` equals
    ``72.0``.

    Raises:
        ValueError: there is no number in the answer.

    """
    right = last_number(response.answer)
    if right is None:
        raise ValueError(f"no number in the answer {response.answer[:80]!r}")
    return float(last_number(response.text) == right)


def last_number(text: str) -> Decimal | None:
    """The last decimal number in a text; None without any."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    digits = numbers[-1].replace(",", "")
    try:
        return Decimal(digits.replace("−", "-"))
    except InvalidOperation:
        return None


def boxed(response: Response) -> float:
    r"""Give 1 if the model ended the response, and it has one ``\boxed{…}`` with something in it, otherwise 0."""
    contents = _BOX.findall(response.text)
    if not response.ended or len(contents) != 1:
        return 0.0
    return float(bool(contents[0].strip()))


def length(response: Response) -> float:
    """Subtract up to 1 in the last fifth of the allowed tokens, and 1 for a response that is cut off.

    This is the overlong punishment of DAPO (arXiv 2503.14476).
    """
    if not response.ended:
        return -1.0
    fifth = response.most_tokens / 5
    excess = len(response.ids) - (response.most_tokens - fifth)
    return -max(0.0, excess) / fifth


def of_environment(response: Response) -> float | None:
    """Give the sum of the rewards that the environment gave for the turns; None if the episode has failed."""
    return response.episode_reward
