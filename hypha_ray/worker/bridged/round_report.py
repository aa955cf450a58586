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
from hypha_ray.bridge.conversation import LARGEST
from hypha_ray.config.rl import MODEL, RL
from hypha_ray.errors import BridgeError
from hypha_ray.model.tokenizers import PackedTokenizer
from hypha_ray.texts import redacted_tree
from hypha_ray.types import Arrays, Flat, Plan

CLOCK_RATIO = 1.01
"""Largest ratio of the trainer's clock to ours."""
CLOCK_SLACK_S = 1.0
"""Further seconds by which the trainer's times may exceed ours."""
NOT_NEGATIVE = {"seconds", "data_wait_s", "learning_rate", "gradient_norm"}


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """Upper bounds for one sample: its tokens (0 if not text) and its scored positions."""

    tokens: int = 0
    positions: int = 1

    def combined(self, limits: SampleLimits) -> SampleLimits:
        """The larger one of each bound."""
        return SampleLimits(max(self.tokens, limits.tokens), max(self.positions, limits.positions))


UNLIMITED = SampleLimits(2**31, 2**31)


@dataclass(frozen=True, slots=True)
class FigureBounds:
    """Bounds of a figure in an evaluation."""

    weight: float
    """Largest weight of one sample."""
    least: float = -LARGEST
    """Smallest mean."""
    most: float = LARGEST
    """Largest mean."""


def limits_of(arrays: Arrays) -> SampleLimits:
    """Limits for each sample of these arrays, whose first axis counts samples."""
    tokens = 0
    positions = 1
    for name, array in arrays.items():
        elements_per_sample = array.size // len(array)
        if name == "input_ids":
            tokens = elements_per_sample
        if name == "input_ids" or "labels" in name or "mask" in name:
            positions = max(positions, elements_per_sample)
    return SampleLimits(tokens, positions)


@dataclass(slots=True)
class RoundReport:
    """One round: its work as it was sent to a trainer, and its results as the trainer reports them.

    Times are in seconds of a monotonic clock.
    """

    number: int
    now: Callable[[], float]
    theta: Sequence[Flat] = ()
    """Weights at its beginning, by fragment; empty if payloads aren't encoded as differences to them."""
    theta_sha256: str | None = None
    """Hash of the weights, which the trainer's first merge proves; None for later merges."""
    began: float = 0.0
    plan: Plan | None = None
    """The longest plan, which a shorter one may have corrected; None before the first."""
    sample_limits: SampleLimits = SampleLimits()
    """Limits for each sample of the plan."""
    samples: int = 0
    """Number of reported samples."""
    batches: int = 0
    """Number of reported batches."""
    scored: int = 0
    """Number of reported scored positions; samples, if the trainer doesn't count positions."""
    seconds: float = 0.0
    waited_s: float = 0.0
    ready_at: float = 0.0
    """Time from which the trainer had samples, and no evaluation to do."""
    reported_at: float | None = None
    merged: bool = False
    evaluated: bool = False
    handed_over: bool = False

    def is_current(self, kind: str, round_number: int) -> bool:
        """Whether a message of this kind is of this round; one of an earlier round is too late, and ignored.

        Raises:
            BridgeError: MSG005 its round hasn't begun.

        """
        _check_range(f"round of the {kind}", round_number, 0, self.number)
        return round_number == self.number

    def assign(self, plan: Plan, sample_limits: SampleLimits) -> None:
        """Record that a plan is about to be sent."""
        if self.plan is None or not self.plan.spans:
            self.ready_at = self.now()
        if self.plan is None or plan.samples > self.plan.samples:
            self.plan = plan
        self.sample_limits = sample_limits

    def merge(self, message: pb.Merged) -> None:
        """Record that the trainer has the weights."""
        _check_range("seconds of the merge", message.seconds, 0, self._passed_s())
        self.merged = True

    def evaluate(self, message: pb.Evaluation, figures: Mapping[str, FigureBounds] | None = None) -> None:
        """Record an evaluation; `figures` has the bounds of its figures."""
        samples = 0
        if self.plan is not None:
            samples = sum(span.samples for span in self.plan.evaluate)
        _check_range("positions that were evaluated", message.count, 0, samples * self.sample_limits.positions)
        for name, bounds in (figures or {}).items():
            figure = message.figures[name] if name in message.figures else pb.Figure()
            _check_range(f"weight of {name}", figure.weight, 0, samples * bounds.weight)
            _check_range(f"total of {name}", figure.total, bounds.least * figure.weight, bounds.most * figure.weight)
        self.evaluated = True
        if self.reported_at is None:
            self.ready_at = self.now()

    def report(self, samples: int, items: Mapping[str, float]) -> tuple[int, int]:
        """Record progress; returns its numbers of batches and of scored positions."""
        batches = items.get("batches", 1.0)
        scored = items.get("scored", samples)
        reported_samples = self.samples + samples
        reported_batches = self.batches + int(batches)
        self._check_work(reported_samples, reported_batches)
        _check_range("batches", batches, 1, samples)
        _check_range("scored positions", scored, 0, samples * self.sample_limits.positions)
        for name in NOT_NEGATIVE & items.keys():
            _check_range(f"metric {name}", items[name], 0, LARGEST)
        seconds = self.seconds + items.get("seconds", 0.0)
        waited_s = self.waited_s + items.get("data_wait_s", 0.0)
        _check_range("seconds of all batches", seconds, 0, self._passed_s())
        _check_range("seconds of all waits for data", waited_s, 0, self._passed_s())
        self.samples = reported_samples
        self.batches = reported_batches
        self.seconds = seconds
        self.waited_s = waited_s
        self.reported_at = self.now()
        self.scored += int(scored)
        return int(batches), int(scored)

    def tokens(self, tokens: float | None, samples: int) -> int | None:
        """Refuse more tokens than the samples can have; returns their number, or None for data without tokens."""
        tokens_of_sample = self.sample_limits.tokens
        _check_range("tokens", tokens or 0, 0, samples * max(1, tokens_of_sample))
        if tokens is None or not tokens_of_sample:
            return None
        return int(tokens)

    def hand_over(self, message: pb.Update) -> None:
        """Record that the result has arrived."""
        self._check_work(message.samples, message.batches)
        _check_range("batches", message.batches, 1, message.samples)
        self.scored += max(0, message.samples - self.samples)  # Samples that weren't reported count as scored.
        self.handed_over = True

    @property
    def train_s(self) -> float:
        """Time of training, measured here."""
        end = self.reported_at or self.now()
        return max(end - self.ready_at, 1e-6)

    @property
    def data_wait_s(self) -> float:
        """Part of the training time in which the trainer waited for data, by its reports."""
        return min(self.waited_s, self.train_s)

    def _check_work(self, samples: int, batches: int) -> None:
        """Refuse more work than was assigned; each slice may end with a short batch."""
        most_samples = 0
        most_batches = 0
        if self.plan is not None:
            most_samples = self.plan.samples
            most_batches = self.plan.batches + len(self.plan.spans)
        shown_round = self.number + 1
        _check_range(f"samples of round {shown_round}", samples, 0, most_samples)
        _check_range(f"batches of round {shown_round}", batches, 0, most_batches)

    def _passed_s(self) -> float:
        """Longest time since the beginning of the round that the trainer's clock may show."""
        passed_s = self.now() - self.began
        return passed_s * CLOCK_RATIO + CLOCK_SLACK_S


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        allowed = f"{least} to {most}" if least else f"up to {most}"
        raise BridgeError("MSG005", name, got=str(value), allowed=allowed)


def rl_definition(rl: RL, tokenizer: PackedTokenizer) -> dict[str, Any]:
    """Parts of a job's definition for reinforcement learning: the table ``rl`` and the tokenizer's files."""
    table = rl.model_dump(mode="json", exclude={"generation": {"server"}, "reward": {"judge"}})
    files = {name: b64encode(content).decode() for name, content in tokenizer.files}
    return {"rl": redacted_tree(table), "tokenizer": files}


def figure_bounds(rl: RL) -> Mapping[str, FigureBounds] | None:
    """Bounds of the figures in evaluations, by name; None without reinforcement learning.

    If each task's first reward function is a reward model, there is no ``pass@k``, because it calls no response right.
    """
    if rl.algorithm is None:
        return None
    samples = float(rl.evaluation.samples)
    bounds = {
        "reward": FigureBounds(samples),
        "response_tokens": FigureBounds(samples, 0.0, float(rl.generation.max_response_tokens)),
        "truncated": FigureBounds(samples, 0.0, 1.0),
    }
    first_functions: set[str] = set()
    for functions in (rl.reward.functions, *rl.reward.by_task.values()):
        first_functions.update(functions[:1])
    if first_functions <= {MODEL}:
        return bounds
    for count in (1, rl.evaluation.samples):
        bounds[f"pass@{count}"] = FigureBounds(1.0, 0.0, 1.0)
    return bounds


def with_responses(rl: RL, prompt: SampleLimits) -> SampleLimits:
    """Limits for a prompt with its group of responses; without reinforcement learning those of the sample itself."""
    if rl.algorithm is None:
        return prompt
    response_tokens = rl.generation.max_response_tokens
    tokens = rl.group_size * (prompt.tokens + response_tokens)
    positions = max(prompt.positions, rl.group_size * response_tokens)
    return SampleLimits(tokens, positions)
