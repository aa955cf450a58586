"""Choice of an exchange's settings: the first step of a ladder on which workers wait little enough.

Each step takes more off the link than the one before, and what it costs of the loss was measured. So H and the
compression grow with a slower link, and never shrink.

    16 bits ─► 8 bits and longer rounds ─► fragments behind training ─► 4 bits ─► longer rounds ─► 2 bits, late results
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from hypha_ray.simulation.exchange import (
    Circumstances,
    ExchangeEstimate,
    ExchangeSettings,
    ModelShape,
    estimate,
    merge_s,
)

LAYERS_OF_A_FRAGMENT: Final = 3
"""Layers of a fragment in Streaming DiLoCo."""
SHORT_LATENESS: Final = 0.1
"""Part of H that a result may be late: 10 of 100 steps cost nothing that could be measured."""
LONG_LATENESS: Final = 0.25
"""The same where nothing else is fast enough; half of H was measured to cost much."""
LEAST_OUTER_STEPS: Final = 10
"""Outer steps that a run should have of each weight."""
ROUND_LENGTHS: Final = (10, 20, 30, 50, 100, 200, 500, 1000)
"""Numbers of inner steps, H, that are proposed."""


@dataclass(frozen=True, slots=True)
class LadderStep:
    """One step of the ladder."""

    codec: str
    downward_codec: str
    steps: int
    """H, inner steps between two exchanges of a weight."""
    fragments: int = 1
    in_flight: int = 1
    lateness: float = 0.0
    """Part of H that a result may be late."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a job that the ladder keeps."""

    total_steps: int
    """Inner steps of each worker in the whole run."""
    overlaps: bool
    """Whether workers may train on while a fragment is exchanged."""
    encodes_weights: bool
    """Whether new weights may be encoded."""


@dataclass(frozen=True, slots=True)
class ExchangeChoice:
    """Settings that were chosen, with their estimate."""

    settings: ExchangeSettings
    estimate: ExchangeEstimate
    suffices: bool
    """Whether workers wait no longer than they should."""


AT_ONCE: Final = (
    LadderStep("fp32", "fp32", 10),
    LadderStep("bf16", "bf16", 10),
    LadderStep("bf16", "bf16", 20),
    LadderStep("bf16", "bf16", 30),
    LadderStep("int8", "int8", 30),
    LadderStep("int8", "int8", 50),
    LadderStep("int8", "int8", 100),
)
"""Steps without overlap that come first."""
BEHIND_TRAINING: Final = (
    LadderStep("int8", "int8", 100, fragments=2, lateness=SHORT_LATENESS),
    LadderStep("int8", "int8", 100, fragments=4, lateness=SHORT_LATENESS),
    LadderStep("int4", "int4", 100, fragments=4, lateness=SHORT_LATENESS),
    LadderStep("int4", "int4", 100, fragments=8, lateness=SHORT_LATENESS),
    LadderStep("int4", "int4", 200, fragments=8, lateness=SHORT_LATENESS),
    LadderStep("int4", "int4", 500, fragments=8, lateness=SHORT_LATENESS),
    LadderStep("int4", "int4", 500, fragments=8, in_flight=2, lateness=LONG_LATENESS),
    LadderStep("huffman2", "huffman3", 500, fragments=8, in_flight=2, lateness=LONG_LATENESS),
    LadderStep("huffman2", "huffman3", 1000, fragments=8, in_flight=2, lateness=LONG_LATENESS),
)
"""Further steps, for jobs and models with fragments."""
WITHOUT_OVERLAP: Final = (
    LadderStep("int4", "int4", 100),
    LadderStep("int4", "int4", 200),
    LadderStep("int4", "int4", 500),
    LadderStep("huffman2", "huffman3", 500),
    LadderStep("huffman2", "huffman3", 1000),
)
"""Further steps for other jobs."""


def choose(circumstances: Circumstances, limits: Limits, most_overhead: float) -> ExchangeChoice:
    """Choose the first step on which workers wait for at most that part of the time; otherwise the last one."""
    choice = None
    for settings in ladder(circumstances, limits, most_overhead):
        figures = estimate(settings, circumstances)
        choice = ExchangeChoice(settings, figures, figures.overhead <= most_overhead)
        if choice.suffices:
            break
    assert choice is not None
    return choice


def sufficient_scale(circumstances: Circumstances, limits: Limits, most_overhead: float) -> float | None:
    """Factor of all rates with which the last step would suffice, to 1 %; None if no factor suffices."""

    def suffices(factor: float) -> bool:
        link = circumstances.link.scaled(factor)
        head = circumstances.head.scaled(factor)
        faster = replace(circumstances, link=link, head=head)
        return choose(faster, limits, most_overhead).suffices

    low = 1.0
    high = 1e6
    if not suffices(high):
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high


def ladder(circumstances: Circumstances, limits: Limits, most_overhead: float) -> Iterator[ExchangeSettings]:
    """Settings of each step that the job and its model allow, with rounds that suit the servers."""
    least_round_steps = least_steps(circumstances, most_overhead)
    most_round_steps = max(1, limits.total_steps // LEAST_OUTER_STEPS)

    def settings(step: LadderStep, fragments: int) -> ExchangeSettings:
        steps = min(max(step.steps, least_round_steps), most_round_steps)
        return _settings(replace(step, steps=steps), fragments, circumstances, limits)

    for step in AT_ONCE:
        yield settings(step, 1)
    fragments = most_fragments(circumstances.model)
    if not limits.overlaps or fragments < 2 or most_round_steps < 2 * fragments:
        for step in WITHOUT_OVERLAP:
            yield settings(step, 1)
        return
    for step in BEHIND_TRAINING:
        yield settings(step, min(step.fragments, fragments))


def least_steps(circumstances: Circumstances, most_overhead: float) -> int:
    """H below which merging and messages alone take half of the time that workers may wait, on any link."""
    merging_s = merge_s(circumstances.model.parameters, circumstances.workers)
    fixed_s = merging_s + 4 * max(circumstances.link.latency_s, circumstances.head.latency_s)
    for steps in ROUND_LENGTHS:
        train_s = steps * circumstances.step_s
        if fixed_s <= most_overhead / 2 * (train_s + fixed_s):
            return steps
    return ROUND_LENGTHS[-1]


def most_fragments(model: ModelShape) -> int:
    """Fragments of three layers each, a power of two up to 8; 8 if the layers aren't known."""
    if model.layers is None:
        return 8
    fragments = 8
    while fragments > max(1, model.layers // LAYERS_OF_A_FRAGMENT):
        fragments //= 2
    return fragments


def _settings(step: LadderStep, fragments: int, circumstances: Circumstances, limits: Limits) -> ExchangeSettings:
    """Turn a step into settings; the delay is the least that hides the exchange, as far as results may be late."""
    downward_codec = step.downward_codec if limits.encodes_weights else "fp32"
    round_steps = math.ceil(step.steps / fragments)
    steps = round_steps * fragments
    in_flight = min(step.in_flight, fragments)
    undelayed = ExchangeSettings(step.codec, downward_codec, steps, fragments, 0, in_flight)
    latest_step = math.floor(step.lateness * steps) - undelayed.lateness
    most_delay = min(latest_step, round_steps - 1)
    if in_flight > 1 and most_delay < 0:
        undelayed = ExchangeSettings(step.codec, downward_codec, steps, fragments, 0, 1)
        most_delay = min(math.floor(step.lateness * steps), round_steps - 1)
    figures = estimate(undelayed, circumstances)
    unhidden_s = figures.exchange_s - (undelayed.in_flight - 1) * figures.train_s
    delay_steps = math.ceil(unhidden_s / min(circumstances.batch_s))
    delay_steps = max(0, min(delay_steps, most_delay))
    return ExchangeSettings(step.codec, downward_codec, steps, fragments, delay_steps, undelayed.in_flight)
