"""Episodes of a batch of prompts: turns of a policy and of an environment, as sequences of tokens.

prompt or opening │ response ░ messages ░ response ░ messages ░ response        ░: of the environment, not trained on

All episodes that go on respond together. Each response depends on its own conversation, its prompt's key, its number in
the group and the number of the turn.

Only messages of the environment are tokenized, by the tokenizer's chat template, or without one as plain texts. A
response that the policy has sampled is never made into a text and back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from operator import attrgetter
from typing import Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.config.rl import RL
from hypha_ray.errors import ConfigError, reason_of
from hypha_ray.model.checks import max_positions
from hypha_ray.model.tokenizers import is_templated, rules_of
from hypha_ray.rl.engines.native import Responses, Sampling
from hypha_ray.rl.environments.environment import Message, total_of
from hypha_ray.rl.environments.pool import EnvironmentPool, Episode
from hypha_ray.rl.rewards.response import Response
from hypha_ray.texts import counted

_ASSISTANT: Final = "content-of-the-assistant"
"""Content of a message whose end is looked for in a rendered text."""
_BEGIN: Final[list[Message]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ASSISTANT}]
"""Conversation before the messages of an environment. They have the same text after any conversation."""
Integers: TypeAlias = npt.NDArray[np.int64]
Respond: TypeAlias = Callable[[Integers, Integers, Integers, Sampling], Responses]
"""Function of contexts padded on the left, of the mask of their tokens, of the responses' keys, and of settings."""


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

    def missing_tools(self, opening: Sequence[int]) -> list[str]:
        """Return the names of tools that the opening of a conversation lacks; none without a template."""
        if not self.is_chat:
            return []
        text = str(self._tokenizer.decode(list(opening)))
        missing: list[str] = []
        for tool in self._tools:
            name = str(tool.get("function", tool).get("name"))
            if name not in text:
                missing.append(name)
        return missing

    def following(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens between the end token of a response and the next response.

        Raises:
            RenderingError: the template doesn't take the messages, or changes what was before them; or they have no
                tokens.

        """
        if not self.is_chat:
            return self._ids(_plain(messages))
        opening_text = self._text(_BEGIN, False)
        all_text = self._text([*_BEGIN, *messages], True)
        if not all_text.startswith(opening_text) or _ASSISTANT not in opening_text:
            raise RenderingError("the chat template changes earlier messages as a conversation goes on")
        response_end = opening_text.rindex(_ASSISTANT) + len(_ASSISTANT)
        ids = self._ids(all_text[response_end:])
        closing_ids = self._tokenized(opening_text[response_end:])
        for position, token in enumerate(closing_ids):
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
        except Exception as error:  # For instance a lone surrogate, which is no character.
            raise RenderingError(f"the tokenizer doesn't take its messages ({reason_of(error)})") from None
        return list(encoded["input_ids"])


def _plain(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)


@dataclass(eq=False, slots=True)
class Trajectory:
    """Conversation of an episode as tokens."""

    episode: Episode
    key: tuple[int, ...]
    """Key of the prompt, and number of the response in its group."""
    opening: list[int]
    """Tokens before the first response."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of all turns."""
    sampled: list[bool] = field(default_factory=list)
    """Flags of the tokens that the policy has sampled."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of tokens when they were sampled; 0 for those of the environment."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of the turns."""
    done: bool = False
    """Whether the environment has ended the episode, behind a response that wasn't cut off."""
    over: bool = False
    """Whether there is no further turn."""

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns; NaN if one is absent, or the episode has failed."""
        if self.episode.failure:
            return float("nan")
        return total_of(self.rewards)

    @property
    def prompt_end(self) -> str:
        """The last characters of the prompt, by which a user finds it."""
        return str(self.episode.record.get("prompt", ""))[-80:]

    def add(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Add tokens of the policy with their log-probabilities, or without those of the environment."""
        self.tokens += tokens
        self.sampled += [logprobs is not None] * len(tokens)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(tokens)

    def fail(self, reason: str) -> None:
        """End the episode without a reward."""
        self.episode.failure = reason
        self.over = True


class EnvironmentRollouts:
    """Episodes of a job's environment.

    Args:
        rl: table of the job file, which names an environment.
        tokenizer: tokenizer of the run.
        ends: ids of tokens that end a response.
        positions: number of tokens that the model takes; None if it has no limit.

    Raises:
        ConfigError: the environment can't be had.

    """

    def __init__(self, rl: RL, tokenizer: Any, ends: Collection[int], positions: int | None) -> None:
        self._rl = rl
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._pool = EnvironmentPool(rl)
        self._renderer = Renderer(tokenizer, ends, self._pool.tools())
        self._longest_opening: int | None = None
        """Number of tokens that an opening may have; None without a limit."""
        if positions is not None:
            self._longest_opening = positions - rl.generation.max_response_tokens
        self._has_played = False
        """Whether an episode has gone well."""

    @classmethod
    def of(cls, rl: RL, model: Any, tokenizer: Any, ends: Collection[int]) -> Self | None:
        """Return the episodes of a job for a model, with or without weights; None without an environment.

        Raises:
            ConfigError: the environment can't be had.

        """
        if rl.environment is None:
            return None
        return cls(rl, tokenizer, ends, max_positions(model, decoder=False))

    def play(
        self,
        prompts: Sequence[Sequence[int]],
        keys: npt.NDArray[np.int64],
        records: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        respond: Respond,
    ) -> list[Trajectory]:
        """Play an episode for each response to each prompt.

        Args:
            prompts: token ids of the prompts.
            keys: keys of the prompts, int64 [prompts, 3].
            records: records of the prompts.
            sampling: settings; `max_tokens` is for all turns together, those of the environment included.
            respond: the policy.

        Returns:
            Trajectories, those of one prompt as neighbours.

        Raises:
            ConfigError: RL032, all episodes have failed: of several prompts, or of the first one.

        """
        trajectories: list[Trajectory] = []
        for prompt, key, record in zip(prompts, keys.tolist(), records, strict=True):
            full_record = {"prompt": self._text(prompt), **record}
            for sample_number in range(sampling.samples):
                episode = Episode(len(trajectories), full_record)
                trajectories.append(Trajectory(episode, (*key, sample_number), list(prompt)))
        try:
            self._open(trajectories)
            for turn in range(self._rl.episode.turns):
                live = list(filterfalse(attrgetter("over"), trajectories))
                if not live:
                    break
                self._take_turn(live, turn, sampling, respond)
        finally:
            self._pool.end()
        if len(prompts) > 1 or not self._has_played:  # A refill may be of a single prompt, whose record is bad.
            self._refuse_failures(trajectories)
        self._has_played = True
        return trajectories

    def missing_tools(self, trajectory: Trajectory) -> list[str]:
        """Return the names of the environment's tools that the policy isn't told of in an episode."""
        return self._renderer.missing_tools(trajectory.opening)

    def close(self) -> None:
        """End the processes of the environment."""
        self._pool.close()

    def _open(self, trajectories: Sequence[Trajectory]) -> None:
        """Let environments open the conversations."""
        self._advance(trajectories)
        for trajectory in trajectories:
            messages = self._messages(trajectory)
            if messages is None or trajectory.over:
                continue
            try:
                opening = self._renderer.opening(messages)
            except RenderingError as error:
                trajectory.fail(str(error))
                continue
            limit = self._longest_opening
            if limit is not None and len(opening) > limit:
                tokens_text = counted(len(opening), "token")
                trajectory.fail(f"its opening has {tokens_text}, and the model room for {limit} beside a response")
                continue
            trajectory.opening = opening
        for trajectory in trajectories:
            if trajectory.over:  # A sequence of tokens that isn't trained on takes its place.
                trajectory.add([min(self._ends)], None)

    def _take_turn(self, live: Sequence[Trajectory], turn: int, sampling: Sampling, respond: Respond) -> None:
        """Let the policy respond, and then the environments."""
        limits: list[int] = []
        contexts: list[list[int]] = []
        keys: list[tuple[int, ...]] = []
        for trajectory in live:
            limits.append(self._room(trajectory, sampling))
            contexts.append(trajectory.opening + trajectory.tokens)
            keys.append((*trajectory.key, turn))
        ids, mask = _padded(contexts)
        responses = respond(ids, mask, np.array(keys, np.int64), replace(sampling, samples=1, max_tokens=max(limits)))
        tokens = responses.ids[:, responses.prompt_width :].cpu()
        is_token = responses.mask.cpu().bool()
        logprobs = responses.logprobs.cpu()
        for row, (trajectory, limit) in enumerate(zip(live, limits, strict=True)):
            columns = is_token[row]
            new_tokens = tokens[row][columns].tolist()
            new_logprobs = logprobs[row][columns].tolist()
            del new_tokens[limit:], new_logprobs[limit:]
            trajectory.add(new_tokens, new_logprobs)
            trajectory.episode.responses.append(self._response(trajectory, new_tokens, limit))
        self._advance(live)
        is_last = turn + 1 == self._rl.episode.turns
        for trajectory in live:
            self._go_on(trajectory, sampling, is_last)

    def _advance(self, trajectories: Sequence[Trajectory]) -> None:
        """Have the environments reply."""
        self._pool.advance([trajectory.episode for trajectory in trajectories])

    def _go_on(self, trajectory: Trajectory, sampling: Sampling, is_last: bool) -> None:
        """Add the messages of an environment, unless the episode is over."""
        messages = self._messages(trajectory)
        if trajectory.over:
            return
        reply = trajectory.episode.reply
        assert reply is not None
        trajectory.rewards.append(reply.reward)
        was_ended = trajectory.episode.responses[-1].ended
        trajectory.done = messages is None and was_ended
        if messages is None or is_last or not was_ended:
            trajectory.over = True
            return
        try:
            tokens = self._renderer.following(messages)
        except RenderingError as error:
            trajectory.fail(str(error))
            return
        if len(tokens) >= self._room(trajectory, sampling, of_turn=False):
            trajectory.over = True
            return
        trajectory.add(tokens, None)

    def _messages(self, trajectory: Trajectory) -> tuple[Message, ...] | None:
        """Return the messages of the last reply; an episode without a reply has failed."""
        if trajectory.episode.failure:
            trajectory.over = True
            return None
        reply = trajectory.episode.reply
        assert reply is not None
        return reply.messages

    def _room(self, trajectory: Trajectory, sampling: Sampling, of_turn: bool = True) -> int:
        """Return the number of tokens that the rest of the episode, or its next turn, may have."""
        tokens_left = sampling.max_tokens - len(trajectory.tokens)
        most_tokens = self._rl.episode.turn_tokens
        if of_turn and most_tokens is not None:
            return min(tokens_left, most_tokens)
        return tokens_left

    def _response(self, trajectory: Trajectory, tokens: list[int], limit: int) -> Response:
        """Return a turn of the policy as its environment gets it."""
        has_ended = tokens[-1] in self._ends
        text_tokens = tokens[:-1] if has_ended else tokens
        return Response(
            prompt=str(trajectory.episode.record["prompt"]),
            text=self._text(text_tokens),
            ids=tuple(tokens),
            ended=has_ended,
            data=trajectory.episode.record,
            most_tokens=limit,
            is_chat=self._renderer.is_chat,
        )

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def warn_of_failures(self, trajectories: Iterable[Trajectory]) -> None:
        """Log the first episode that failed, unless one was logged before."""
        for trajectory in trajectories:
            if trajectory.episode.failure:
                self._pool.warn(f"{trajectory.episode.failure}; the prompt was {trajectory.prompt_end!r}")
                return

    def _refuse_failures(self, trajectories: Sequence[Trajectory]) -> None:
        if all(trajectory.episode.failure for trajectory in trajectories):
            first = trajectories[0]
            problem = f"environment {self._rl.environment} fails in all episodes of a batch"
            fix = f"mend it, or raise rl.episode.deadline_s; the prompt was {first.prompt_end!r}"
            raise ConfigError("RL032", problem, first.episode.failure, "messages and rewards", fix)


def _padded(contexts: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return token ids padded on the left, int64 [contexts, longest], and the mask of their tokens."""
    width = max(map(len, contexts))
    ids = np.zeros((len(contexts), width), np.int64)
    mask = np.zeros_like(ids)
    for row, context in enumerate(contexts):
        ids[row, -len(context) :] = context
        mask[row, -len(context) :] = 1
    return ids, mask
