"""Reward by a judge: a language model behind an API like that of OpenAI, which answers with a score."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import regex

from hypha_ray.config.rl import JUDGE, Judge
from hypha_ray.errors import AuthenticationError, ConfigError
from hypha_ray.rl.http import Pauses, Refused, TooLate, Unreachable, call
from hypha_ray.rl.rewards.calls import Tasks, functions_of
from hypha_ray.rl.rewards.response import Response
from hypha_ray.texts import HIDDEN

_WRONG = frozenset({*range(300, 400), 401, 403, 404, 405})
"""Statuses that all requests would get, because key, address or model are wrong."""
_PATTERN_S = 5.0
"""Longest search for a score in a judge's text, in seconds."""
_PLACEHOLDERS = re.compile(r"\{(prompt|response|answer)\}")

log = logging.getLogger(__name__)


class JudgeCalls:
    """Calls of a judge, several at a time; a response without a score has no reward.

    Args:
        settings: table of the job file.
        tasks: functions of single tasks.

    Raises:
        ConfigError: RWD005, address or model isn't given.
        AuthenticationError: RWD006, the key isn't in the environment.

    """

    def __init__(self, settings: Judge, tasks: Tasks | None = None) -> None:
        self._settings = settings
        self._pattern = _compile(settings.pattern)
        self._tasks = tasks or {}
        if settings.url is None or settings.model is None:
            missing = "url" if settings.url is None else "model"
            raise ConfigError("RWD005", "the judge lacks an address or a model", fix=f"set rl.reward.judge.{missing}")
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        name = settings.key_variable
        self._key: str | None = None
        if name is not None:
            self._key = os.environ.get(name)
        if name is not None and not self._key:
            fix = f"set {name} where the job is submitted and on all nodes, or name another variable"
            raise AuthenticationError("RWD006", "the judge's key isn't in the environment", name, fix=fix)
        self.trouble = ""
        """Reason of the latest response without a score; empty before the first one."""

    def rewards(self, responses: Sequence[Response]) -> list[tuple[float, ...]]:
        """Return rewards as `Evaluator` says.

        Raises:
            ConfigError: RWD005, the judge refuses all requests.

        """
        judged: list[int] = []
        for index, response in enumerate(responses):
            if JUDGE in functions_of(response, self._tasks, (JUDGE,)):
                judged.append(index)
        rewards = [math.nan] * len(responses)
        absent = 0
        with ThreadPoolExecutor(min(self._settings.at_once, max(1, len(judged)))) as pool:
            scores = pool.map(self._score, [responses[index] for index in judged])
            for index, score in zip(judged, scores, strict=True):
                rewards[index] = score
                absent += math.isnan(score)
        if absent:
            log.warning("the judge gave no score for %d of %d responses: %s", absent, len(judged), self.trouble)
        return [(reward,) for reward in rewards]

    def _score(self, response: Response) -> float:
        settings = self._settings
        answer = response.data.get("answer", "")
        texts = {"prompt": response.prompt, "response": response.text, "answer": str(answer)}
        question = _PLACEHOLDERS.sub(lambda match: texts[match[1]], settings.template)
        messages = [{"role": "user", "content": question}]
        payload: dict[str, object] = {"model": settings.model, "messages": messages, "temperature": 0.0}
        if settings.max_tokens is not None:
            payload["max_tokens"] = settings.max_tokens
        verdict = self._ask(payload)
        if verdict is None:
            return math.nan
        score = self._score_in(verdict)
        if score is None:
            self.trouble = f"no score in {verdict[-100:]!r}"
            return math.nan
        full = settings.full_score
        if score > full:
            self.trouble = f"a score of {score:g}, where rl.reward.judge.full_score is {full:g}"
            return math.nan
        return score / full

    def _score_in(self, text: str) -> float | None:
        """Return the last score in a text; None without one, or if the search for the pattern takes too long."""
        try:
            # The interpreter is free meanwhile, so that signs of life go out.
            matches = self._pattern.findall(text, timeout=_PATTERN_S, concurrent=True)
        except TimeoutError:
            log.warning("rl.reward.judge.pattern takes longer than %g s for %r", _PATTERN_S, text[-100:])
            return None
        for match in reversed(matches):
            if _is_number(match):
                return float(match)
        return None

    def _ask(self, payload: Mapping[str, object]) -> str | None:
        """Return the judge's text; None after the last attempt failed."""
        headers: dict[str, str] = {}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        pauses = Pauses(self._settings.retries)
        pause_s: float | None = 0.0
        while pause_s is not None:
            time.sleep(pause_s)
            try:
                answer = call(self._url, payload, self._settings.deadline_s, headers)
                return self._text_of(answer)
            except (Unreachable, TooLate) as error:
                self.trouble = self._without_key(str(error))
                pause_s = pauses.after(error.retry_after_s if isinstance(error, Unreachable) else None)
            except Refused as error:
                trouble = self._without_key(str(error))
                self.trouble = trouble
                if error.status in _WRONG:
                    fix = "mend rl.reward.judge.url, model or key; it has to be the address itself, with no redirect"
                    raise ConfigError("RWD005", "the judge refuses requests", trouble, fix=fix) from None
                return None
        return None

    def _text_of(self, answer: Any) -> str | None:
        """Return the text of an answer; None if it has none."""
        try:
            text = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            self.trouble = "an answer without choices"
            return None
        if not isinstance(text, str):
            self.trouble = "an answer without a text"
            return None
        return text

    def _without_key(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, HIDDEN)


def _compile(pattern: str) -> Any:
    """Compile the user's pattern for the package regex, whose search can be limited in time.

    Raises:
        ConfigError: RWD005, the package can't read it.

    """
    try:
        return regex.compile(pattern)
    except regex.error as error:
        fix = "mend rl.reward.judge.pattern"
        raise ConfigError("RWD005", "the judge's pattern can't be read", str(error), fix=fix) from None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
