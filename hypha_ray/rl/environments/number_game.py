"""Environment that is a game: the policy guesses a number, and is told after each guess which way to go.

0-99? ─► response 50 ─► + ─► response 75 ─► - ─► response 62: reward 1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypha_ray.rl.environments.environment import Message
from hypha_ray.rl.rewards.registered import last_number
from hypha_ray.rl.rewards.response import Response


class NumberGame:
    """Game of guessing the number that is the record's `answer`.

    The opening tells the range, which is that of numbers with as many digits: the prompt of the dataset isn't shown. A
    guess is the last number of a response. The reply to a wrong one is ``+`` if the number is larger, otherwise ``-``.
    The right one has a reward of 1. A response without a number ends the game.
    """

    def __init__(self) -> None:
        self._number = 0

    def reset(self, record: Mapping[str, Any]) -> list[Message]:
        """Tell the range.

        Raises:
            ValueError: the answer isn't a whole number from 0 on.

        """
        number = last_number(str(record["answer"]))
        if number is None or number < 0 or number != int(number):
            raise ValueError(f"the answer {record['answer']!r} isn't a whole number from 0 on")
        self._number = int(number)
        largest = 10 ** len(str(self._number)) - 1
        return [{"role": "user", "content": f"0-{largest}?"}]

    def step(self, response: Response) -> tuple[list[Message] | None, float]:
        """Compare a guess with the number."""
        guess = last_number(response.text)
        if guess is None or not response.ended:
            return None, 0.0
        if guess == self._number:
            return None, 1.0
        direction = "+" if self._number > guess else "-"
        return [{"role": "user", "content": direction}], 0.0
