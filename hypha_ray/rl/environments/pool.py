"""Processes of environments. A call that takes too long, fails or dies costs its own episode alone.

Other episodes of a process that is killed go on in another one, which takes in their responses again.
"""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.config.rl import RL
from hypha_ray.rl.call_process import NO_FILES
from hypha_ray.rl.environments.environment import EnvironmentProcess, EnvironmentReply, Play
from hypha_ray.rl.rewards.response import Response
from hypha_ray.types.events import working

_AT_ONCE = 32
"""Number of requests that a process gets at a time."""
_MOST_LOST = 8
"""Number of calls without an answer after which the other episodes aren't tried, if no call has got one."""

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Episode:
    """Episode of an environment, as the process that asks knows it."""

    number: int
    """Number of the episode among those of its batch."""
    record: Mapping[str, Any]
    """Record of the prompt, and its text as `prompt`."""
    responses: list[Response] = field(default_factory=list)
    """Responses of the policy."""
    process: EnvironmentProcess | None = None
    """Process that has taken in all responses but the last one; None before the first call."""
    reply: EnvironmentReply | None = None
    """Reply to the last response, or the opening; None before the first."""
    failure: str = ""
    """Reason why the episode has ended without a reward; empty if it hasn't."""


@dataclass(eq=False, slots=True)
class _Requests:
    """Requests that a process answers one after the other."""

    episodes: deque[Episode]
    """Episodes without an answer, the one that is computed now first."""
    limits_s: deque[float] = field(default_factory=deque)
    """Longest times of the answers behind that one, in seconds."""
    deadline: float = 0.0
    """Time at which the next answer has to be there."""


class EnvironmentPool:
    """Processes that play the episodes of a job's environment.

    Args:
        rl: table of the job file, which names an environment.

    """

    def __init__(self, rl: RL) -> None:
        assert rl.environment is not None
        self._name = rl.environment
        self._options = rl.environment_options
        self._deadline_s = rl.episode.deadline_s
        self._processes: list[EnvironmentProcess | None] = [None] * rl.episode.processes
        self._warned = False
        """Whether a failure has been logged."""

    def tools(self) -> tuple[dict[str, Any], ...]:
        """Return the JSON schemas of the environment's tools.

        Raises:
            ConfigError: the environment can't be had.

        """
        return self._process(0).tools

    def advance(self, episodes: Sequence[Episode]) -> None:
        """Have environments reply to the last responses of episodes, or open them; those that fail say why.

        Raises:
            ConfigError: the environment can't be had.

        """
        waiting_episodes: list[deque[Episode]] = [deque() for _ in self._processes]
        for episode in episodes:
            waiting_episodes[episode.number % len(waiting_episodes)].append(episode)
        open_requests: dict[int, _Requests] = {}  # By the number of the process.
        lost_episodes: list[Episode] = []
        has_answered = False
        with working(f"environment {self._name}", limited=True):
            while any(waiting_episodes) or open_requests:
                for slot, queue in enumerate(waiting_episodes):
                    if queue and slot not in open_requests:
                        open_requests[slot] = self._ask(slot, queue)
                for slot in self._ready(open_requests):
                    requests = open_requests[slot]
                    episode = requests.episodes.popleft()
                    self._settle(slot, episode)
                    if self._processes[slot] is None:  # The episodes behind it go on in another process.
                        lost_episodes.append(episode)
                        waiting_episodes[slot].extendleft(reversed(requests.episodes))
                        requests.episodes.clear()
                    else:
                        has_answered = True
                    if not has_answered and _are_many(lost_episodes):
                        _give_up(waiting_episodes, lost_episodes[-1].failure)
                    if requests.episodes:
                        self._begin_next(requests)
                    else:
                        del open_requests[slot]

    def end(self) -> None:
        """Have the processes end all episodes; one that takes too long for it is killed."""
        processes = [process for process in self._processes if process is not None]
        for process in processes:
            process.forget()
        until = time.monotonic() + self._deadline_s
        for process in processes:
            readable, *_ = select.select([process], [], [], max(0.0, until - time.monotonic()))
            if not readable or process.receive() is None:
                self.warn("its method close took too long, or ended its process")
                self._drop(self._processes.index(process))

    def close(self) -> None:
        """End all processes."""
        for slot in range(len(self._processes)):
            self._drop(slot)

    def _ask(self, slot: int, queue: deque[Episode]) -> _Requests:
        """Send the requests for some of the episodes that wait, which saves changes between processes."""
        process = self._process(slot)
        requests = _Requests(deque())
        plays: list[Play] = []
        while queue and len(plays) < _AT_ONCE:
            episode = queue.popleft()
            calls = 1
            if episode.process is not process:
                calls += len(episode.responses)
            episode.process = process
            requests.episodes.append(episode)
            requests.limits_s.append(calls * self._deadline_s)
            plays.append(Play(episode.number, episode.record, tuple(episode.responses)))
        process.ask(plays)
        self._begin_next(requests)
        return requests

    def _begin_next(self, requests: _Requests) -> None:
        """Set the deadline of the next answer: each response that an environment takes in has its time limit."""
        requests.deadline = time.monotonic() + requests.limits_s.popleft()

    def _ready(self, open_requests: Mapping[int, _Requests]) -> list[int]:
        """Wait for answers; return the numbers of processes that have one, or whose deadline is over."""
        next_deadline = min(requests.deadline for requests in open_requests.values())
        by_process = {self._process_at(slot): slot for slot in open_requests}
        limit_s = max(0.0, next_deadline - time.monotonic())
        answered_processes, *_ = select.select(list(by_process), [], [], limit_s)
        slots = {by_process[process] for process in answered_processes}
        now = time.monotonic()
        slots |= {slot for slot, requests in open_requests.items() if now >= requests.deadline}
        return sorted(slots)

    def _settle(self, slot: int, episode: Episode) -> None:
        """Take an answer in, or kill a process without one."""
        process = self._process_at(slot)
        readable, *_ = select.select([process], [], [], 0.0)
        answer = process.receive() if readable else None
        if isinstance(answer, EnvironmentReply):
            episode.reply = answer
            return
        if answer is None:
            self._drop(slot)
            answer = "its process died" if readable else f"a call took longer than {self._deadline_s:g} s"
        elif NO_FILES in answer:
            self._drop(slot)
        episode.failure = answer

    def warn(self, failure: str) -> None:
        """Log a failure, if it is the first."""
        if not self._warned:
            self._warned = True
            log.warning("environment %s failed in an episode, which is told once: %s", self._name, failure)

    def _process(self, slot: int) -> EnvironmentProcess:
        """Return the process of a number that lives, or another one."""
        process = self._processes[slot]
        if process is None or not process.alive:
            self._drop(slot)
            process = self._processes[slot] = EnvironmentProcess(self._name, self._options)
        return process

    def _process_at(self, slot: int) -> EnvironmentProcess:
        process = self._processes[slot]
        assert process is not None
        return process

    def _drop(self, slot: int) -> None:
        process = self._processes[slot]
        if process is not None:
            process.kill()
        self._processes[slot] = None


def _are_many(lost_episodes: Sequence[Episode]) -> bool:
    """Whether so many calls were lost that the environment itself is at fault, and no single prompt."""
    prompts = {id(episode.record) for episode in lost_episodes}
    return len(lost_episodes) >= _MOST_LOST and len(prompts) > 1


def _give_up(waiting_episodes: Sequence[deque[Episode]], failure: str) -> None:
    """Let the episodes that wait fail without a call."""
    for queue in waiting_episodes:
        for episode in queue:
            episode.failure = f"it wasn't tried, since no call before it was answered: {failure}"
        queue.clear()
