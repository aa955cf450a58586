"""Checks of an external trainer's figures: no more work than assigned, in no more time than has passed.

Scheduling is arithmetic on these figures. So each one is compared with what is known here: the plans that were sent,
their samples, and the local clock.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.transport.conversation import LARGEST
from hypha_ray.config.tables.rewards import MODEL
from hypha_ray.config.tables.rl import RL
from hypha_ray.errors import BridgeError
from hypha_ray.model.loading.tokenizer import PackedTokenizer
from hypha_ray.texts import redacted_tree
from hypha_ray.types import Arrays, Flat, Plan

SLACK = 1.01
"""Ratio by which the trainer's clock may be the faster one."""
SLACK_S = 1.0
"""Further seconds that its figures may be above ours."""
NOT_NEGATIVE = {"seconds", "data_wait_s", "learning_rate", "gradient_norm"}


@dataclass(frozen=True, slots=True)
class Contents:
    """The most that a sample has: tokens, 0 for data without them, and positions that a loss may be a mean over."""

    tokens: int = 0
    positions: int = 1

    def joined(self, other: Contents) -> Contents:
        """The most of both."""
        return Contents(max(self.tokens, other.tokens), max(self.positions, other.positions))


UNKNOWN = Contents(2**31, 2**31)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a figure of an evaluation."""

    weight: float
    """Greatest weight that a sample adds."""
    least: float = -LARGEST
    """Least mean."""
    most: float = LARGEST
    """Greatest mean."""


def contents_of(arrays: Arrays) -> Contents:
    """The contents of a sample of these."""
    sizes = {name: array.size // len(array) for name, array in arrays.items()}
    tokens = sizes.get("input_ids", 0)
    scored = (size for name, size in sizes.items() if "labels" in name or "mask" in name)
    return Contents(tokens, max(1, tokens, *scored))


@dataclass(slots=True)
class Told:
    """A round as it was sent to the trainer, and as the trainer reports it. Times are in seconds, monotonic."""

    number: int
    now: Callable[[], float]
    theta: Sequence[Flat] = ()
    """The weights that it begins with, if payloads are made of the difference to them."""
    theta_sha256: str | None = None
    """Hash of them, if the trainer's first merge is to prove that it has them."""
    began: float = 0.0
    plan: Plan | None = None
    """The longest one; a shorter one may have come after it."""
    contents: Contents = Contents()
    """Largest contents of a sample: tokens and scored positions."""
    samples: int = 0
    """In reports, as are those below. Scored positions are samples, where a trainer doesn't count them."""
    batches: int = 0
    scored: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    ready_at: float = 0.0
    """Time at which it had samples to train on, and nothing to evaluate any more."""
    reported_at: float | None = None
    merged: bool = False
    evaluated: bool = False
    handed_over: bool = False

    def current(self, what: str, number: int) -> bool:
        """Whether a message is of this round; one of an earlier round is too late, and passed over.

        Raises:
            BridgeError: MSG005 its round hasn't begun.

        """
        _limit(f"round of the {what}", number, 0, self.number)
        return number == self.number

    def assign(self, plan: Plan, contents: Contents) -> None:
        """Record that a plan is about to be sent."""
        if self.plan is None or not self.plan.spans:
            self.ready_at = self.now()
        self.plan = max(self.plan or plan, plan, key=lambda one: one.samples)
        self.contents = contents

    def merge(self, message: pb.Merged) -> None:
        """Record that the trainer has the weights."""
        _limit("seconds of the merge", message.seconds, 0, self._passed_s())
        self.merged = True

    def evaluate(self, message: pb.Evaluation, figures: Mapping[str, Bounds] | None = None) -> None:
        """Record an evaluation; `figures` bounds those that count."""
        samples = 0 if self.plan is None else sum(span.samples for span in self.plan.evaluate)
        _limit("positions that were evaluated", message.count, 0, samples * self.contents.positions)
        for name, bounds in (figures or {}).items():
            figure = message.figures[name] if name in message.figures else pb.Figure()
            _limit(f"weight of {name}", figure.weight, 0, samples * bounds.weight)
            _limit(f"total of {name}", figure.total, bounds.least * figure.weight, bounds.most * figure.weight)
        self.evaluated = True
        if self.reported_at is None:
            self.ready_at = self.now()

    def report(self, samples: int, items: Mapping[str, float]) -> tuple[int, int]:
        """Record progress; returns its numbers of batches and of scored positions."""
        batches = items.get("batches", 1.0)
        scored = items.get("scored", samples)
        self._work(self.samples + samples, self.batches + int(batches))
        _limit("batches", batches, 1, samples)
        _limit("scored positions", scored, 0, samples * self.contents.positions)
        for name in NOT_NEGATIVE & items.keys():
            _limit(f"metric {name}", items[name], 0, LARGEST)
        seconds = self.seconds + items.get("seconds", 0.0)
        waited_s = self.waited_s + items.get("data_wait_s", 0.0)
        _limit("seconds of all batches", seconds, 0, self._passed_s())
        _limit("seconds of all waits for data", waited_s, 0, self._passed_s())
        self.samples = self.samples + samples
        self.batches = self.batches + int(batches)
        self.seconds, self.waited_s, self.reported_at = seconds, waited_s, self.now()
        self.scored += int(scored)
        return int(batches), int(scored)

    def tokens(self, tokens: float | None, samples: int) -> int | None:
        """Refuse more tokens than so many samples can have; returns their number, or None for data without tokens."""
        _limit("tokens", tokens or 0, 0, samples * max(1, self.contents.tokens))
        return None if tokens is None or not self.contents.tokens else int(tokens)

    def hand_over(self, message: pb.Update) -> None:
        """Record that the result has arrived."""
        self._work(message.samples, message.batches)
        _limit("batches", message.batches, 1, message.samples)
        self.scored += max(0, message.samples - self.samples)  # Of what no report was about.
        self.handed_over = True

    @property
    def train_s(self) -> float:
        """Time of training, measured here."""
        return max((self.reported_at or self.now()) - self.ready_at, 1e-6)

    @property
    def data_wait_s(self) -> float:
        """Part of that time in which the trainer reports to have waited for data."""
        return min(self.waited_s, self.train_s)

    def _work(self, samples: int, batches: int) -> None:
        """Refuse more work than was assigned; a batch may end where a slice does."""
        most, spans = (self.plan.samples, len(self.plan.spans)) if self.plan is not None else (0, 0)
        _limit(f"samples of round {self.number + 1}", samples, 0, most)
        _limit(f"batches of round {self.number + 1}", batches, 0, 0 if self.plan is None else self.plan.batches + spans)

    def _passed_s(self) -> float:
        return (self.now() - self.began) * SLACK + SLACK_S


def _limit(what: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        allowed = f"{least} to {most}" if least else f"up to {most}"
        raise BridgeError("MSG005", what, got=str(value), allowed=allowed)


def told_of_policies(rl: RL, tokenizer: PackedTokenizer) -> dict[str, Any]:
    """Return the parts of a job's definition that trainers of policies need: the table, and the tokenizer's files."""
    table = rl.model_dump(mode="json", exclude={"generation": {"server"}, "reward": {"judge"}})
    files = {name: b64encode(content).decode() for name, content in tokenizer.files}
    return {"rl": redacted_tree(table), "tokenizer": files}


def figures_of(rl: RL) -> Mapping[str, Bounds] | None:
    """Return the figures that evaluations have, with their bounds; None without reinforcement learning.

    A reward model tells no right response, so where it is the first function, there is no share of them.
    """
    if rl.algorithm is None:
        return None
    samples = float(rl.evaluation.samples)
    found = {
        "reward": Bounds(samples),
        "response_tokens": Bounds(samples, 0.0, float(rl.generation.max_response_tokens)),
        "truncated": Bounds(samples, 0.0, 1.0),
    }
    first = {name for functions in (rl.reward.functions, *rl.reward.by_task.values()) for name in functions[:1]}
    if first <= {MODEL}:
        return found
    return found | {f"pass@{count}": Bounds(1.0, 0.0, 1.0) for count in (1, rl.evaluation.samples)}


def with_responses(rl: RL, prompt: Contents) -> Contents:
    """Return the contents of a sample with its responses, which a loss is a mean over; of other jobs they stay."""
    if rl.algorithm is None:
        return prompt
    longest = rl.generation.max_response_tokens
    return Contents(rl.group_size * (prompt.tokens + longest), max(prompt.positions, rl.group_size * longest))
